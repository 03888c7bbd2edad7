"""graph_worth/harness/builds/build_worker.py: all workers of a build have one model, and each start is tried twice."""

import os
import signal
from types import SimpleNamespace

import pytest

from graph_worth.harness import run
from graph_worth.harness.builds.build_worker import Ahead, BuildWorker, Interrupted, Stopped, TryAgain
from graph_worth.harness.builds.request import BuildRequest, Settings
from graph_worth.harness.command import stop
from graph_worth.harness.files.partial import SUFFIX, Partial
from graph_worth.harness.processes import worker_process
from graph_worth.harness.processes.worker_process import WorkerEnded

FACTS = {"config": {"layers": 8, "batch": 4}, "flops_per_step": 2.0, "items_per_step": 4, "period": None}
ALONE = [("eager", {"do": "alone"})]


class Answers:
    """A worker that has built a state with these facts."""

    def __init__(self, **facts):
        self.facts, self.asked = FACTS | facts, []

    def wait(self):
        return 1.0

    def call(self, command, limit_s, waiting=None):
        self.asked.append((command, limit_s))
        return {"say": "done", **self.facts}

    def end(self, is_at_once=False):
        pass


@pytest.fixture
def own(tmp_path):
    request = BuildRequest(name="", fields={}, variants={"eager": {}}, command=list, environment={})
    made = BuildWorker(request, Settings(), Partial(tmp_path / f"a{SUFFIX}"), tmp_path / "log", print, Ahead())
    made.partial.add("worker", build="", **FACTS)
    return made


KILLED = WorkerEnded("error", "the worker was ended by SIGKILL", signal=signal.SIGKILL)
STOPPED = WorkerEnded("error", "rank 1 was ended by SIGTERM", signal=signal.SIGTERM)
CRASHED = WorkerEnded("error", "the worker was ended by SIGSEGV", signal=signal.SIGSEGV)
SILENT = WorkerEnded("timeout", "the worker did not answer")
REFUSED = WorkerEnded("error", "--layers 8: too many", exit_status=2)


class Ends(Answers):
    """A worker that ends while it starts or builds."""

    def __init__(self, how, at):
        super().__init__()
        self.how, self.at = how, at

    def wait(self):
        return self.raised() if self.at == "wait" else 1.0

    def call(self, command, limit_s, waiting=None):
        return self.raised() if self.at == command["do"] else super().call(command, limit_s)

    def raised(self):
        raise self.how


def starts(monkeypatch, *made):
    """Let these workers be the next ones; return those that are left."""
    left = list(made)
    monkeypatch.setattr("graph_worth.harness.builds.build_worker.WorkerProcess", lambda *words: left.pop(0))
    return left


def test_the_first_worker_of_a_run_measures_the_pace_of_its_host(own, monkeypatch, tmp_path):
    own.request.command = lambda variant: []
    workers = [Answers(), Answers()]
    starts(monkeypatch, *workers)
    for known in (own.partial, Partial(tmp_path / f"b{SUFFIX}")):
        own.partial = known
        own.ask("eager", {"do": "capture"})
        own.end()
    assert [answers.asked[0][0]["pace"] for answers in workers] == [False, True]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"config": {"layers": 6, "batch": 4}}, "layers 6 in the place of 8"),
        ({"flops_per_step": 1.5}, "flops_per_step 1.5 in the place of 2.0"),
        ({"period": 3}, "period 3 in the place of None"),
    ],
)
def test_a_later_worker_with_another_model_ends_the_build(own, monkeypatch, facts, said):
    """A GPU whose memory somebody else takes may hold fewer layers."""
    own.request.command = lambda variant: []
    starts(monkeypatch, Answers(**facts))
    with pytest.raises(WorkerEnded, match=said) as ended:
        own.ask("eager", {"do": "capture"})
    assert ended.value.kind == "error"


def test_a_block_is_given_up_when_it_lasts_far_longer_than_its_pilot(own, monkeypatch):
    own.request.command = lambda variant: []
    answers = Answers()
    starts(monkeypatch, answers)
    own.ask("eager", {"do": "capture"})
    own.paces = {"eager": {"ms": 300.0, "reset_s": 0.5}, "short": {"ms": 1.0, "reset_s": 0.0}}
    block = {"do": "block", "untimed": 1, "timed": 20, "drained": 1}
    # A capture may compile, and a variant without a pilot take any time.
    for variant, command in (("eager", block), ("short", block), ("other", block), ("eager", {"do": "capture"})):
        own.ask(variant, command)
    own.settings = Settings(limit_s=8)
    own.ask("eager", block)
    _, _, *limits_s = (limit_s for _, limit_s in answers.asked)
    assert limits_s == [20 * (22 * 0.3 + 0.5), 60, 600, 600, 8]


