"""Checks of training by hand: graphs against eager steps, finite losses, graphs and replays that were promised."""

import gc

import torch

from graph_worth.capture.pool import CaptureError
from graph_worth.machine import memory
from graph_worth.made_variant import left
from graph_worth.measuring import parity
from graph_worth.measuring.course import course
from graph_worth.parallel.host_messages import of_all_ranks

# On a GPU the fastest kernels may reorder sums; a replay of stale data misses eager's loss by far more.
TOLERANCE = {"cpu": 0.0, "cuda": 1e-3}


def compare_with_eager(training, variant, reference, device: torch.device) -> list[str]:
    """Compare two steps of graphs from the seeded start with two eager ones: new inputs and moved weights.

    A replay that ignores its input, or reads weights of the capture, would train on nonsense.

    Args:
        training: of the variant.
        variant: entered; it is left for eager's steps and entered again.
        reference: reference(index) makes an eager step.
        device: of the training.

    Returns:
        Lines for a person: why it was left out, where a GPU has no memory for eager steps beside the graphs; else none.
    """
    ours = course(training, variant.step, 2).losses
    free = memory.free_bytes(device)
    # An eager step needs about what the graphs hold.
    if not all(of_all_ranks(free is None or sum(pool.bytes() for pool in variant.capture.pools) < free)):
        return ["graphs were not compared with eager: no memory for its steps beside them"]
    with left(variant):
        eagers = course(training, reference, 2).losses
    if device.type == "cuda":
        # What eager steps took is no memory of the variant.
        gc.collect()
        torch.cuda.empty_cache()
    # Where eager diverges as well, the capture is not to blame.
    parity.require_finite(eagers)
    step = parity.first_loss(ours, eagers, TOLERANCE[device.type])
    if step is not None:
        raise CaptureError(f"canary: step {step} replayed gives loss {ours[step]:.6g}, eager {eagers[step]:.6g}")
    return []


def broken_promise(result: dict) -> str:
    """Return how graphs and replays differ from those that the variant declares, or "".

    A promise of None is any number from 1 up, where the kind is known.
    """
    graphs, replays, steps = result["graphs"], result["replays"], result["steps"]
    promised, wanted = result["promised_graphs"], result["promised_replays"]
    if promised is not None and graphs != promised:
        return f"{graphs} graphs made, {promised} promised"
    if wanted is not None and replays != wanted * steps:
        return f"{replays} replays in {steps} steps, {wanted} a step promised"
    some_promised = result["kind"] == "graph" or (result["kind"] == "compile" and None in (promised, wanted))
    if some_promised and not (graphs and replays):
        return f"{graphs} graphs and {replays} replays in a variant that promised some"
    if replays != result["expected_replays"]:
        return f"{replays} replays counted, its steps make {result['expected_replays']}"
    return ""
