"""Compiled variants of a step; a compiler that takes too long is given up in one line."""

import contextlib
import signal
import time

import pytest
import torch

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
