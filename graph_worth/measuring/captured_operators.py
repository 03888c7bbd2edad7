"""Capture operators of torch, forward and backward, and replay them on other inputs.

    python -m graph_worth.measuring.captured_operators --device cuda < names        JSON lines, see `survey`

Operators and inputs are those of torch's own tests, `op_db`. Of each operator up to four samples are captured, filled
with the values of another draw, replayed, and compared with eager on these values. benchmarks/operators.py starts this
program again where an operator has ended it.
"""

import argparse
import functools
import itertools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.pool import Pool

# What may come of an operator, the worst first. A draw of random numbers has no other result to compare with.
CRASHED, REFUSED, WRONG, RANDOM, HELD, NOT_TRIED = "crashed", "refused", "wrong", "random", "held", "not tried"
OUTCOMES = (CRASHED, REFUSED, WRONG, RANDOM, HELD, NOT_TRIED)
PASSES = ("forward", "backward")
MOST_SAMPLES, LOOKED_AT = 4, 12
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.float64, torch.bfloat16)
# What they return is not written.
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# Sums of a replay may have another order than eager's.
RTOL, ATOL = 1e-3, 1e-5


class NotTried(RuntimeError):
    """Eager cannot run this sample here, or its inputs cannot be filled with other values."""


def operators() -> dict[str, Any]:
    """Return torch's operators by name, as in linalg.svd; a variant of one is called name.variant."""
    from torch.testing._internal.common_methods_invocations import op_db

    for module in [loaded for name, loaded in sys.modules.items() if name.startswith("torch.testing._internal")]:
        if hasattr(module, "wrapper_set_seed"):
            # It seeds the generator before each call, which no capture allows.
            setattr(module, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))  # noqa: B010
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in op_db}


def survey(names: list[str], device: torch.device) -> Iterator[dict]:
    """Yield {operator, pass} before each try, and the same with {outcome, why} after it.

    Ends early, after an outcome, where the device can no longer hold a sound graph.
    """
    known = operators()
    for name, kind in itertools.product(names, PASSES):
        op = known[name]
        if name in UNWRITTEN or (kind == "backward" and not op.supports_autograd):
            continue
        yield {"operator": name, "pass": kind}
        outcome, why = of_operator(op, device, kind == "backward")
        is_sound = outcome not in (REFUSED, WRONG) or _is_sound(device)
        yield {"operator": name, "pass": kind, "outcome": outcome, "why": why}
        if not is_sound:
            return


def of_operator(op, device: torch.device, is_backward: bool) -> tuple[str, str]:
    """Return the worst outcome over the samples of an operator, and why."""
    results = []
    try:
        for first, second in _samples(op, device, is_backward):
            results.append(_of_sample(op, first, second, device, is_backward))
    except Exception as error:
        results.append((NOT_TRIED, _line(error)))
    outcome, why = min(results, key=lambda result: OUTCOMES.index(result[0]), default=(NOT_TRIED, "no sample"))
    number = sum(result[0] == outcome for result in results)
    return outcome, f"{number} of {len(results)} samples: {why}" if outcome in (REFUSED, WRONG) else why