@pytest.mark.parametrize("how", [KILLED, SILENT, WorkerEnded("error", "broken", exit_status=1)], ids=str)
@pytest.mark.parametrize("at", ["wait", "build"])
def test_a_start_that_ends_without_an_answer_is_tried_twice(own, monkeypatch, how, at):
    own.request.command = lambda variant: []
    left = starts(monkeypatch, Ends(how, at), Answers(), Ends(how, at), Ends(how, at), Answers())
    assert own.ask("eager", {"do": "capture"})["config"] and len(left) == 3
    own.end()
    with pytest.raises(WorkerEnded, match=how.reason):
        own.ask("eager", {"do": "capture"})
    assert len(left) == 1
    assert list(own.alone(ALONE, is_last=True))


@pytest.mark.parametrize("made", [Ends(REFUSED, "wait"), Answers(period=3)], ids=["refusal", "another model"])
def test_an_answer_is_not_asked_for_twice(own, monkeypatch, made):
    own.request.command = lambda variant: []
    left = starts(monkeypatch, made, Answers())
    with pytest.raises(WorkerEnded):
        own.ask("eager", {"do": "capture"})
    assert len(left) == 1


def test_a_question_to_a_worker_of_its_own_is_tried_twice(own, monkeypatch):
    own.request.command = lambda variant: []
    left = starts(monkeypatch, Ends(KILLED, "alone"), Answers(), Ends(SILENT, "alone"), Answers())
    assert list(own.alone(ALONE, is_last=True)) == [(*ALONE[0], FACTS | {"is_only": True})]
    assert list(own.alone(ALONE, is_last=True)) == [] and len(left) == 1


def test_the_next_worker_starts_when_the_last_question_to_one_of_its_own_is_answered(own, monkeypatch):
    """The driver counts the CUDA contexts of both."""
    order = []

    class Noted(Answers):
        def __init__(self, *words):
            order.append("start")
            super().__init__()

        def call(self, command, limit_s, waiting=None):
            order.append(command["do"])
            return super().call(command, limit_s)

    own.request.command = lambda variant: []
    monkeypatch.setattr("graph_worth.harness.builds.build_worker.WorkerProcess", Noted)
    asks = [ALONE[0], ("eager", {"do": "capture"})]
    (_, _, memory), _ = own.alone(asks, is_last=False)
    assert order == ["start", "build", "alone", "capture", "start"] and memory["is_only"]
    ((_, _, memory),) = own.alone(ALONE, is_last=True)
    assert order[5:] == ["build", "alone"] and memory["is_only"]

    def beside_another(self, command, limit_s, waiting=None):
        own.start_ahead()
        return Answers.call(self, command, limit_s)

    monkeypatch.setattr(Noted, "call", beside_another)
    ((_, _, memory),) = own.alone(ALONE, is_last=True)
    assert not memory["is_only"]


@pytest.mark.parametrize("ask", ["ask", "try_ask"])
def test_a_block_in_which_this_process_was_stopped_is_measured_again_and_then_left_out(own, monkeypatch, ask):
    """An audit, too: a user may have stopped it, which says nothing of the variant."""
    own.request.command = lambda variant: []
    starts(monkeypatch, Answers(was_stopped=True))
    for left in (["eager"], []):
        with pytest.raises(TryAgain):
            getattr(own, ask)("eager", {"do": "block"})
        assert own.remaining() == left
    # `timeout` sends SIGCONT beside its signal.
    monkeypatch.setattr(stop, "signal", "SIGTERM")
    own.is_needed = True
    with pytest.raises(Stopped):
        getattr(own, ask)("eager", {"do": "block"})


def test_a_stop_of_this_process_is_counted(own, monkeypatch, tmp_path):
    monkeypatch.setattr(worker_process.supervisor, "start", lambda *words, **more: None)
    monkeypatch.setattr(worker_process, "_listening", lambda folder: None)
    before = signal.getsignal(signal.SIGCONT)
    try:
        worker_process.WorkerProcess(["x"], {}, tmp_path / "log")
        stops = worker_process._stops
        os.kill(os.getpid(), signal.SIGCONT)
        assert worker_process._stops == stops + 1
    finally:
        signal.signal(signal.SIGCONT, before)


class Refuses(Answers):
    """Has no answer to blocks, and goes on."""

    def call(self, command, limit_s, waiting=None):
        answer = super().call(command, limit_s)
        failed = {"say": "failed", "kind": "error", "reason": "refused", "fatal": False}
        return failed if command["do"] == "block" else answer


def test_of_a_worker_of_its_own_every_answer_counts_that_there_is(own, monkeypatch):
    own.request.command = lambda variant: []
    asks = [ALONE[0], ("eager", {"do": "capture"}), ("eager", {"do": "block"}), ("eager", {"do": "course"})]
    starts(monkeypatch, Refuses(), Ends(SILENT, "block"), Ends(KILLED, "block"), Answers())
    done = [[command["do"] for _, command, _ in own.alone(asks, is_last=True)] for _ in range(3)]
    assert done == [
        ["alone", "capture", "course"],
        ["alone", "capture"],
        ["alone", "capture", "capture", "block", "course"],
    ]


def test_a_question_that_may_fail_leaves_nothing_out(own, monkeypatch):
    own.request.command = lambda variant: []
    starts(monkeypatch, Refuses(), Ends(CRASHED, "block"))
    assert own.try_ask("eager", {"do": "block"}) == {"raised": "refused"}
    own.end()
    assert "SIGSEGV" in own.try_ask("eager", {"do": "block"})["raised"]
    assert own.remaining() == ["eager"]


