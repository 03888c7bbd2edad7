"""gpt3/train on the host graph: graphed steps against eager ones, bit for bit; what a step is made of."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import flops
from gpt3 import train
from gpt3.config import PRESETS
from gpt3.state import State, resolve
from graph_worth.made_variant import Unsupported
from tests.helpers import contracts, gloo_ranks
from tests.helpers.followed import difference, follow
from tests.helpers.gpt3_case import CPU, SMALL

ROOT = Path(__file__).resolve().parents[2]
TINY = replace(PRESETS["tiny"], layer="torch")
WIDE = replace(TINY, hidden=128, head_dim=32, ffn=256, sequence=64)
# A history that six steps go round twice.
SHORT = replace(SMALL, layers=2, microbatches=2, amax_history=3, batches=3, lr=1e-3)
GRAPHED = ("graph_layer", "graph_layer_optimizer")


def made(name, state):
    return contracts.made("gpt3", name, state)


def follow_eager(state, count):
    return follow(state, lambda index: train.eager_step(state, index), count)


# --- graphs against eager


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 1, "microbatches": 1},
        {"layers": 3, "microbatches": 3, "microbatch": 2, "precision": "bf16"},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "fp8",
)
def test_graphs_equal_eager_bit_for_bit(changes):
    state = State(replace(SHORT, **changes), CPU)
    eager = follow_eager(state, 6)
    for name in GRAPHED:
        variant = made(name, state)
        before = variant.capture.num_replays
        assert difference(follow(state, variant.step, 6), eager, state) == "", name
        promised = sum(variant.replays_of(index) for index in range(6))
        assert variant.capture.num_replays - before == promised > 0
        graphs, replays = contracts.model_of("gpt3", state).promises(name)
        assert promised == 6 * replays and len(variant.capture.pools) == 1
        assert replays == 2 * state.config.layers * state.config.microbatches + (name == "graph_layer_optimizer")
        assert sum(len(pool.graphs) for pool in variant.capture.pools) == graphs == replays
        variant.close()


@pytest.mark.parametrize("name", GRAPHED)
def test_replays_read_the_batch_that_was_loaded_and_mix_with_eager_steps(name):
    """Other text, other losses; the eager step agrees."""
    state = State(SHORT, CPU)
    variant = made(name, state)
    losses = follow(state, variant.step, 4)[0]
    for batch in state.batches:
        batch["tokens"] = (batch["tokens"] + 1) % SHORT.vocab

    def mixed(index):
        if index % 3 == 2:
            train.eager_step(state, index)
        else:
            variant.step(index)

    assert difference(follow(state, mixed, 4), follow_eager(state, 4), state) == ""
    assert all(now != before for now, before in zip(state.read_losses(4), losses, strict=True))


def test_the_optimizers_graph_follows_what_changes_from_step_to_step():
    """The learning rate of a schedule, filled in before each step; Adam's count of steps goes on by itself."""
    state = State(SHORT, CPU)
    variant = made("graph_layer_optimizer", state)

    def scheduled(step, factor):
        def both(index):
            state.adam.lr.fill_(SHORT.lr * factor**index)
            step(index)

        return both

    def eager(index):
        train.eager_step(state, index)

    constant = follow_eager(state, 4)
    falling = follow(state, scheduled(eager, 0.5), 4)
    assert (falling[2][-1] != constant[2][-1]).any()
    assert difference(follow(state, scheduled(variant.step, 0.5), 4), falling, state) == ""
    # And none at all: what moves is Adam's count and its moments.
    still = follow(state, scheduled(variant.step, 0.0), 3)
    names = [name for name, _ in state.named_state()]
    masters = [names.index(name) for name in names if name.endswith(".master")]
    assert (still[2][1, masters] == still[2][2, masters]).all()
    assert (still[2][1, names.index("optimizer.step")] != still[2][2, names.index("optimizer.step")]).all()


def test_the_optimizer_is_in_its_graph_and_the_rest_of_the_step_is_not():
    state = State(SHORT, CPU)
    variant = made("graph_layer_optimizer", state)
    operators = variant.pool.graphs[-1].operators()
    assert sum("_fused_adamw_" in name for name in operators) == 1
    assert operators[-1].startswith("aten._foreach_copy_"), "parameters follow their masters last"
    assert not any("_fused_adamw_" in name for graph in variant.pool.graphs[:-1] for name in graph.operators())
    # Nothing of the step calls the optimizer beside its graph.
    state.adam.step = None
    variant.step(0)


