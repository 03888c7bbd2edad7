"""Several ranks under the doctor: decisions that all of them make alike, findings of each, and where the ranks part.

A rank that makes a step more than the others would wait for them for ever. So whatever decides on steps is asked of all
ranks. Without a process group every function here answers for the one process.
"""

import itertools
from dataclasses import replace
from typing import TypeVar

from graph_worth.parallel.host_messages import of_all_ranks
from graph_worth.your_step import compare
from graph_worth.your_step.findings import NOTE, SLOW, STOPS, Finding
from graph_worth.your_step.parts import signature_of
from graph_worth.your_step.record import Watched
from graph_worth.your_step.state import StepState
from graph_worth.your_step.step_watch import is_collective
from graph_worth.your_step.user_lines import Source

KIND = "ranks differ"
T = TypeVar("T")


def first(value: T) -> T:
    """Return the value of the first rank that has one other than None, False or an empty text; else this rank's."""
    return next((rank_value for rank_value in of_all_ranks(value) if rank_value), value)


def merged(findings: list[Finding]) -> list[Finding]:
    """Return the findings of all ranks; of those that only some ranks have, the evidence names these."""
    every = of_all_ranks(findings)
    findings_by_key: dict[tuple, dict[int, Finding]] = {}
    for rank, rank_findings in enumerate(every):
        for finding in rank_findings:
            findings_by_key.setdefault((finding.kind, finding.level, finding.where), {})[rank] = finding
    named = []
    for by_rank in findings_by_key.values():
        finding = next(iter(by_rank.values()))
        if len(by_rank) < len(every):
            which = f"rank{'s' * (len(by_rank) > 1)} {', '.join(map(str, by_rank))}"
            finding = replace(finding, evidence=f"on {which} of {len(every)}: {finding.evidence}")
        named.append(finding)
    return named


def parting(state: StepState, step: Watched) -> list[Finding]:
    """Return findings where ranks have other batches, call other collectives or run other operators."""
    source = Source(state.path)
    batches = of_all_ranks([_told(batch) for batch in state.batches])
    collectives = of_all_ranks([operator for operator in step.operators if is_collective(operator.name)])
    operators = of_all_ranks(step.operators)
    for rank in range(1, len(batches)):
        different = compare.first_difference(collectives[0], collectives[rank])
        if different:
            place = compare.place(*different).own
            evidence = f"rank 0 and rank {rank} call other collectives, and would wait for each other for ever: "
            return [Finding(KIND, STOPS, place, evidence + compare.told(*different))]
        pairs = enumerate(itertools.zip_longest(batches[0], batches[rank], fillvalue="none"))
        for index, (mine, theirs) in pairs:
            if mine == theirs:
                continue
            evidence = f"batch {index} is {mine} on rank 0 and {theirs} on rank {rank}: each rank captures graphs "
            evidence += "of its own shapes, and the slowest rank sets the pace"
            return [Finding(KIND, SLOW, source.at(source.changed("batches")), evidence)]
        different = compare.first_difference(operators[0], operators[rank])
        if different:
            place = compare.place(*different).own
            evidence = f"with batches of one shape, of rank 0 and rank {rank} {compare.told(*different)}"
            return [Finding(KIND, NOTE, place, evidence)]
    return []


def _told(batch) -> str:
    """Shapes and plain values of a batch, in words."""
    parts = signature_of(batch)
    return ", ".join(str(list(part[0])) if isinstance(part, tuple) else part for part in parts)
