"""Reads on the host in torch's own C++, which no dispatch mode sees.

Operators such as normal(mean, std) read inside of their kernels, and under a mode some backward formulas, such as that
of prod, take another way. So one step runs without modes, under autograd's profiler, which notes the Python stack of
each operator. The operator that made a node of autograd has the node's sequence number.
"""

import contextlib
import re

import torch

from graph_worth.capture import host_graph_rules as rules
from graph_worth.measuring import operator_table
from graph_worth.measuring.module_parts import MODULE, naming_modules
from graph_worth.your_step.place import place_of, place_of_call
from graph_worth.your_step.record import RefusedCall
from graph_worth.your_step.step_watch import warnings_shown

# They wait for the GPU.
_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"}
_READS |= {"aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}
# Steps on the way from a call to its read.
_BETWEEN = ("aten::item", "aten::is_nonzero")
# Operators that read on a CPU alone, by torch's sources of 2.6 to 2.13, and that the table of operators does not have.
_NAMES = "_assert_async histogramdd _grouped_mm embedding_renorm_ _cholesky_solve_helper"
_ON_CPU_ALONE = {f"aten::{name}" for name in _NAMES.split()}
_NODE = "autograd::engine::evaluate_function: "


def hidden_reads(state, index: int) -> list[RefusedCall]:
    """Make a step, which changes the state; return the reads inside of operators and of backward formulas."""
    # The one flag that is on asks for stacks.
    flags = False, False, True, False, False, torch._C._profiler._ExperimentalConfig()
    config = torch.autograd.ProfilerConfig(torch.autograd.ProfilerState.CPU, *flags)

    def warned(message, *_):
        if "synchronizing" in str(message):
            waits.add(place_of_call().own)

    waits: set[str] = set()
    batch, has_gpu = state.batch(index), state.device.type == "cuda"
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings_shown(warned))
        stack.enter_context(naming_modules(state.modules))
        torch.autograd._enable_profiler_legacy(config)
        try:
            state.step(batch)
        finally:
            threads = torch.autograd._disable_profiler_legacy()
    # The profiler does not tell on which device a tensor lies that is read: a GPU's waits do.
    reads = reads_in(threads)
    return [read for read in reads if not has_gpu or read.place.own in waits or (waits and "Backward" in read.name)]


def reads_in(threads):
    """Yield the hidden reads in the profiler's records: a list for each thread, of operators that begin and end."""
    # Sequence number -> stack and module of the operator that made the node. A GPU's backward pass has its own thread.
    makers: dict[int, tuple[list[str], str]] = {}
    for records in sorted(threads, key=lambda thread: thread[0].name() != "__start_profile"):
        opened: list = []
        for record in records:
            if record.kind() == "pop":
                opened = [open_record for open_record in opened if open_record.handle() != record.handle()]
            if record.kind() != "push":
                continue
            nodes = [at for at, open_record in enumerate(opened) if open_record.name().startswith(_NODE)]
            start = nodes[-1] + 1 if nodes else 0
            if record.sequence_nr() >= 0 and not start:
                makers[record.sequence_nr()] = record.stack(), _module(opened)
            if record.name() in _READS:
                yield from _hidden(record, opened[:start], opened[start:], makers)
            opened.append(record)


def _hidden(record, before, opened, makers):
    """The read of a record, below the operators that are open in the step, or in the backward pass of its `before`."""
    names = [open_record.name() for open_record in opened]
    # Fused optimizers take a tensor's number of steps and learning rate, on a GPU inside of the kernel.
    is_on_cpu_alone = not _ON_CPU_ALONE.isdisjoint(names) or any(name.startswith("aten::_fused_") for name in names)
    if is_on_cpu_alone:
        return
    stack, module, number, node = record.stack(), _module(opened), -1, []
    if before:
        engine = next((at for at, frame in enumerate(stack) if "_engine_run_backward" in frame), len(stack))
        is_own = engine > 0  # the backward of a function of the user's, whose Python runs
        numbers = () if is_own else (open_record.sequence_nr() for open_record in opened)
        number = next((candidate for candidate in numbers if candidate >= 0), -1)
        node, names = names[: not is_own], names[1:]
    # A name without a namespace is a range of Python's: a module, or the forward of a function of the user's.
    names = node + [name for name in names if "::" in name and name not in _BETWEEN]
    row = next(filter(None, map(_row_of, names)), None)
    if row is not None and row.is_held:
        return
    if names:  # else a call of Python's, which the watch sees
        stack, module = makers.get(number, (stack, module))
        place = place_of(map(_frame, stack), module, has_callers=True)
        yield RefusedCall(f"{record.name()} in {names[0]}", rules.READS, place, is_hidden=True)


def _row_of(name):
    """The row of the table for an operator, or for a node such as LinalgDetBackward0."""
    node, _, is_node = name.partition("Backward")
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", node).lower()
    return operator_table.row_of(snake, "backward") if is_node else operator_table.row_of(name)


def _module(opened) -> str:
    names = [open_record.name() for open_record in opened if open_record.name().startswith(MODULE)]
    return names[-1].removeprefix(MODULE) if names else ""


def _frame(text: str) -> tuple[str, int, str]:
    """The file, the line and the function of "FILE(LINE): FUNCTION"."""
    path, _, rest = text.rpartition("(")
    number, _, function = rest.partition("): ")
    return path, int(number.removesuffix(")")), function