# --- what a step is


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_gradients_are_accumulated_over_all_microbatches(precision):
    """The accumulated gradient is neither the last microbatch's nor the first's, but their mean."""
    state = State(replace(WIDE, precision=precision, microbatches=3, amax_history=1), CPU)
    batch = state.batches[0]

    def gradients(picked):
        state.reset()
        # A norm that is not above the clip's bound is left alone by the optimizer.
        state.adam.clip.fill_(1e9)
        state.batches[0] = {name: rows[picked] for name, rows in batch.items()}
        train.eager_step(state, 0)
        return [parameter.main_grad.clone() for parameter in state.parameters], float(state.loss)

    mean, mean_loss = gradients([0, 1, 2])
    alone = [gradients([index] * 3) for index in range(3)]
    assert mean_loss == pytest.approx(numpy.log(256), rel=0.05)
    assert mean_loss == pytest.approx(sum(loss for _, loss in alone) / 3, rel=1e-3)
    for index, (name, _) in enumerate(state.named_parameters()):
        parts = [gradient[index] for gradient, _ in alone]
        wanted = sum(parts) / 3
        assert float((mean[index] - wanted).norm() / wanted.norm()) < 0.05, name
        for part in parts:
            assert float((mean[index] - part).norm() / wanted.norm()) > 0.2, name


@pytest.mark.parametrize("variant, precision", [("eager", "bf16"), *((name, "fp8") for name in ("eager", *GRAPHED))])
def test_a_step_owes_nothing_to_gradients_left_over(variant, precision):
    state = State(replace(SHORT, precision=precision), CPU)
    run = made(variant, state)
    clean = follow(state, run.step, 3)

    def step(index):
        for parameter in state.parameters:
            parameter.main_grad.fill_(1e6)
        run.step(index)

    assert difference(follow(state, step, 3), clean, state) == ""


def test_flops():
    """torch's counter counts attention in full; the script's figure leaves out the half that is masked."""
    config = replace(TINY, precision="bf16", layers=3, microbatches=3, microbatch=2)
    state = State(config, CPU)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        train.eager_step(state, 0)
    described = train.build(config, CPU, SimpleNamespace(rank=0, world_size=1))
    masked_half = 3 * 2 * config.sequence**2 * config.heads * config.head_dim * config.layers * 6
    assert described.flops_convention == flops.CAUSAL_HALF
    assert described.flops == counter.get_total_flops() - masked_half
    assert described.items == 6 * config.sequence


# --- the state


@pytest.mark.slow
def test_close_releases_the_graphs_memory():
    """Closed variants that are still referred to, with pools of 9 MB or more each."""
    state = State(replace(WIDE, sequence=256, microbatches=1, microbatch=2, precision="bf16"), CPU)

    def make():
        variant = made("graph_layer", state)
        held = variant.pool.bytes()
        variant.close()
        assert variant.pool.bytes() == 0 and not variant.pool.graphs
        return variant, held

    kept = [make()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kept += [make() for _ in range(3)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert kept[0][1] > 9e6
    assert grown < 0.5 * sum(held for _, held in kept[1:])


# --- variants that cannot run here, and arguments as they run here


def test_variants_that_need_a_gpu_say_so():
    state = State(replace(SHORT, precision="bf16"), CPU)
    for name in ("compile", "graph_layer_compiled", "reduce_overhead", "graph_layer_te"):
        with pytest.raises(Unsupported, match="GPU"):
            made(name, state)


def test_resolve_names_what_stands_in_for_fp8():
    assert resolve(PRESETS["tiny"], CPU) == (TINY, ["FP8 emulated: operands rounded to FP8, GEMMs in bf16"])
    assert resolve(replace(TINY, precision="bf16"), CPU) == (replace(TINY, precision="bf16"), [])
    with pytest.raises(ValueError, match="--layer te needs a GPU; take --layer torch"):
        resolve(replace(TINY, layer="te"), CPU)
    with pytest.raises(ValueError, match="run --preset tiny"):
        resolve(replace(PRESETS["bench"], layers=9600), CPU)


# --- processes


def on_torchrun(flags):
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gpt3.train")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launch, *flags]
    answer = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def forked(flags):
    """Two ranks with torch imported, which torchrun's would do for three seconds each."""
    said, nothing = gloo_ranks.run_script("gpt3.train", flags, world_size=2)
    assert not nothing
    return said


def two_ranks(path, variant, flags, run=forked):
    """The state hashes of --parity, as rank 0 writes and prints them."""
    said = run(["--variant", variant, "--record", str(path), "--parity", *flags])
    result = json.loads(path.read_text())
    assert result["status"] == "pass", result["message"]
    assert result["env"]["world_size"] == 2 and result["replays"] == result["expected_replays"]
    # Rank 0 alone writes and prints.
    lines = said.splitlines()
    assert sum(line.startswith(f"gpt3/{result['preset']}  {variant} ") for line in lines) == 1
    return result["state_hashes"]


@pytest.mark.slow
def test_two_ranks_graphed_equal_two_ranks_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = ("--steps", "5")
    eager = two_ranks(tmp_path / "eager.json", "eager", flags, on_torchrun)
    assert len(set(eager)) == 5
    for name in GRAPHED:
        assert two_ranks(tmp_path / f"{name}.json", name, flags) == eager
