"""Findings on optimizers and batches that a file hands over, on what it does not, and on what lies around its steps."""

import os

import torch

from graph_worth.machine.allocator import has_expandable_segments, nccl_registers
from graph_worth.snapshot import storage_id
from graph_worth.your_step import host_values
from graph_worth.your_step.findings import NOTE, SLOW, STOPS, WRONG, Finding
from graph_worth.your_step.parts import changing_values

FEW_SHAPES = 4
_AS_TENSOR = "make it a tensor on the GPU, which is copied with the batch, or the same number in all batches"


def findings(eager):
    """Yield the findings of `graph_worth.your_step.eager.EagerSteps`."""
    yield from _optimizers(eager)
    yield from _batches(eager)
    yield from _not_handed_over(eager)
    yield from _surroundings(eager)


def _optimizers(eager):
    for optimizer in eager.state.optimizers:
        on_host = any(group.get("capturable") is False for group in optimizer.param_groups)
        if eager.state.device.type == "cuda" and on_host:
            name = type(optimizer).__name__
            evidence = f"{name} counts its steps on the host: capturable is False"
            yield Finding("optimizer", STOPS, eager.source.at(eager.source.made(name)), evidence)
    scheduled = [holder for holder in eager.state.owned if hasattr(holder, "get_last_lr")]
    rates = eager.looks[-1].rates
    if rates and None not in rates and (scheduled or rates != eager.looks[0].rates):
        kinds = {type(getattr(schedule, "scheduler", schedule)).__name__ for schedule in scheduled}
        made_at = eager.source.made(*eager.state.optimizer_names()) or eager.source.made(*kinds)
        what = type(scheduled[0]).__name__ if scheduled else "the step"
        stepped = eager.source.schedules() if scheduled else None
        at = f", stepped at {eager.source.at(stepped)}," if stepped else ""
        evidence = f"{what}{at} changes lr, a number on the host: a graph of the whole step keeps that of the capture"
        line = None if scheduled else eager.source.sets_item("lr")
        kind = "rate by hand" if line else "learning rate"
        yield Finding(kind, WRONG, eager.source.at(line or made_at or stepped), evidence + eager.changing())


def _batches(eager):
    number, batches = len(set(eager.state.classes)), eager.state.batches
    place = eager.source.at(eager.source.changed("batches"))
    values_by_name = changing_values(batches)
    changing = {name: values for name, values in values_by_name.items() if name not in eager.state.unread}
    if changing:
        words = "; ".join(f"{name} is {', '.join(map(repr, values))}" for name, values in changing.items())
        evidence = f"of batches whose tensors have one shape {words}: each value needs a graph and its memory"
        is_number = any(type(value) in (int, float) for values in changing.values() for value in values)
        level = SLOW if is_number or number > FEW_SHAPES else NOTE
        yield Finding("shapes of batches", level, place, evidence, remedy=_AS_TENSOR)
    elif number > FEW_SHAPES:
        evidence = f"{number} shapes in {len(batches)} batches, and each needs a graph and its memory"
        yield Finding("shapes of batches", SLOW, place, evidence)


def _not_handed_over(eager):
    """Find tensors that steps write and that a reset does not put back."""
    known = {storage_id(tensor) for _, tensor in eager.state.snapshot.tensors}
    known = known.union(*(look.homes.union(look.gradients.values(), look.of_optimizers) for look in eager.looks))
    known = known.union(*(watched.exchanged for watched in eager.watched))
    # Put back through load_state_dict, as a loss scaler's.
    holders = [item for item in eager.state.owned if hasattr(item, "__dict__")]
    attributes = [attribute for holder in holders for attribute in vars(holder).values()]
    known |= {storage_id(attribute) for attribute in attributes if isinstance(attribute, torch.Tensor)}
    names = {storage_id(tensor): name for name, tensor in eager.looks[-1].tensors.items()}
    others = host_values.Reachable(eager.state.step, eager.state.owned).not_handed_over()
    names |= {storage_id(tensor): words for words, tensor in others}
    places: dict[str, str] = {}
    for watched in eager.watched:
        for storage, place in watched.written.items():
            if storage not in known and (storage in eager.of_batches or storage not in watched.rewritten):
                name = "its batch" if storage in eager.of_batches else names.get(storage, "a tensor from before it")
                places.setdefault(place.own, name)
    for where, name in places.items():
        yield Finding("not handed over", WRONG, where, f"the step writes {name}, and nothing puts it back")


def _surroundings(eager):
    kind = eager.state.device.type
    if torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled():
        evidence = "autocast was on before the step, with its cache: a graph reads casts of weights from before it"
        yield Finding("autocast cache", WRONG, eager.source.at(eager.source.made("autocast")), evidence)
    if eager.state.moved_by_build:
        evidence = f"{eager.state.moved_by_build} counts batches before the first step: build has trained with it"
        yield Finding("warm-up", NOTE, eager.source.at(eager.source.made("make_graphed_callables")), evidence)
    moves = has_expandable_segments(os.environ) and nccl_registers(os.environ)
    if moves and torch.distributed.is_initialized():
        evidence = "expandable segments, while NCCL registers the memory of graphs"
        yield Finding("settings", NOTE, "the environment", evidence)
