"""stable_diffusion/train and state: the ladder's variants against eager, overflows, storms, several ranks."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from graph_worth.machine import host_state, memory
from graph_worth.made_variant import Unsupported, leave
from stable_diffusion import kernels
from stable_diffusion.config import PRESETS, learning_rate
from stable_diffusion.state import LEAST_SIZE, State, schedule
from stable_diffusion.train import eager_step, training_step
from tests.helpers import contracts, gloo_ranks
from tests.helpers.by_hand import trained
from tests.helpers.scaled_steps import assert_equal, steps_of

CPU = torch.device("cpu")
TINY = replace(PRESETS["tiny"], workers=0, batch=2, latent_size=8)
HOST = ("graph_networks", "graph_step")


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


def make(name, state):
    return contracts.made("stable_diffusion", name, state)


def run_steps(name, num_steps, config=TINY, overflow_at=()):
    """The whole state after each step, and the state object; moments are infinite at `overflow_at`."""

    def infinite(batch):
        return batch | {"moments": torch.full_like(batch["moments"], float("inf"))}

    state = State(config, CPU)
    return steps_of("stable_diffusion", name, state, state.batches, infinite, num_steps, overflow_at), state


@pytest.fixture(scope="module")
def graphed():
    """(State, `graph_step` on it)."""
    torch.use_deterministic_algorithms(True)
    state = State(TINY, CPU)
    variant = make("graph_step", state)
    yield state, variant
    variant.close()
    state.close()


# --- overflows


OVERFLOWS = (1, 2)


@pytest.fixture(scope="module")
def eager_overflows():
    torch.use_deterministic_algorithms(True)
    return run_steps("eager", 4, overflow_at=OVERFLOWS)


def test_overflows_change_the_scale_alone(eager_overflows):
    states, state = eager_overflows
    # The first of two in a row is forgiven.
    assert [each["loss_scale.scale"].item() / 65536 for each in states] == [1, 1, 0.5, 0.5]
    assert [each["optimizer.step"].item() for each in states] == [1, 1, 1, 2]
    for index in OVERFLOWS:
        same = [key for key in states[0] if not key.startswith("loss_scale.")]
        assert all(torch.equal(states[index][key], states[index - 1][key]) for key in same)
    assert int(state.scaler.num_skipped) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", HOST)
def test_overflow_does_what_eager_does(name, eager_overflows):
    states, state = run_steps(name, 4, overflow_at=OVERFLOWS)
    assert_equal(states, eager_overflows[0])
    ours, eager = state.report.read_grad_norms(4), eager_overflows[1].report.read_grad_norms(4)
    assert [norm != norm for norm in ours] == [index in OVERFLOWS for index in range(4)]
    assert [norm for norm in ours if norm == norm] == [norm for norm in eager if norm == norm]


@pytest.mark.slow
def test_storm_ends_the_run_with_cause_and_detection():
    config = replace(TINY, loss_scale=1.0, max_floor_overflows=2)
    with pytest.raises(FloatingPointError) as caught:
        run_steps("graph_step", 5, config, overflow_at=range(1, 5))
    # Cause at step 1, two in a row by step 2, read one step late.
    assert "2 steps in a row with the loss scale at 1, from step 1 on, detected at step 3" in str(caught.value)


# --- the step


def test_randomness_is_drawn_anew_in_each_replay(graphed, monkeypatch):
    state, variant = graphed
    state.reset()
    batch = state.batches.next()
    monkeypatch.setattr(state.batches, "next", lambda: {key: tensor.clone() for key, tensor in batch.items()})
    for index in range(3):
        variant.step(index)
    assert len(set(state.report.read_losses(3))) == 3


def test_latents_and_target():
    state = State(TINY, CPU)
    state.reset()
    state.inputs.load()
    mean, log_variance = state.inputs["moments"].float().chunk(2, dim=1)
    torch.manual_seed(7)
    x, t, target = state.noisy_latents(state.inputs["moments"])
    torch.manual_seed(7)
    z = 0.18215 * (mean + torch.randn_like(mean) * (0.5 * log_variance).exp())
    torch.testing.assert_close(t, torch.randint(0, 1000, (2,)))
    noise = torch.randn_like(z)
    alpha, sigma = (table[t].view(-1, 1, 1, 1) for table in (state.root_alpha, state.root_beta))
    torch.testing.assert_close(x, alpha * z + sigma * noise)
    torch.testing.assert_close(target, alpha * noise - sigma * z)
    # v and x_t determine the latent: z = alpha x_t - sigma v.
    torch.testing.assert_close(alpha * x - sigma * target, z, atol=1e-5, rtol=1e-4)
    state.close()


def test_ranks_draw_their_own_noise_for_the_same_weights():
    ranks = [State(TINY, CPU, rank=rank) for rank in range(2)]
    drawn = []
    for state in ranks:
        state.reset()
        drawn.append(state.noisy_latents(torch.zeros_like(state.inputs["moments"])))
        state.close()
    assert not torch.equal(drawn[0][0], drawn[1][0])
    assert all(map(torch.equal, ranks[0].parameters, ranks[1].parameters))


def test_schedule_is_the_benchmark_s():
    root_alpha, root_beta = schedule(CPU)
    assert root_alpha.shape == (1000,)
    torch.testing.assert_close(root_alpha**2 + root_beta**2, torch.ones(1000))
    # Stable Diffusion's scaled-linear betas: first and last cumulative products.
    assert root_alpha[0].item() ** 2 == pytest.approx(1 - 0.00085, rel=1e-6)
    assert root_alpha[-1].item() ** 2 == pytest.approx(0.0046601, rel=1e-3)


def test_the_learning_rate_of_a_replay_is_the_step_s(graphed):
    state, variant = graphed
    state.reset()
    moved = []
    for index in range(3):
        before = [master.clone() for master in state.adam.masters]
        variant.step(index)
        moved.append(max((a - b).abs().max().item() for a, b in zip(state.adam.masters, before, strict=True)))
        assert state.adam.lr.item() == pytest.approx(learning_rate(TINY, index))
    # Adam moves a weight by about the learning rate, and that doubles from the first step to the second.
    assert moved[1] > 1.3 * moved[0]


@pytest.mark.slow
def test_training_lowers_the_loss():
    state = State(replace(TINY, latent_size=16, lr_warmup=2), CPU)
    state.reset()
    batch = state.batches.next()

    def loss():
        """Of one batch, with the same draws each time."""
        torch.manual_seed(7)
        with torch.no_grad():
            x, t, target = state.noisy_latents(batch["moments"])
            return float(F.mse_loss(state.unet(x, t, batch["context"]), target))

    before = loss()
    for index in range(4):
        eager_step(state, index)
    assert loss() < 0.96 * before
    state.close()


def test_nothing_in_the_step_waits_for_the_device(graphed):
    """A host graph refuses every host read, so what it captures has none."""
    state, variant = graphed
    operators = variant.graph.operators()
    assert not any("_local_scalar_dense" in name for name in operators)
    assert sum("randn" in name or "normal" in name for name in operators) >= 2
    training_step(state)


# --- kernels


def test_eager_torch_asks_for_torchs_kernels_alone_and_leaves_the_state_as_it_was(monkeypatch):
    asked = {"group_norm": set(), "geglu": set()}

    def watched(name, function):
        return lambda *arguments: asked[name].add(arguments[-1]) or function(*arguments)

    for name in asked:
        monkeypatch.setattr(kernels, name, watched(name, getattr(kernels, name)))
    state = State(TINY, CPU)
    for variant, in_triton in (("eager_torch", False), ("eager", True)):
        made = make(variant, state)
        for seen in asked.values():
            seen.clear()
        # After `leave` others step on the same state.
        made.step(0)
        leave(made)
        assert asked == {"group_norm": {in_triton}, "geglu": {in_triton}}
        eager_step(state, 1)
        assert asked == {"group_norm": {in_triton, True}, "geglu": {in_triton, True}}
        made.close()
    state.close()


@pytest.mark.gpu
def test_eager_torch_launches_no_kernel_of_ours():
    """And trains as eager does, within what kernels that round otherwise may differ by."""
    triton = pytest.importorskip("triton")
    device = torch.device("cuda")
    state = State(replace(PRESETS["bench"], batch=1, workers=0), device)
    losses, names = {}, {}
    for variant in ("eager", "eager_torch"):
        made = make(variant, state)
        state.reset()
        for index in range(2):
            made.step(index)
        losses[variant] = state.report.read_losses(2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            made.step(2)
            torch.cuda.synchronize()
        names[variant] = {event.name for event in profile.events()}
        leave(made)
        made.close()
    ours = {name for name, value in vars(kernels).items() if isinstance(value, triton.JITFunction)}
    assert len(ours & names["eager"]) >= 4 and not ours & names["eager_torch"]
    assert losses["eager_torch"] == pytest.approx(losses["eager"], rel=1e-3)
    state.close()


# --- rows with a status


@pytest.mark.parametrize("name", ["compile", "graph_step_compiled", "reduce_overhead"])
def test_compiled_variants_are_unsupported_on_the_host(name, graphed):
    with pytest.raises(Unsupported, match="measured on a GPU only"):
        make(name, graphed[0])


def test_a_batch_that_cannot_fit_is_an_oom_row_with_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**6)
    monkeypatch.setattr(host_state, "available_host_bytes", lambda: None)
    flags = ("--preset", "tiny", "--variant", "graph_step", "--record", str(tmp_path / "r.json"))
    result = trained(contracts.model("stable_diffusion", *flags))
    assert result["status"] == "oom"
    assert "--batch 2 needs" in result["message"] and "1,000,000 are free" in result["message"]


# --- several ranks


@pytest.mark.slow
def test_two_ranks_graphed_equal_two_ranks_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # The loss scale grows at the fifth step.
    steps = ("--parity", "--steps", "7", "--growth-interval", "5")
    hashes = {}
    for variant in ("eager", "graph_networks", "graph_step"):
        path = tmp_path / f"{variant}.json"
        small = ("--batch", "2", "--latent-size", "8", "--workers", "0")
        flags = ["--variant", variant, *steps, *small, "--record", str(path)]
        said, nothing = gloo_ranks.run_script("stable_diffusion.train", flags, world_size=2)
        result = json.loads(path.read_text())
        assert result["status"] == "pass", result["message"]
        assert said.startswith(f"stable_diffusion/tiny  {variant} ") and not nothing
        hashes[variant] = result["state_hashes"]
        assert "loss_scale.scale" not in result["unmoved"]
    assert len(set(hashes["eager"])) == 7
    assert hashes["graph_networks"] == hashes["graph_step"] == hashes["eager"]


@pytest.mark.gpu
def test_graphs_replay_after_lightning_has_captured_its_own():
    pytest.importorskip("greenlet")
    state = State(replace(PRESETS["tiny"], latent_size=LEAST_SIZE), torch.device("cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        made = [make(name, state) for name in ("graph_step", "graph_networks", "graph_step_lightning")]
        losses = []
        for variant in made:
            state.reset()
            for index in range(3):
                variant.step(index)
            losses.append(state.report.read_losses(3))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] == pytest.approx(losses[2], rel=1e-3)
    for variant in made:
        variant.close()
    state.close()


def test_lightning_leaves_the_weights_where_they_are(monkeypatch):
    """Trainer.fit moves its module to the CPU at its end, under the feet of the other variants."""
    pytest.importorskip("greenlet")
    from stable_diffusion.lightning_variant import DiffusionModule

    moved = []
    monkeypatch.setattr(torch.nn.Module, "cpu", lambda self: moved.append(self) or self)
    module = DiffusionModule(State(PRESETS["tiny"], torch.device("cpu"), 0, 1))
    assert module.cpu() is module and not moved
