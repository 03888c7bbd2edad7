"""benchmarks/epochs.py: programs train as they do eagerly, and what their file says, in a table and when published."""

import importlib
import json
import sys

import pytest
from msgspec.structs import replace

from benchmarks import epochs, frame, judge, publish
from benchmarks.pages import epochs_table
from examples.programs import clock
from graph_worth.harness import program_epochs
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Epoch, Epochs, Gpu, Host
from graph_worth.your_step.graphed import graphed
from tests.helpers.made_run import FOLDER, made_run, put, with_slowing_variable, write

LOSSES = [3.0, 2.0, 1.0]
NEEDS = {"gpt2_trainer": "transformers", "nanogpt_lightning": "lightning"}


def epoch(form, number=0, **more):
    times = {"epoch_s": 4.0 + number, "step_ms": {"eager": 10.0, "graphed": 4.0, "compile": 8.0}[form]}
    replays = {"replays": 122 if form == "graphed" else 0}
    fields = {"program": "muon", "step": "muon-build", "form": form, "round": number, "steps": 100, "losses": LOSSES}
    return Epoch(**fields | times | replays | more)


def content(*more, gpu="NVIDIA H200", **fields):
    host = Host(boot="b", gpus=[Gpu(name=gpu)] if gpu else [])
    runs = [epoch(form, number) for number in range(2) for form in ("eager", "graphed", "compile")]
    own = {"id": "20261129T101500Z-a7d396c1", "source": {"hash": "h"}, "versions": {"torch": "2.11"}, "others": 0}
    own |= {"begin_utc": "2026-11-29T10:15:00Z", "end_utc": "2026-11-29T10:20:00Z", "runs": [*runs, *more]}
    return Epochs(**{"schema": run_file.SCHEMA, "epochs": True, "host": host} | own | fields)


def written(folder, file):
    path = folder / "h200x1" / "epochs" / f"{file.id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(run_file.as_bytes(file))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("program", epochs.PROGRAMS)
