"""gpt3/train on the host graph: graphed steps against eager ones, bit for bit; what a step is made of."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common import variant_table
from common.config import Arguments, Run
from common.measuring.state_hash import StateHasher
from common.training import flops
from common.variant import Unsupported
from gpt3 import train
from gpt3.config import PRESETS
from gpt3.state import State, held_out_batches, hyperparameters, training_batches
from gpt3.variants import VARIANTS
from gpt3.workload import resolve, workload
from tests.helpers.made import made
from tests.helpers.megatron_files import write_megatron

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = replace(PRESETS["tiny"], layer="torch")
# A history that ten steps go round more than twice.
SHORT = replace(TINY, amax_history=4, batches=3)
RUN = Run(preset="tiny", variant="eager")
GRAPHED = ("graph_layer", "graph_layer_optimizer", "graph_layer_overlap")
TE_GRAPHS = ("graph_layer_te", "graph_layer_te_slot", "graph_layer_te_default")


def follow(state, step, count):
    """Losses, gradient norms and hashes of all state after each of `count` steps from the seeded start."""
    state.reset()
    hasher = StateHasher(state.named_state())
    for index in range(count):
        step(index)
        hasher.update()
    return state.read_losses(count), state.read_grad_norms(count), hasher.hashes()


def follow_eager(state, count):
    return follow(state, lambda index: train.eager_step(state, index), count)


def assert_equal(ours, eager, state):
    names = [name for name, _ in state.named_state()]
    differ = numpy.argwhere(ours[2] != eager[2])
    assert not len(differ), f"step {differ[0][0]}: {names[differ[0][1]]}"
    assert ours[:2] == eager[:2]


# --- graphs against eager


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp8_current"},
        {"layers": 3, "microbatches": 3},
        {"layers": 1, "microbatches": 1},
        {"layers": 3, "microbatches": 3, "microbatch": 2, "precision": "bf16"},
    ],
    ids=lambda changes: ",".join(f"{name}={value}" for name, value in changes.items()) or "tiny",
)
def test_graphs_equal_eager_bit_for_bit(changes):
    state = State(replace(SHORT, **changes), CPU)
    eager = follow_eager(state, 10)
    assert_equal(follow_eager(state, 10), eager, state)
    for name in GRAPHED:
        variant = made(VARIANTS, name, state)
        before = variant.capture.num_replays
        assert_equal(follow(state, variant.step, 10), eager, state)
        promised = sum(variant.replays_of(index) for index in range(10))
        assert variant.capture.num_replays - before == promised > 0
        graphs, replays = VARIANTS[name].promised(state.config)
        assert promised == 10 * replays and len(variant.capture.pools) == (2 if name == "graph_layer_overlap" else 1)
        assert replays == 2 * state.config.layers * state.config.microbatches + (name == "graph_layer_optimizer")
        assert sum(len(pool.graphs) for pool in variant.capture.pools) == graphs == replays
        variant.close()


@pytest.mark.parametrize(
    "name, precision", [*((name, "fp8") for name in GRAPHED), ("graph_layer", "bf16"), ("graph_layer", "fp8_current")]
)
def test_evaluation_between_steps_leaves_replays_right(name, precision):
    state = State(replace(TINY, precision=precision), CPU)

    def with_evaluation(step):
        seen = []

        def both(index):
            step(index)
            if index % 3 == 1:
                with torch.no_grad():
                    hidden = state.embedding(state.inputs["tokens"][0])
                    with state.fp8.forward():
                        for layer in state.layers:
                            hidden = layer(hidden, is_first_microbatch=True)
                    seen.append(float(state.embedding.loss(hidden, state.inputs["targets"][0])))

        return follow(state, both, 6), seen

    eager, eager_losses = with_evaluation(lambda index: train.eager_step(state, index))
    variant = made(VARIANTS, name, state)
    graphed, losses = with_evaluation(variant.step)
    assert_equal(graphed, eager, state)
    assert losses == eager_losses and len(set(losses)) == 2


@pytest.mark.parametrize("name, precision", [*((name, "fp8") for name in ("eager", *GRAPHED)), ("graph_layer", "bf16")])
def test_evaluation_leaves_training_as_it_was(name, precision):
    state = State(replace(TINY, precision=precision), CPU)
    variant = made(VARIANTS, name, state)
    expected = follow(state, variant.step, 5)
    losses = []

    def step(index):
        variant.step(index)
        if index % 2 == 1:
            before = [tensor.clone() for _, tensor in state.named_state()]
            losses.append(state.evaluate())
            assert losses[-1] == state.evaluate()
            assert all(map(torch.equal, before, (tensor for _, tensor in state.named_state())))

    assert_equal(follow(state, step, 5), expected, state)
    assert len(set(losses)) == 2 and all(3 < loss < 6 for loss in losses)


def test_evaluation_reads_text_that_no_rank_trains_on(tmp_path):
    write_megatron(tmp_path / "places", [range(4000)])
    config = replace(TINY, sequence=16, vocab=4096, data=str(tmp_path / "places"))

    def places(batches):
        return {int(place) for batch in batches for rows in batch.values() for place in rows.ravel()}

    held_out = places(held_out_batches(config, data_ranks=3))
    assert len(held_out) > 100
    for rank in range(3):
        assert not held_out & places(training_batches(config, CPU, rank))


def test_evaluation_needs_text_that_training_leaves_out(tmp_path):
    (tmp_path / "short.txt").write_text("a" * 80)
    state = State(replace(TINY, sequence=16, data=str(tmp_path)), CPU)
    with pytest.raises(Unsupported, match="hold out"):
        state.evaluate()


def test_hyperparameters_are_those_of_the_step():
    said = hyperparameters(replace(TINY, microbatches=3, microbatch=2), data_ranks=4)
    assert said["global_batch_size"] == 24 and said["gradient_accumulation_steps"] == 3
    state = State(TINY, CPU)
    named = {name: said[f"opt_adamw_{name}"] for name in ("beta_1", "beta_2", "epsilon", "weight_decay")}
    betas, lr = (named["beta_1"], named["beta_2"]), said["opt_base_learning_rate"]
    masters = [torch.nn.Parameter(master.clone()) for master in state.adam.masters]
    adamw = torch.optim.AdamW(masters, lr, betas, named["epsilon"], named["weight_decay"])
    for master, parameter in zip(masters, state.parameters, strict=True):
        parameter.main_grad.normal_()
        master.grad = parameter.main_grad.clone()
    torch.nn.utils.clip_grad_norm_(masters, said["opt_gradient_clip_norm"])
    adamw.step()
    state.adam.step()
    torch.testing.assert_close(state.adam.masters, [master.detach() for master in masters])


@pytest.mark.parametrize("name", GRAPHED)
def test_eager_and_graphed_steps_mix(name):
    state = State(TINY, CPU)
    eager = follow_eager(state, 6)
    variant = made(VARIANTS, name, state)

    def step(index):
        if index % 3 == 2:
            train.eager_step(state, index)
        else:
            variant.step(index)

    assert_equal(follow(state, step, 6), eager, state)


@pytest.mark.parametrize("name", GRAPHED)
def test_replays_read_the_batch_that_was_loaded(name):
    """Other text, other losses; the eager step agrees."""
    state = State(TINY, CPU)
    variant = made(VARIANTS, name, state)
    losses = follow(state, variant.step, 4)[0]
    for batch in state.batches:
        batch["tokens"] = (batch["tokens"] + 1) % TINY.vocab
    assert_equal(follow(state, variant.step, 4), follow_eager(state, 4), state)
    assert all(now != before for now, before in zip(state.read_losses(4), losses, strict=True))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_the_optimizers_graph_follows_what_changes_from_step_to_step(precision):
    """The learning rate of a schedule, filled in before each step; Adam's count of steps goes on by itself."""
    state = State(replace(TINY, precision=precision), CPU)
    variant = made(VARIANTS, "graph_layer_optimizer", state)

    def scheduled(step, factor):
        def both(index):
            state.adam.lr.fill_(TINY.lr * factor**index)
            step(index)

        return both

    def eager(index):
        train.eager_step(state, index)

    constant = follow_eager(state, 6)
    falling = follow(state, scheduled(eager, 0.5), 6)
    assert (falling[2][-1] != constant[2][-1]).any()
    assert_equal(follow(state, scheduled(variant.step, 0.5), 6), falling, state)
    # And none at all: what moves is Adam's count and its moments.
    still = follow(state, scheduled(variant.step, 0.0), 3)
    assert_equal(still, follow(state, scheduled(eager, 0.0), 3), state)
    names = [name for name, _ in state.named_state()]
    masters = [names.index(name) for name in names if name.endswith(".master")]
    assert (still[2][1, masters] == still[2][2, masters]).all()
    assert (still[2][1, names.index("optimizer.step")] != still[2][2, names.index("optimizer.step")]).all()


