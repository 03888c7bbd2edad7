"""GPT-3 split over gloo ranks and whole in one process: configs, steps, and what the ranks leave in a folder."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from gpt3 import state as gpt3_state
from gpt3.config import PRESETS, Config
from gpt3.model import split_dimension
from gpt3.state import ADAM, State, training_batches
from tests.helpers import contracts
from tests.helpers.followed import difference, follow

# Adam as in training but for eps: it makes a step of any gradient, and of the last bits of one next to zero, too.
STEADY_ADAM = ADAM | {"eps": 1e-4}
CPU = torch.device("cpu")
STEPS = 3
SMALL = replace(
    PRESETS["tiny"],
    layers=4,
    hidden=32,
    heads=2,
    head_dim=16,
    ffn=48,
    vocab=40,
    sequence=16,
    microbatches=4,
    amax_history=4,
    batches=2,
    layer="torch",
)
# Name: (ranks, what differs from SMALL).
SPLITS = {
    "tp2": (2, {"tp": 2}),
    "pp2x2": (2, {"pp": 2, "chunks": 2}),
    "dp2_zero": (2, {"zero1": True}),
    "tp2_pp2x2": (4, {"tp": 2, "pp": 2, "chunks": 2}),
    "tp2_dp2_zero": (4, {"tp": 2, "zero1": True}),
    "pp4": (4, {"pp": 4}),
    "pp2_dp2_zero": (4, {"pp": 2, "zero1": True}),
    "tp2_pp2x2_dp2_zero": (8, {"tp": 2, "pp": 2, "chunks": 2, "zero1": True}),
}


def whole(config: Config, data_ranks: int = 1) -> State:
    """All shares and stages, and the batches of all data ranks, in this process."""
    size = config.tp
    widths = {"heads": config.heads * size, "ffn": config.ffn * size, "vocab": config.vocab * size}
    alone = replace(config, tp=1, pp=1, chunks=1, zero1=False, **widths, microbatches=config.microbatches * data_ranks)
    state = State(alone, CPU)
    plain = replace(config, pp=1, chunks=1)
    ranks = zip(*(training_batches(plain, CPU, rank) for rank in range(data_ranks)), strict=True)
    state.batches = [{name: torch.cat([own[name] for own in step]) for name in step[0]} for step in ranks]
    return state


def eager_step_of(state: State):
    return contracts.model_of("gpt3", state).reference_step("eager")


def own_state(**changes) -> State:
    return State(replace(SMALL, **changes), CPU, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def trained_on_ranks():
    """For gloo_ranks: losses and norms of the split in $SPLIT, FP32; the weights go to $FOLDER."""
    gpt3_state.ADAM = STEADY_ADAM
    _, changes = SPLITS[os.environ["SPLIT"]]
    state = own_state(precision="fp32", **changes)
    losses, norms, _ = follow(state, eager_step_of(state), STEPS)
    weights = {name: parameter.detach() for name, parameter in state.named_parameters()}
    place = state.place
    torch.save((place.data_rank, place.tensor_rank, weights), Path(os.environ["FOLDER"], f"{place.world_rank}.pt"))
    return losses, norms


def gathered(folder: Path) -> dict:
    """The whole model from what the ranks left: AssertionError where two that hold the same differ."""
    parts = {}
    for path in sorted(folder.glob("*.pt")):
        _, tensor_rank, weights = torch.load(path)
        for name, weight in weights.items():
            key = tensor_rank if split_dimension(name) is not None else 0
            assert torch.equal(parts.setdefault(name, {}).setdefault(key, weight), weight), f"{path.name}: {name}"
    return {
        name: torch.cat([own[rank] for rank in sorted(own)], split_dimension(name) or 0) for name, own in parts.items()
    }


def graphed_on_ranks():
    """For gloo_ranks: what of three graphed steps differs from eager's, and the replays made and promised."""
    _, changes = SPLITS[os.environ["SPLIT"]]
    state = own_state(precision=os.environ["PRECISION"], **changes)
    eager = follow(state, eager_step_of(state), STEPS)
    variant = contracts.made("gpt3", "graph_layer", state)
    before = variant.capture.num_replays
    differ = difference(follow(state, variant.step, STEPS), eager, state)
    replays = variant.capture.num_replays - before
    promised = sum(variant.replays_of(index) for index in range(STEPS))
    variant.close()
    return {"differ": differ, "replays": [replays, promised], "losses": eager[0]}
