"""Audits: blocks of every variant from a state that nobody could know, which eager repeats in a process of its own.

In a cycle a variant could hand in what an honest one has trained, and all could train from a state that one of them has
bent. In an audit a secret draw scales the state after the untimed steps, another for each variant. Then its reference
makes the same steps in a process that never makes the variant. `graph_worth.harness.checks` compares what both trained.
"""

import math
import secrets
from collections.abc import Iterator

from graph_worth.harness.builds import block_plan
from graph_worth.harness.files.partial import Partial

# Audits of a variant; one where steps or resets take long.
AUDITS = 2
# Timed steps of an audit, as a share of a block's.
SHARE_OF_BLOCK = 1 / 4
STEPS = ("untimed", "timed", "drained")


def missing(partial: Partial, build: str, variants: list[str]) -> Iterator[tuple[str, dict]]:
    """Yield (variant, command) of each audit that the facts do not have, in rounds, the base first."""
    plan = partial.of("plan", build=build)[-1]
    order = sorted(variants, key=lambda name: name != plan["base"])
    # Whole periods of batches, where a block has some; none is drained, for no clock of an audit counts.
    timed, period = plan["steps"]["timed"], plan.get("period") or 1
    periods = math.ceil(max(2, math.ceil(timed * SHARE_OF_BLOCK)) / period)
    steps = plan["steps"] | {"timed": min(timed, period * periods), "drained": 0}
    is_long = plan["paces"].get(plan["base"], {"ms": 0.0})["ms"] > block_plan.LONG_STEP_MS or not steps["resets_each"]
    for number in range(1 if is_long else AUDITS):
        for variant in order:
            if not partial.of("audit", build=build, variant=variant, number=number):
                seed = secrets.randbelow(2**31)
                first = block_plan.first_step(plan.get("period"), f"audit {seed}")
                yield variant, {"do": "block", **steps, "reset": True, "number": number, "seed": seed, "first": first}


def repetitions(partial: Partial, build: str, references: dict[str, str]) -> list[tuple[str, dict]]:
    """Return (reference, command) that repeats each audit which is not repeated yet, the base first.

    references: of each variant that is left.
    """
    done = {repetition["seed"] for repetition in partial.of("repetition", build=build)}
    plan, commands = partial.of("plan", build=build)[-1], []
    for audit in partial.of("audit", build=build):
        if audit["variant"] in references and audit["seed"] not in done and "ended" not in audit:
            steps = {key: audit[key] for key in STEPS}
            command = {"do": "block", **steps, "reset": True, "seed": audit["seed"], "first": audit["first"]}
            commands.append((references[audit["variant"]], command | {"build": build}))
    return sorted(commands, key=lambda item: (item[0] != plan["base"], item[0]))