def test_the_optimizer_is_in_its_graph_and_the_rest_of_the_step_is_not():
    state = State(TINY, CPU)
    variant = made(VARIANTS, "graph_layer_optimizer", state)
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
    config = replace(TINY, precision=precision, microbatches=3, amax_history=1)
    state = State(config, CPU)
    batch = state.batches[0]

    def gradients(picked):
        state.reset()
        # A norm that is not above the clip's bound is left alone by the optimizer.
        state.adam.clip.fill_(1e9)
        state.batches[0] = {name: rows[picked] for name, rows in batch.items()}
        state.begin_step(0)
        for microbatch in range(3):
            hidden = state.embedding(state.inputs["tokens"][microbatch])
            for layer in state.layers:
                hidden = layer(hidden, is_first_microbatch=microbatch == 0)
            state.microbatch_loss(hidden, microbatch).backward()
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


@pytest.mark.parametrize(
    "variant, precision", [*((name, "fp8") for name in ("eager", *GRAPHED)), ("eager", "bf16"), ("graph_layer", "bf16")]
)
def test_a_step_owes_nothing_to_gradients_left_over(variant, precision):
    state = State(replace(TINY, precision=precision), CPU)
    run = made(VARIANTS, variant, state)
    clean = follow(state, run.step, 3)

    def step(index):
        for parameter in state.parameters:
            parameter.main_grad.fill_(1e6)
        run.step(index)

    assert_equal(follow(state, step, 3), clean, state)


