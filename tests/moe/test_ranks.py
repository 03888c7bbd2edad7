"""moe on two gloo ranks: against one process; graphs and static buffers against eager, bit for bit; reruns."""

import contextlib

import pytest
import torch

from graph_worth.made_variant import Unsupported
from graph_worth.measuring import torch_settings
from moe import train
from moe.exchange import require_capturable
from moe.state import OF_EXPERTS
from tests.helpers import gloo_ranks
from tests.helpers.contracts import made
from tests.helpers.followed import difference, follow
from tests.helpers.moe_case import make
from tests.helpers.once import once

pytestmark = pytest.mark.slow

STEPS = 3
PRESETS = ("tiny", "tiny_gpt_oss", "tiny_lora")
# Rows of a rank over those of a balanced router: all rows of two ranks, and so few that some are left out.
WHOLE, TIGHT = 2.0, 1.0
GRAPHED = {
    "tiny": ("graph_attn", "graph_attn_router_preprocess"),
    "tiny_gpt_oss": ("graph_attn_router", "graph_static"),
}
ON_GPUS = ("graph_attn_router_preprocess", "eager_static", "graph_static")
REFUSED = ("graph_layer", "graph_step")


def worker():
    """All that one rank is asked."""
    return {
        "trained": {preset: trained(preset, ep=2, microbatches=1) for preset in PRESETS},
        "graphed": {preset: differences(preset, GRAPHED[preset], WHOLE, microbatches=1)[0] for preset in GRAPHED},
        "tight": differences("tiny", ("eager_static", "graph_static"), TIGHT),
        "refused": refused(),
        "one_sided": one_sided(),
    }


def trained(preset, dtype=torch.float32, **changes):
    """Losses and norms of the same global batches, two microbatches of a process, one of each rank; dense weights."""
    state = make(preset, dtype, **changes)
    losses, norms, _ = follow(state, made("moe", "eager", state).step, STEPS)
    dense = [float(each.detach().double().sum()) for name, _, each in state.parts if name not in OF_EXPERTS]
    return [losses, norms, dense]


def differences(preset, names, factor, **changes):
    """(By variant, where it parts from eager on this rank; by variant, the reruns of its steps.)"""
    state = make(preset, ep=2, layers=1, rank_capacity_factor=factor, **changes)
    eager = follow(state, made("moe", "eager", state).step, STEPS)
    found, told = {}, {}
    for name in names:
        variant = made("moe", name, state)
        before = variant.capture.num_replays
        found[name] = difference(follow(state, variant.step, STEPS), eager, state)
        assert variant.capture.num_replays - before == sum(map(variant.replays_of, range(STEPS)))
        told[name] = variant.close()
    return found, told


def on_gpus():
    """Differences from eager on this rank's GPU with deterministic kernels, and the reruns."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch_settings.prepare(device)
    with torch_settings.deterministic_kernels():
        return {
            "whole": differences("tiny_gpt_oss", ON_GPUS, WHOLE, device=device),
            "tight": differences("tiny", ON_GPUS, TIGHT, device=device),
        }


def refused():
    state, said = make("tiny", ep=2, layers=1), {}
    for name in REFUSED:
        with pytest.raises(Unsupported) as error:
            made("moe", name, state)
        said[name] = str(error.value)
    return said


def one_sided():
    """All tokens choose experts of the first rank: the second one receives nothing."""
    state = make("tiny_gpt_oss", ep=2, layers=1, rank_capacity_factor=WHOLE)
    state.layers[0].router_bias.data[:4] = 50.0
    train.forward_and_backward(state)
    gradients = [parameter.main_grad.clone() for _, _, parameter in state.parts]
    with state.exchange.static_buffers():
        train.forward_and_backward(state)
    alike = all(map(torch.equal, gradients, [parameter.main_grad for _, _, parameter in state.parts]))
    return [alike, bool(state.layers[0].w1.main_grad.any()), bool(state.layers[0].bias2.main_grad.any())]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    def run(folder):
        return gloo_ranks.run(__name__, "worker", 2)

    return once(tmp_path_factory, "moe-ranks", run)[1]


@pytest.mark.parametrize("preset", PRESETS)
def test_two_ranks_train_as_one_process_does(preset, ranks):
    """In FP32 only the order of sums is left."""
    torch.use_deterministic_algorithms(False)
    losses, norms, dense = trained(preset, microbatches=2)
    assert losses[0] != losses[1]
    for of_rank in ranks:
        ours = of_rank["trained"][preset]
        assert ours[0] == pytest.approx(losses, rel=1e-5)
        assert ours[1] == pytest.approx(norms, rel=1e-4)
        assert ours[2] == pytest.approx(dense, rel=1e-4, abs=1e-4)
        # Ranks that part by a bit part for good.
        assert ours[2] == ranks[0]["trained"][preset][2]


def test_scopes_without_the_exchange_and_static_buffers_equal_eager_bit_for_bit(ranks):
    for of_rank in ranks:
        assert of_rank["graphed"] == {preset: dict.fromkeys(names, "") for preset, names in GRAPHED.items()}


def test_a_pass_that_overflows_runs_again_and_trains_what_eager_does(ranks):
    found, told = ([of_rank["tight"][index] for of_rank in ranks] for index in (0, 1))
    assert found == [dict.fromkeys(("eager_static", "graph_static"), "")] * 2
    for of_variants in told:
        for each in of_variants.values():
            assert each["steps"] == STEPS and 1 <= each["reruns"] <= STEPS and each["rerun_ms"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_hold_the_exchange_of_two_gpus(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels ask for it
    for of_rank in gloo_ranks.run(__name__, "on_gpus", 2, timeout_s=400, device="cuda"):
        assert [found for found, _ in of_rank.values()] == [dict.fromkeys(ON_GPUS, "")] * 2
        for name in ("eager_static", "graph_static"):
            assert of_rank["whole"][1][name]["reruns"] == 0 < of_rank["tight"][1][name]["reruns"]


def test_what_needs_one_rank_says_so(ranks):
    for name, said in ranks[0]["refused"].items():
        assert said.startswith("--ep 2: ") and "graph_static" in said and "\n" not in said, name
        assert "cannot capture dropless or unpadded experts" in said, name


def test_a_rank_that_no_token_chooses_waits_for_nobody(ranks):
    assert [of_rank["one_sided"] for of_rank in ranks] == [[True, True, True], [True, False, True]]


@pytest.mark.parametrize(
    ("num_ranks", "environment", "is_refused"),
    [
        (2, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        (2, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        (2, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}, False),
        (1, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, False),
        (2, {}, False),
    ],
)
def test_memory_that_nccl_registers_must_not_move(num_ranks, environment, is_refused):
    with (
        pytest.raises(Unsupported, match="cannot capture expandable segments")
        if is_refused
        else contextlib.nullcontext()
    ):
        require_capturable(num_ranks, "iteration", environment)