def test_a_graphed_program_trains_as_the_eager_one(program, monkeypatch, capsys, tmp_path):
    """Twenty steps with host graphs, seventeen of them replays."""
    if program in NEEDS:
        pytest.importorskip(NEEDS[program])
    monkeypatch.setitem(graphed.__init__.__kwdefaults__, "cpu", "host_graph")
    (name, *flags), _ = epochs.PROGRAMS[program]
    module = importlib.import_module(f"examples.programs.{name}")
    numbers = {}
    for form in ("eager", "graphed"):
        monkeypatch.setattr(sys, "argv", [name, *flags, "--form", form, "--steps", "20"])
        (tmp_path / form).mkdir()
        module.main(module.Clock(("nanogpt", "muon")), str(tmp_path / form))
        numbers[form] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert [*(tmp_path / form).rglob("*.pt"), *(tmp_path / form).rglob("*.ckpt")], "no checkpoint"
    eager, graph = numbers["eager"], numbers["graphed"]
    assert len(eager["losses"]) == 2 and graph["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert (eager["replays"], graph["replays"]) == (0, 17)
    assert 0 < 10 * graph["step_ms"] / 1e3 < graph["epoch_s"]


def test_losses_that_are_not_eagers_are_faults():
    assert program_epochs.faults(content()) == []
    (fault,) = program_epochs.faults(content(epoch("graphed", 2, losses=[3.0, 2.0, 1.02])))
    assert fault == "muon graphed: its losses differ by 2.0 % from eager's"
    assert program_epochs.faults(content(epoch("compile", 2, losses=[3.0, 2.0, 1.02]))) == []
    for losses in ([3.0, None, 1.0], [3.0, 2.0]):
        (fault,) = program_epochs.faults(content(epoch("graphed", 2, losses=losses)))
        assert fault == "muon graphed: its losses cannot be compared with eager's"
    assert program_epochs.faults(content(epoch("graphed", 2, replays=0))) == ["muon graphed: nothing was replayed"]


def test_forms_take_turns_and_compiled_epochs_come_last():
    args = epochs.parse(["--programs", "muon", "nanogpt"])
    order = [f"{number} {program} {form}" for number, program, form in epochs.turns(args)]
    assert order[:3] == ["0 muon eager", "0 muon graphed", "0 nanogpt eager"]
    assert order[4:6] == ["1 muon graphed", "1 muon eager"]
    assert (
        order[-4:] == ["0 muon compile", "0 nanogpt compile", "1 muon compile", "1 nanogpt compile"]
        and len(order) == 12
    )


def test_a_program_that_fails_is_in_the_file_with_its_last_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(epochs.PROGRAMS, "gone", (["gone"], "gone-build"))
    assert epochs.main(["--programs", "gone", "--rounds", "1", "--minutes", "1e-9", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.rglob("epochs/*.json")
    (run,) = run_file.read_all(path).runs
    assert "No module named examples.programs.gone" in run.raised and path.stat().st_mode & 0o777 == 0o444
    out = capsys.readouterr().out
    assert "gone eager 1: failed (status 1: " in out and "left out: gone graphed 1: might pass 1e-09 minutes" in out
    assert judge.main([str(path)]) == 0 and "gone eager 1: failed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        epochs.main(["--programs", "nope"])
    assert "argument --programs: invalid choice: 'nope'" in capsys.readouterr().err


@pytest.mark.parametrize("status", [137, -9])
def test_a_program_that_a_signal_ended_says_so(tmp_path, monkeypatch, status):
    monkeypatch.setattr(epochs.supervisor, "run_logged", lambda *words: (tmp_path / "log").touch() or status)
    assert epochs.epoch((0, "muon", "eager"), 10, tmp_path / "log", {}).raised == "ended by SIGKILL"


def test_epochs_are_published_beside_runs_and_are_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    path = written(tmp_path / "runs", content())
    assert publish.main([str(path), "--into", str(tmp_path / "results")]) == 0
    target = tmp_path / "results" / "h200x1" / "epochs" / path.name
    assert target.read_bytes() == path.read_bytes()
    assert "muon graphed 1: epoch 4.0 s, 4.00 ms a step, 122 replays" in capsys.readouterr().out
    assert run_file.find(tmp_path / "results") == ([], [])
    with pytest.raises(run_file.Damaged, match="epochs of 6 runs, not one run"):
        run_file.read(path)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (content(gpu=""), "on a CPU"),
        (content(id="../x"), "cannot be the name of a file"),
        (content(runs=[epoch(form, 0, steps=99) for form in ("eager", "graphed")] * 2), "eager: 0 epochs of 100 steps"),
        (content(runs=[epoch("eager"), epoch("eager", 1), epoch("graphed")]), "graphed: 1 epochs of 100 steps"),
        (content(epoch("graphed", 2, losses=[9.0, 2.0, 1.0])), "losses differ by 200.0 %"),
        (content(runs=[]), "it holds no epoch"),
    ],
)
def test_epochs_that_are_no_evidence_are_refused(file, said, monkeypatch):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    assert said in publish.why_not(file)
    monkeypatch.setattr(publish, "is_committed", lambda source: False)
    assert publish.why_not(content()) == publish.UNKNOWN_SOURCE


def test_a_program_of_one_epoch_is_published_beside_a_whole_one(monkeypatch):
    monkeypatch.setattr(publish, "is_committed", lambda source: True)
    assert publish.why_not(content(*(epoch(form, program="nanogpt") for form in ("eager", "graphed")))) == ""


def test_the_table_has_epochs_steps_and_graphed_beside_busy_and_measure(tmp_path):
    nanogpt = {"program": "nanogpt", "step": "nanogpt-build"}
    more = [epoch("graphed", number, **nanogpt, busy_ms=3.9) for number in range(2)]
    more += [epoch("eager", **nanogpt), epoch("compile", **nanogpt, raised="no compiler here")]
    written(tmp_path, content(*more, others=1))
    own = {"model": "common.your_step", "label": "muon-build", "names": ("eager", "graph_step")}
    for number, (boot, ms) in enumerate({"b": 5.0, "c": 2.0}.items()):
        put(tmp_path, number, **own, boot=boot, ms={"eager": 12.0, "graph_step": ms})
    written(tmp_path, content(id="20991231T000000Z-empty", runs=[]))
    text = epochs_table.markdown(frame.load(tmp_path), tmp_path / "page.md")
    *_, muon_row, row = text.splitlines()
    assert muon_row.endswith(
        "| 4.0 to 5.0 | 4.0 to 5.0 | 4.0 to 5.0 | 10.00 | 4.00 | 8.00 | 2.50x, measure 5.00 (-20.0 %) and 2.40x |"
    )
    assert row.endswith("| failed: no compiler here | 10.00 | 4.00 |  | 2.50x, busy 3.90 (+2.6 %) |")
    assert "(h200x1/epochs/20261129T101500Z-a7d396c1.json), torch 2.11. Beside 1 benchmark on other GPUs." in text
    elsewhere = replace(content(), host=replace(content().host, boot="a"))
    written(tmp_path, elsewhere)
    assert "measure on another host 2.00 (+100.0 %) and 6.00x |" in epochs_table.markdown(
        frame.load(tmp_path), tmp_path / "page.md"
    )
    newest = made_run(**own, id="20291125T101500Z-a7d396c9", ms={"eager": 12.0, "graph_step": 2.0})
    write(with_slowing_variable(newest, tmp_path), tmp_path / FOLDER)
    text = epochs_table.markdown(frame.load(tmp_path), tmp_path / "page.md")
    assert "measure on another host 2.00 (+100.0 %) and 6.00x (eager slowed) |" in text


def test_the_last_batches_of_a_gpu_are_profiled_and_their_time_does_not_count(monkeypatch, capsys):
    turns, seconds = [], iter(range(100))

    def profiled(profile, num_steps, num_heat_steps):
        for number in range(num_heat_steps + num_steps):
            turns.append(number)
            yield
        turns.append("end")

    monkeypatch.setattr(sys, "argv", ["program", "--steps", "4"])
    monkeypatch.setattr(clock, "profiled", profiled)
    monkeypatch.setattr(clock.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(clock.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(clock.torch.cuda, "synchronize", lambda: None)
    ticks = clock.Clock()
    ticks.begin()
    for number in range(ticks.num_batches):
        assert "end" not in turns and (number < 4) == (turns == [])
        ticks.step()
    ticks.end([1.0])
    assert turns == [*range(25), "end"]
    # Readings: 0 at the begin, 1 after two steps, 2 after four, 28 after the profile, 29 at the end.
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["epoch_s"], numbers["step_ms"]) == (3, 500)