def test_losses_fall():
    state = State(TINY, CPU)
    losses = follow_eager(state, 100)[0]
    assert losses[0] == pytest.approx(numpy.log(256), rel=0.05)
    # Well below the 3.2 nats or so of a byte drawn by its frequency in this text.
    assert sum(losses[-4:]) / 4 < 2.8


def test_ranks_read_different_text():
    batches = [training_batches(TINY, CPU, rank) for rank in (0, 1)]
    for own in batches[0]:
        assert all(not torch.equal(own["tokens"], other["tokens"]) for other in batches[1])
        assert torch.equal(own["tokens"][:, 1:], own["targets"][:, :-1])


def test_flops():
    """torch's counter counts attention in full; the script's figure leaves out the half that is masked."""
    config = replace(TINY, precision="bf16", layers=3, microbatches=3, microbatch=2)
    state = State(config, CPU)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        train.eager_step(state, 0)
    _, described = workload(Arguments(config=config, run=RUN), CPU, 0, 1, variants={}, eager_step=None)
    masked_half = 3 * 2 * config.sequence**2 * config.heads * config.head_dim * config.layers * 6
    assert described.flops_convention == flops.CAUSAL_HALF
    assert described.flops_per_step == counter.get_total_flops() - masked_half
    assert described.items_per_step == 6 * config.sequence


# --- the state


@pytest.mark.parametrize("precision", ["fp8", "fp8_current", "bf16"])
def test_reset_restores_every_tensor_in_place(precision):
    state = State(replace(TINY, precision=precision), CPU)
    state.reset()
    start = {name: (tensor.data_ptr(), tensor.detach().clone()) for name, tensor in state.named_state()}
    assert any("exp_avg_sq" in name for name in start) and any("embedding.positions" in name for name in start)
    assert any("amax_history" in name for name in start) == (precision == "fp8")
    for index in range(5):
        train.eager_step(state, index)
    unmoved = [name for name, tensor in state.named_state() if torch.equal(tensor, start[name][1])]
    assert not unmoved
    state.reset()
    for name, tensor in state.named_state():
        address, value = start[name]
        assert tensor.data_ptr() == address, name
        assert torch.equal(tensor, value), name
    assert not any(parameter.main_grad.any() for parameter in state.parameters)


def test_two_states_start_alike():
    hashes = []
    for _ in range(2):
        state = State(TINY, CPU)
        hasher = StateHasher(state.named_state())
        hasher.update()
        hashes.append(hasher.hashes())
    assert (hashes[0] == hashes[1]).all()


@pytest.mark.parametrize("name", ["graph_layer", "graph_layer_overlap"])
def test_close_releases_the_graphs_memory(name):
    """Closed variants that are still referred to, with pools of 15 MB or more each."""
    state = State(replace(TINY, sequence=256, microbatch=2, precision="bf16"), CPU)

    def make():
        variant = made(VARIANTS, name, state)
        held = sum(pool.bytes() for pool in variant.capture.pools)
        variant.close()
        assert sum(pool.bytes() for pool in variant.capture.pools) == 0
        assert all(not pool.graphs for pool in variant.capture.pools)
        return variant, held

    kept = [make(), make()]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    kept += [make() for _ in range(4)]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert kept[0][1] > 15e6
    assert grown < 0.5 * sum(held for _, held in kept[2:])


