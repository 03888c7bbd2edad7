"""In how many of many calls with one input attention gives other bits, and its microseconds.

A kernel that adds in the order in which its blocks end gives other bits from call to call, and two runs of one training
part where it does. On a GPU each kind of attention is called in three ways: eagerly, eagerly behind three matrix
products, and replayed from a graph behind them; elsewhere plain attention is called eagerly. All are compared with what
most eager calls give, so a kind whose replays have bits of their own differs in all of them. The microseconds are of
forward and backward without the products, replayed on a GPU. Nothing is recorded.

    python -m llama2_lora.attention_check                              tokens and heads of bench, without a GPU of tiny
    python -m llama2_lora.attention_check --preset full --calls 100
"""

import time
from collections import Counter
from dataclasses import replace
from functools import partial

import torch

from common.config import Parser, mistakes_in_one_line, parse_with_fields, require_known
from common.state_hash import tensor_hash
from common.variant import synchronize
from llama2_lora.attention import CudnnAttention, FlashAttention, PlainAttention
from llama2_lora.config import PRESETS, Config

PROGRAM = "attention_check"
NAMES = ("output", "dq", "dk", "dv")
# Calls in a timed graph, and products of SIDE x SIDE in front of a call: 412 GFLOP, half a millisecond on an H200.
TIMED, PRODUCTS, SIDE = 20, 3, 4096


def parse(argv=None) -> tuple[Config, int]:
    """(configuration, calls of each kind) of the command line; a ValueError names the flag to change."""
    parser = Parser(prog=f"python -m llama2_lora.{PROGRAM}", description=__doc__.splitlines()[0], allow_abbrev=False)
    default = "bench" if torch.cuda.is_available() else "tiny"
    parser.add_argument("--preset", metavar="NAME", default=default, help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--calls", type=int, default=1000, metavar="N", help="calls of each kind")
    values, fields = parse_with_fields(parser, Config, argv)
    require_known("preset", values["preset"], PRESETS)
    if values["calls"] < 2:
        raise ValueError(f"--calls {values['calls']}: takes a number from 2 up")
    config = replace(PRESETS[values["preset"]], **fields)
    if config.cp > 1:
        raise ValueError(f"--cp {config.cp}: one rank is checked, take --cp 1 and the --sequence of its share")
    return config, values["calls"]


def cases(config: Config, device):
    """(name, attention, deterministic) of what this device can run."""
    if device.type == "cpu":
        positions = torch.arange(config.sequence)
        return [("plain", PlainAttention(config, {"positions": positions}), False)]
    flash = FlashAttention(config, {"cu_seqlens": torch.tensor([0, config.sequence], dtype=torch.int32, device=device)})
    cudnn = CudnnAttention(config, {})
    return [(each.name, each, wanted) for each in (cudnn, flash) for wanted in (False, True)]


def call(config: Config, attention, device):
    """A function that runs forward and backward on one random input -> (output, dq, dk, dv), bf16."""
    generator = torch.Generator(device).manual_seed(0)
    heads = config.heads, config.kv_heads, config.kv_heads
    q, k, v, grad = (
        torch.randn(config.tokens, number, config.head_dim, generator=generator, device=device).bfloat16()
        for number in (*heads, config.heads)
    )

    def run():
        output, rest = attention.forward(q, k, v)
        return output, *attention.backward(grad.flatten(1), q, k, v, output, rest)

    return run


def ways(run, device):
    """way -> a function with the same results: eager; on a GPU also behind other work and replayed."""
    made = {"eager": run}
    if device.type == "cuda":
        matrix = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)

        def behind():
            for _ in range(PRODUCTS):
                matrix @ matrix
            return run()

        replay, results = captured(behind)
        made |= {"behind": behind, "replayed": lambda: (replay(), results)[1]}
    return made


def captured(function):
    """(the replay of a call, what it returned), after one call outside."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        results = function()
    return graph.replay, results


def differing(function, num_calls: int, usual: list[int] | None = None) -> tuple[list[int], list[int]]:
    """(of each result, the calls whose bits are not the usual ones, those bits' hashes).

    usual: of other calls; what most of these calls give unless told.
    """
    counts = [Counter() for _ in NAMES]
    for _ in range(num_calls):
        for count, tensor in zip(counts, function(), strict=True):
            count[int(tensor_hash(tensor))] += 1
    usual = usual or [count.most_common(1)[0][0] for count in counts]
    return [num_calls - count[each] for count, each in zip(counts, usual, strict=True)], usual


def microseconds(run, device) -> float:
    """Of a call, over TIMED of them; on a GPU replayed, so that the host does not count."""

    def many():
        for _ in range(TIMED):
            run()

    function = captured(many)[0] if device.type == "cuda" else many
    function()
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return 1e6 * (time.perf_counter() - start) / TIMED


def report(config: Config, num_calls: int, say=print) -> None:
    """A line for each kind of attention and way to call it, said as soon as it is known."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(f"{gpu}, torch {torch.__version__}; {config.tokens} tokens, {config.heads} heads in {config.kv_heads} groups")
    say(f"Of {num_calls} calls with one input: how many differ in a bit from what most eager calls give.")
    say(f"{'attention':32} {'called':9}" + "".join(f"{each:>8}" for each in NAMES) + f"{'us, alone':>11}")
    fill = torch.utils.deterministic.fill_uninitialized_memory
    # Asked for deterministic kernels, torch would fill all new memory as well.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        for kind, attention, deterministic in cases(config, device):
            torch.use_deterministic_algorithms(deterministic)
            name = kind + ", told to be deterministic" * deterministic
            try:
                run = call(config, attention, device)
                taken, usual = f"{microseconds(run, device):11.1f}", None
                for way, function in ways(run, device).items():
                    counts, usual = differing(function, num_calls, usual)
                    say(f"{name:32} {way:9}{''.join(f'{each:8}' for each in counts)}{taken}")
                    taken = ""
            except RuntimeError as error:
                say(f"{name:32} cannot run: {str(error).splitlines()[0]}")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


if __name__ == "__main__":
    with mistakes_in_one_line("llama2_lora", PROGRAM):
        report(*parse(), say=partial(print, flush=True))