def _samples(op, device, is_backward):
    """Pairs of samples that differ in their values alone."""
    able = op.supported_backward_dtypes(device.type) if is_backward else op.supported_dtypes(device.type)
    dtype = next((candidate for candidate in DTYPES if candidate in able), None)
    if dtype is None:
        raise NotTried("no dtype")
    draws = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        draws.append(list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=is_backward), LOOKED_AT)))
    pairs = [pair for pair in zip(*draws, strict=False) if _is_alike(*map(_leaves, pair))]
    return pairs[:: max(1, len(pairs) // MOST_SAMPLES)][:MOST_SAMPLES]


def _leaves(sample):
    return tree_flatten((sample.input, sample.args, sample.kwargs))


def _is_alike(first, second):
    (leaves, spec), (others, other_spec) = first, second
    return spec == other_spec and all(
        (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout)
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        else type(a) is type(b) and (callable(a) or a == b)
        for a, b in zip(leaves, others, strict=True)
    )


def _of_sample(op, first, second, device, is_backward) -> tuple[str, str]:
    inputs, others = (list(filter(torch.is_tensor, _leaves(sample)[0])) for sample in (first, second))
    if any(tensor.layout != torch.strided for tensor in inputs):
        raise NotTried("sparse input")
    run = functools.partial(_call, op, first, is_backward)
    # Eager twice on the other values: what differs there is random, or nothing has written it.
    expected, again = (_copies(_call(op, second, is_backward)) for _ in range(2))
    is_random = _difference(expected, again) is not None
    run()
    pool = Pool(device)
    try:
        graph, results = pool.capture(run, ())
        with torch.no_grad():
            for target, value in zip(inputs, others, strict=True):
                strides = zip(target.stride(), target.shape, strict=True)
                if target.numel() and any(stride == 0 and size > 1 for stride, size in strides):
                    raise NotTried("an input whose elements share memory")
                target.copy_(value)
        graph.replay()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if is_random:
            return RANDOM, "eager's results differ from call to call"
        difference = _difference(expected, results)
        return (HELD, "") if difference is None else (WRONG, difference)
    except CaptureError as error:
        return REFUSED, _line(error)
    finally:
        pool.release()


def _call(op, sample, is_backward):
    """The tensors and numbers that a call returns, or the gradients of all inputs that have one."""
    result = op(sample.input, *sample.args, **sample.kwargs)
    if not is_backward:
        return _results(result)
    outputs = [output for output in _results(sample.output_process_fn_grad(result)) if isinstance(output, torch.Tensor)]
    outputs = [output for output in outputs if output.requires_grad]
    inputs = [leaf for leaf in _leaves(sample)[0] if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outputs or not inputs:
        raise NotTried("no gradient")
    ones = [torch.ones_like(output) for output in outputs]
    return _results(torch.autograd.grad(outputs, inputs, ones, allow_unused=True))


def _results(result):
    return [leaf for leaf in tree_flatten(result)[0] if leaf is not None]


def _copies(results):
    """Copies, since an operator in place returns its input."""
    return [result.detach().clone() if isinstance(result, torch.Tensor) else result for result in results]


def _difference(expected, results) -> str | None:
    """In words how results differ; None where they agree. NaN equals NaN."""
    if len(expected) != len(results):
        return f"{len(results)} results, eager has {len(expected)}"
    for want, got in zip(expected, results, strict=True):
        if not isinstance(want, torch.Tensor):
            if want != got:
                return f"the number {got!r} of the capture, eager has {want!r}"
            continue
        if want.layout != torch.strided:
            raise NotTried("sparse result")
        if want.shape != got.shape:
            return f"the shape {tuple(got.shape)} of the capture, eager has {tuple(want.shape)}"
        if want.dtype.is_floating_point or want.dtype.is_complex:
            is_same = torch.allclose(want, got, rtol=RTOL, atol=ATOL, equal_nan=True)
        else:
            is_same = torch.equal(want, got)
        if not is_same:
            return "other values than eager's"
    return None


def _is_sound(device) -> bool:
    """Return whether a graph is captured and replayed rightly after one that was not."""
    if device.type == "cuda":
        # A capture that failed leaves torch's generator as in a capture.
        torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
    x, pool = torch.ones(4, device=device), Pool(device)
    try:
        graph, y = pool.capture(lambda: x * 2 + torch.rand(4, device=device) * 0, (x,))
        x.fill_(3)
        graph.replay()
        return y.tolist() == [6.0] * 4
    except RuntimeError:
        return False
    finally:
        pool.release()


def _line(error) -> str:
    """The first line of an error, without places in files."""
    text = f"{error}".strip() or type(error).__name__
    return re.sub(r" \(at [^)]*\)| at \S+:\d+", "", text.splitlines()[0])[:200]


def main() -> None:
    """Try the operators that standard input names."""
    parser = argparse.ArgumentParser(prog="python -m graph_worth.measuring.captured_operators")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
    for row in survey(sys.stdin.read().split("\n"), device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