# --- variants that cannot run here, and arguments as they run here


@pytest.mark.parametrize("name", ["compile", "reduce_overhead", *TE_GRAPHS])
def test_variants_that_need_a_gpu_say_so(name):
    with pytest.raises(Unsupported, match="GPU"):
        made(VARIANTS, name, State(replace(TINY, precision="bf16"), CPU))


def test_every_variant_is_made_by_what_the_table_names():
    assert all(callable(variant_table.resolved(variant.make)) for variant in VARIANTS.values())


def resolved(config):
    args, notes = resolve(Arguments(config=config, run=RUN), CPU)
    assert args.run == RUN
    return args.config, notes


def test_resolve_names_what_stands_in_for_fp8():
    config, notes = resolved(PRESETS["tiny"])
    assert config == TINY
    assert notes == ["FP8 emulated: operands rounded to FP8, GEMMs in bf16"]


def test_resolve_has_nothing_to_note_in_bf16():
    assert resolved(replace(TINY, precision="bf16")) == (replace(TINY, precision="bf16"), [])


def test_resolve_refuses_what_cannot_run_here():
    with pytest.raises(ValueError, match="--layer te needs a GPU; take --layer torch"):
        resolved(replace(TINY, layer="te"))
    with pytest.raises(ValueError, match="run --preset tiny"):
        resolved(replace(PRESETS["bench"], layers=9600))


# --- processes


def python_m(*arguments):
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_sixty_steps_in_processes_of_their_own(precision, tmp_path):
    flags = ("gpt3.train", "--parity", "--steps", "60", "--precision", precision)
    hashes = {}
    for variant in ("eager", *GRAPHED):
        path = tmp_path / f"{variant}.json"
        python_m(*flags, "--variant", variant, "--record", str(path))
        hashes[variant] = json.loads(path.read_text())["state_hashes"]
    assert len(set(hashes["eager"])) == 60
    assert all(hashes[variant] == hashes["eager"] for variant in GRAPHED)


def two_ranks(path, variant, *flags):
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gpt3.train")
    out = python_m(*launch, "--variant", variant, "--record", str(path), *flags)
    result = json.loads(path.read_text())
    assert result["status"] == "pass", result["message"]
    assert result["env"]["world_size"] == 2
    # Rank 0 alone writes and prints.
    assert sum(line.startswith(f"gpt3/{result['preset']}  {variant} ") for line in out.splitlines()) == 1
    return result


@pytest.mark.slow
def test_two_ranks_graphed_equal_two_ranks_eager(tmp_path):
    results = {
        variant: two_ranks(tmp_path / f"{variant}.json", variant, "--parity", "--steps", "20")
        for variant in ("eager", *GRAPHED)
    }
    assert len(set(results["eager"]["state_hashes"])) == 20
    for result in results.values():
        assert result["replays"] == result["expected_replays"]
        assert result["state_hashes"] == results["eager"]["state_hashes"]
    # The other rank's text is in the mean: one rank alone ends elsewhere.
    python_m("gpt3.train", "--variant", "eager", "--parity", "--steps", "20", "--record", str(tmp_path / "one.json"))
    one = json.loads((tmp_path / "one.json").read_text())
    assert one["losses"][0] != results["eager"]["losses"][0] and one["losses"][-1] != results["eager"]["losses"][-1]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--preset", "tiny_pp"), ("--tp", "2"), ("--zero1", "true")])
def test_two_ranks_of_each_kind(flags, tmp_path):
    """Stages, tensor ranks, data ranks with ZeRO-1: both ranks' states bitwise eager's."""
    eager, graphed = (
        two_ranks(tmp_path / f"{variant}.json", variant, "--parity", "--parity-steps", "5", *flags)["state_hashes"]
        for variant in ("eager", "graph_layer")
    )
    assert len(set(eager)) == 5 and eager == graphed


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["eager", "graph_layer"])
def test_two_ranks_are_timed_over_the_same_steps(variant, tmp_path):
    result = two_ranks(tmp_path / "two.json", variant)
    assert len(result["step_ms"]) == result["steps"] == TINY.min_steps and result["ms"] > 0
