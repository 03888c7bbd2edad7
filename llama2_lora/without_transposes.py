"""What the transposes of lean layers cost: steps with them, and steps that leave them out and compute wrong numbers.

An FP8 dgrad GEMM on Hopper reads the transposed weight. Steps without transposes multiply by what happens to lie in its
place, so their losses and gradients mean nothing; everything else takes its usual time. The times are printed and
nothing is recorded: a run of this script is never a result. Layers that hold their transposes make none in a step, so
--memory-gib must leave no room to hold them all (76 GiB hold none at 1024 tokens, see docs/memory_plan.md).

    python -m llama2_lora.without_transposes --preset bench --memory-gib 76
    python -m llama2_lora.without_transposes --preset bench --memory-gib 76 --transposes beside --steps 40
"""

import time
from dataclasses import replace

import numpy
import torch

from common.config import Arguments, Parser, Run, mistakes_in_one_line, parse_with_fields, require_known
from common.variant import synchronize
from llama2_lora import train
from llama2_lora.config import FP8, PRESETS, Config
from llama2_lora.resolve import resolve
from llama2_lora.state import State

PROGRAM = "without_transposes"


def parse(argv=None) -> Arguments:
    """The arguments of the command line; a ValueError names the flag to change."""
    parser = Parser(prog=f"python -m llama2_lora.{PROGRAM}", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--preset", metavar="NAME", default="tiny", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps of each kind, after 3 others")
    values, fields = parse_with_fields(parser, Config, argv)
    require_known("preset", values["preset"], PRESETS)
    config = replace(PRESETS[values["preset"]], **fields)
    if values["steps"] < 1:
        raise ValueError(f"--steps {values['steps']}: takes a number from 1 up")
    if config.precision not in FP8:
        raise ValueError(f"--precision {config.precision} has no transposes: take {' or '.join(FP8)}")
    if config.layer != "lean":
        raise ValueError(f"--layer {config.layer}: only lean layers can leave transposes out")
    return Arguments(config=config, run=Run(variant="graph", **values))


def median_ms(state: State, variant: str, num_steps: int) -> float:
    """Milliseconds of a step, host and device, one step at a time."""
    made, times = train.MAKE_VARIANT[variant](state), []
    for index in range(3 + num_steps):
        synchronize()
        start = time.perf_counter()
        made.step(index)
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    made.close()
    return float(numpy.median(times[3:]))


def compare(args) -> str:
    """A table: steps of eager and graph, with transposes and without."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        # Captures need a stream of their own, and eager must not differ.
        torch.cuda.set_stream(torch.cuda.Stream(device))
    args, _ = resolve(args, device)
    config, state = args.config, State(args.config, device, "lean")
    num_held = sum(state.stack.holds_transposes)
    if num_held == config.layers:
        raise ValueError(f"all {num_held} layers hold their transposes and make none: take a smaller --memory-gib")
    lines = [
        f"{num_held} of {config.layers} layers hold their transposes; --transposes {config.transposes}",
        f"{'ms a step':9} {'with':>10} {'without, WRONG':>16} {'difference':>12}",
    ]
    make_transpose = state.stack.transpose
    for variant in ("eager", "graph"):
        state.stack.transpose = make_transpose
        with_ms = median_ms(state, variant, args.run.steps)
        state.stack.transpose = lambda weight, out: None
        without_ms = median_ms(state, variant, args.run.steps)
        lines.append(f"{variant:9} {with_ms:10.3f} {without_ms:16.3f} {with_ms - without_ms:12.3f}")
    lines.append("Steps without transposes compute wrong numbers. These times are no result; nothing was recorded.")
    return "\n".join(lines)


if __name__ == "__main__":
    with mistakes_in_one_line("llama2_lora", PROGRAM):
        print(compare(parse()))