@pytest.mark.parametrize("how", [KILLED, STOPPED], ids=["SIGKILL", "SIGTERM"])
def test_an_audit_that_a_signal_ended_is_tried_once_more_and_then_is_none(own, monkeypatch, how):
    own.request.command = lambda variant: []
    left = starts(monkeypatch, *(Ends(how, "block") for _ in range(3)))
    with pytest.raises(TryAgain):
        own.try_ask("eager", {"do": "block"})
    assert own.try_ask("eager", {"do": "block"}) == {"ended": str(how)}
    # The next audit has a second chance, too.
    own.partial.add("audit", build="", variant="eager")
    with pytest.raises(TryAgain):
        own.try_ask("eager", {"do": "block"})
    assert own.remaining() == ["eager"] and not left


@pytest.mark.parametrize("how", [KILLED, STOPPED], ids=["SIGKILL", "SIGTERM"])
def test_a_variant_that_has_run_is_never_left_out_for_signals(own, monkeypatch, how):
    own.request.command = lambda variant: []
    starts(monkeypatch, *(Ends(how, "block") for _ in range(5)))

    def ask():
        with pytest.raises(TryAgain):
            own.ask("eager", {"do": "block"})

    for _ in range(2):
        own.partial.add("cycle", build="", order=["eager"])
        ask()
    # Twice without a fact between: the run stops, and the same command goes on.
    with pytest.raises(Interrupted, match=str(how)):
        own.ask("eager", {"do": "block"})
    own.partial.facts = [fact for fact in own.partial.facts if fact["fact"] != "cycle"]
    ask()
    assert own.remaining() == ["eager"]
    ask()
    assert own.remaining() == []


def test_a_variant_that_crashes_has_no_second_chance(own, monkeypatch):
    own.request.command = lambda variant: []
    starts(monkeypatch, Ends(CRASHED, "block"))
    with pytest.raises(TryAgain):
        own.ask("eager", {"do": "block"})
    assert own.remaining() == []


@pytest.mark.parametrize(
    ("how", "has_run", "has_cycles", "is_sealed"),
    [
        (STOPPED, False, True, False),
        (Interrupted("rank 1 was ended by SIGTERM"), True, True, False),
        (KILLED, True, True, False),
        (KILLED, False, True, False),
        (KILLED, True, False, True),
        (REFUSED, True, True, False),
        (WorkerEnded("oom", "out of memory", is_answer=True), True, True, False),
        # Cycles of another build: this one cannot run here.
        (REFUSED, False, True, True),
    ],
)
def test_a_failed_start_seals_no_run_that_has_cycles(monkeypatch, tmp_path, how, has_run, has_cycles, is_sealed):
    facts = Partial(tmp_path / f"a{SUFFIX}")
    if has_run:
        facts.add("worker", build="b", **FACTS)
    if has_cycles:
        facts.add("cycle", build="")
    request = BuildRequest(name="b", fields={}, variants={"eager": {}}, command=lambda variant: [], environment={})
    made = SimpleNamespace(measure=Ends(how, "wait").raised, leave_out_rest=lambda *why: facts.add("left_out"))
    made.request, made.base, made.kind_of_eagers = request, "", None
    monkeypatch.setattr(run, "BuildMeasurement", lambda worker: made)
    args = run.parse(["--model", "gpt3"])
    asked = SimpleNamespace(builds=[request], preset="tiny")
    if is_sealed:
        run.measure_run(asked, args, facts, tmp_path / "log")
    else:
        with pytest.raises(Interrupted, match="the same command goes on from there"):
            run.measure_run(asked, args, facts, tmp_path / "log")
    assert bool(facts.of("end")) == bool(facts.of("left_out")) == is_sealed


def test_no_worker_of_several_ranks_is_started_ahead(own, monkeypatch):
    started = []
    monkeypatch.setattr("graph_worth.harness.builds.build_worker.WorkerProcess", lambda *words: started.append(words))
    own.request.command = lambda variant: SimpleNamespace()
    own.request.ranks = 2
    own.start_ahead()
    assert not started
    own.request.ranks = 1
    own.start_ahead()
    assert len(started) == 1


def test_a_worker_started_ahead_is_taken_by_the_next_build_of_the_same_state_and_ended_by_another(own, monkeypatch):
    started, ended = [], []

    class Noted(Answers):
        def __init__(self, *words):
            started.append(words[0])
            super().__init__()

        def end(self, is_at_once=False):
            ended.append(self)

    monkeypatch.setattr("graph_worth.harness.builds.build_worker.WorkerProcess", Noted)
    for words in (["same"], ["same"], ["another"]):
        own.request.command = lambda variant, words=words: words
        own.ahead.start(["same"], {}, own.log)
        ahead = own.ahead.worker
        own.ask("eager", {"do": "capture"})
        assert (own._worker is ahead) == (words == ["same"]) and own.ahead.worker is None
        own.end()
    assert started == [["same"]] * 3 + [["another"]] and len(ended) == 4
