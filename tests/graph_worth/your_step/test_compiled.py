"""Compiled variants of a step; a compiler that takes too long is given up in one line."""

import contextlib
import errno
import signal
import time

import pytest
import torch

from graph_worth.compiled import compiling
from graph_worth.made_variant import Capture, Unsupported
from graph_worth.your_step import graphs
from graph_worth.your_step.doctor import making
from graph_worth.your_step.state import StepState
from graph_worth.your_step.trial import course_of

STEP = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [torch.randn(rows, 8, device=device) for rows in (4, 4, 4, 4, 6)]
    def step(batch):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""


def state_of(tmp_path, device="cpu", dropout="0.1"):
    path = tmp_path / "my_step.py"
    path.write_text(STEP.replace("Dropout(0.1)", f"Dropout({dropout})"))
    return StepState(f"{path}:build", torch.device(device), "test")


def deviation(state, kind):
    """The largest relative difference of losses from eager's over batches of both shapes."""
    variant = making(kind)(state)
    try:
        eager = course_of(state, state.train).losses
        if hasattr(variant, "enter"):
            variant.enter()
        own = course_of(state, variant.step).losses
        # close() forgets them.
        variant.num_graphs = sum(len(pool.graphs) for pool in variant.capture.pools)
        return max(abs(a - b) / abs(a) for a, b in zip(eager, own, strict=True)), variant
    finally:
        if hasattr(variant, "leave"):
            variant.leave()
        variant.close()


def test_a_block_is_stopped_at_its_limit_though_it_catches_exceptions():
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(Unsupported, match=r"more than 0.1 s; a variant that --variants names waits"),
        graphs.deadline(0.1),
    ):
        while True:
            try:
                time.sleep(600)
            except Exception:
                continue
    assert signal.getsignal(signal.SIGALRM) is before and not signal.getitimer(signal.ITIMER_REAL)[0]


@pytest.mark.parametrize("limit_s", [0, 60])
def test_a_block_within_its_limit_goes_on(limit_s):
    with graphs.deadline(limit_s):
        pass
    assert not signal.getitimer(signal.ITIMER_REAL)[0]


def test_compiled_variants_run_on_a_cpu_where_they_are_named_alone(tmp_path):
    state = state_of(tmp_path)
    state.compile_limit_s = 60.0
    for kind in (graphs.CompiledModules, graphs.GraphedCompiledStep, graphs.ReducedOverhead):
        with pytest.raises(Unsupported, match="on a GPU only"):
            making(kind)(state)
    state.compile_limit_s = 0.0
    for kind in (graphs.GraphedCompiledStep, graphs.ReducedOverhead):
        with pytest.raises(Unsupported, match="host graph cannot record"):
            making(kind)(state)


@pytest.mark.slow
def test_what_took_too_long_once_is_not_compiled_again(tmp_path, monkeypatch):
    state, given_up = state_of(tmp_path), []

    @contextlib.contextmanager
    def gone(limit_s):
        given_up.append(limit_s)
        raise Unsupported("too long")
        yield

    monkeypatch.setattr(graphs, "deadline", gone)
    for _ in range(2):
        with pytest.raises(Unsupported, match="too long"):
            graphs.CompiledModules(state, Capture(strategy="", state=state, device=state.device))
    assert given_up == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["0.1", "0.0"])
def test_compiled_modules_train_as_eager_does_and_say_whether_they_draw_its_random_numbers(tmp_path, dropout):
    found, variant = deviation(state_of(tmp_path, dropout=dropout), graphs.CompiledModules)
    assert found < 1e-5 and ("eager's random numbers" in variant.capture.strategy) == (dropout == "0.1")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [graphs.CompiledModules, graphs.GraphedCompiledStep, graphs.ReducedOverhead])
def test_compiled_steps_train_as_eager_does_on_a_gpu(tmp_path, kind):
    with torch.cuda.stream(torch.cuda.Stream()):
        found, variant = deviation(state_of(tmp_path, "cuda:0"), kind)
    assert found < 1e-2
    if kind is graphs.GraphedCompiledStep:
        assert variant.num_graphs == 2  # one for each shape


def leaves_its_graph(x):
    torch._dynamo.graph_break()
    return x + 1


def backend(error=None):
    def compile_graph(graph, inputs):
        if error is not None:
            raise error
        return graph

    return compile_graph


LINE = leaves_its_graph.__code__.co_firstlineno + 1
NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "function, error, reason",
    [
        (leaves_its_graph, None, rf"torch.compile: test_compiled.py:{LINE}: Call to `torch._dynamo.graph_break\(\)`$"),
        (torch.sin, ValueError("not this\none"), "torch.compile: not this$"),
        (torch.cos, NO_SPACE, r"torch.compile: no space is left for the compiler's cache \(.cache in the root"),
    ],
    ids=["break", "refused", "full disk"],
)
def test_what_does_not_compile_is_unsupported_in_one_line(function, error, reason):
    compiled = torch.compile(lambda x: function(x), backend=backend(error), fullgraph=True)
    with pytest.raises(Unsupported, match=reason), compiling(Capture(strategy="")):
        compiled(torch.ones(2))


def test_the_lines_at_which_the_compiler_leaves_its_graph_are_in_the_report():
    capture = Capture(strategy="")
    compiled = torch.compile(leaves_its_graph, backend=backend())
    with compiling(capture):
        assert compiled(torch.ones(2)).tolist() == [2, 2]
    (line,) = capture.report["breaks"]
    assert line.startswith(f"test_compiled.py:{LINE}: ") and capture.report["from_cache"] == 0
