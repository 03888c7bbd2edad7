"""benchmarks/measuring/build_worker.py: all workers of a build have one model."""

from types import SimpleNamespace

import pytest

from benchmarks.files.partial import SUFFIX, Partial
from benchmarks.measuring.build_worker import BuildWorker
from benchmarks.measuring.request import BuildRequest, Settings
from benchmarks.processes.worker import WorkerEnded

FACTS = {"config": {"layers": 8, "batch": 4}, "flops_per_step": 2.0, "items_per_step": 4, "period": None}


class Answers:
    """A worker that has built a state with these facts."""

    def __init__(self, **facts):
        self.facts = FACTS | facts

    def wait(self):
        return 1.0

    def call(self, command, limit_s):
        return {"say": "done", **self.facts}


@pytest.fixture
def own(tmp_path):
    request = BuildRequest(name="", fields={}, variants={"eager": {}}, command=list, environment={})
    made = BuildWorker(request, Settings(), Partial(tmp_path / f"a{SUFFIX}"), tmp_path / "log", print)
    made.partial.add("worker", build="", **FACTS)
    return made


def test_a_later_worker_with_the_same_model_goes_on(own):
    assert own._built(Answers(), {})["config"]["layers"] == 8


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"config": {"layers": 6, "batch": 4}}, "layers 6 in the place of 8"),
        ({"flops_per_step": 1.5}, "flops_per_step 1.5 in the place of 2.0"),
        ({"period": 3}, "period 3 in the place of None"),
    ],
)
def test_a_later_worker_with_another_model_ends_the_build(own, facts, said):
    """A GPU whose memory somebody else takes may hold fewer layers."""
    with pytest.raises(WorkerEnded, match=said) as ended:
        own._built(Answers(**facts), {})
    assert ended.value.kind == "error"


def test_no_worker_of_several_ranks_is_started_ahead(own, monkeypatch):
    started = []
    monkeypatch.setattr("benchmarks.measuring.build_worker.Worker", lambda *words: started.append(words))
    own.request.command = lambda variant: SimpleNamespace()
    own.request.ranks = 2
    own.start_ahead()
    assert not started
    own.request.ranks = 1
    own.start_ahead()
    assert len(started) == 1
