"""The plan of a build's blocks: the steps of a block, the base, and the order of a cycle."""

import math
import random
import statistics as plain
from collections.abc import Sequence

from graph_worth.harness.builds.request import Settings

LONG_STEP_MS = 250.0
MOST_SHORT_STEPS = 16
MOST_FIRST_STEP = 64
FASTER_BASE = 1.01


def steps_of_block(paces: dict[str, dict], worker: dict, settings: Settings) -> dict:
    """Return the steps of a block, the same for all variants: whole periods of batches.

    Numbers of "untimed", "timed" and "drained" steps, and "resets_each": whether each block resets the state. paces:
    variant -> "ms" of a step and "reset_s" of a reset, from the pilot. worker: its answer to "build".
    """
    fastest, slowest = (pick(pace["ms"] for pace in paces.values()) for pick in (min, max))
    is_long, is_short, block_ms = slowest > LONG_STEP_MS, settings.is_short, settings.block_s * 1e3
    least = 3 if is_long or is_short else 5
    timed = max(least, math.ceil(min(block_ms / fastest, settings.most_blocks_s * block_ms / slowest)))
    period = worker["period"]
    whole = (worker["least_steps"] or timed) if period is None else period * math.ceil(timed / period)
    reset_s = max(pace["reset_s"] for pace in paces.values())
    return {
        "untimed": 1 if is_long or is_short else 2,
        "timed": max(timed, min(whole, MOST_SHORT_STEPS)) if is_short else whole,
        # A CPU has no issue time.
        "drained": (1 if is_long else 3) if worker["gpus"] else 0,
        # A reset that takes longer than a block is made once a cycle.
        "resets_each": reset_s <= max(settings.block_s, timed * fastest / 1e3),
    }


def choose_base(step_ms: dict[str, list[float]]) -> str:
    """Return the base: eager, unless every block of another eager variant is faster than each of its by over 1 %.

    On a host that wanders a mean of two blocks would choose by chance. `step_ms`: variant -> ms of each of its blocks.
    """
    mean = {name: plain.geometric_mean(block_ms) for name, block_ms in step_ms.items()}
    usual = "eager" if "eager" in mean else next(iter(mean))
    best = min(mean, key=lambda name: mean[name])
    return best if min(step_ms[usual]) > FASTER_BASE * max(step_ms[best]) else usual


def first_step(period: int | None, seed: str) -> int:
    """Return the number of a cycle's first step, drawn for each cycle: whole periods of batches, 0 where none is known.

    A variant that remembered the results of earlier blocks would have those of other batches.
    """
    return period * random.Random(f"first {seed}").randint(0, max(1, MOST_FIRST_STEP // period)) if period else 0


def order_of_cycle(base: str, others: Sequence[str], seed: str) -> list[str]:
    """Return the order of a cycle's blocks: base, the others in an order drawn for each cycle, base.

    With many variants, an order that is reversed in every second cycle makes neighbouring cycles err alike. A fixed
    order adds drift to the ratios (results/simulation.md).
    """
    drawn = list(others)
    random.Random(seed).shuffle(drawn)
    return [base, *drawn, base]
