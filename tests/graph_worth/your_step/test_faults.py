"""Steps that fail by themselves, and graphs that run out of memory: one clear line each."""

import errno

import pytest
import torch

from graph_worth.your_step import doctor
from graph_worth.your_step.findings import WRONG
from graph_worth.your_step.graphs import GraphedStep
from graph_worth.your_step.state import StepState
from graph_worth.your_step.trial import EQUAL, Trial

STEP = """
import os, torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        os._exit(3)

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [torch.randn(4, 8) for _ in range(4)]
    # more
    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""


@pytest.fixture
def step_file(tmp_path):
    def write(old="# more", new="# more"):
        path = tmp_path / "my_step.py"
        path.write_text(STEP.replace(old, new))
        return f"{path}:build"

    return write


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_batch_that_is_not_finite_is_named(step_file, value):
    found = doctor.diagnose(step_file(new=f"batches[3][0, 0] = float('{value}')"), torch.device("cpu"))

    (finding,) = found.findings
    assert (finding.kind, finding.level) == ("not finite", WRONG)
    assert "loss of step 3 is" in finding.evidence


@pytest.mark.filterwarnings("ignore")
def test_a_data_worker_that_dies_is_one_line(step_file, capsys):
    dies = "batches = list(torch.utils.data.DataLoader(Rows(), num_workers=1))"

    with pytest.raises(SystemExit) as end:
        doctor.main([step_file(new=dies)])

    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and "DataLoader worker" in said and "my_step.py:16: build(device) raised" in said


def test_a_full_disk_is_one_line(step_file, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(doctor, "write_text", full)
    with pytest.raises(SystemExit) as end:
        doctor.main([step_file(), str(tmp_path / "findings")])
    assert end.value.code == 2 and capsys.readouterr().err.strip().endswith("findings: No space left on device")


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_a_graph_that_runs_out_of_memory_is_named_and_the_next_one_is_tried(step_file, when):
    state = StepState(step_file(), torch.device("cpu"), "test")

    class TooLarge(GraphedStep):
        def captured(self, index):
            return self.full() if when == "capture" else super().captured(index)

        def step(self, index):
            self.full()

        def full(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. of which 1.00 GiB is free.")

    trial = Trial(state, changes_host=False)
    outcome = trial.of(doctor.making(TooLarge), [])

    assert outcome.text == "failed: out of memory: asked for 2.00 GiB, 1.00 GiB free"
    assert outcome.finding.kind == "memory" and "capture smaller parts" in outcome.finding.evidence
    assert trial.of(doctor.making(GraphedStep), []).text == EQUAL


def test_memory_that_is_free_between_replays_is_filled(step_file):
    # Integers that nobody wrote: in a graph they are what its last replay has left.
    reads = "seen = torch.empty(4, dtype=torch.int64, device=loss.device)\n        "
    reads += "loss = loss * (1.0 + (seen == 0x5A5A5A5A5A5A5A5A).sum())"
    found = doctor.diagnose(step_file("loss.backward()", f"{reads}\n        loss.backward()"), torch.device("cpu"))

    (finding,) = [each for each in found.findings if each.kind == "uninitialised memory"]
    assert "free between them" in finding.evidence and "the capture is at fault" in found.outcomes[doctor.WHOLE.title]


def test_a_step_that_is_right_on_copies_of_its_batches_leaves_the_fault_to_the_capture(step_file):
    class Twice(GraphedStep):
        def trace(self, static):
            self.state.step(static)
            return self.state.step(static)

    state = StepState(step_file(), torch.device("cpu"), "test")
    text = Trial(state, changes_host=False).of(doctor.making(Twice), []).text
    assert "after step 0" in text and "on the same copies of its batches the step is right" in text
    # Where trainings differ for another reason, nobody can tell.
    assert "copies" not in Trial(state, changes_host=True).of(doctor.making(Twice), []).text


@pytest.mark.parametrize("call", ["os._exit(0)", "raise SystemExit", "__import__('sys').exit(0)"])
@pytest.mark.parametrize("place", ["    # more", "        optimizer.zero_grad()"])
def test_a_step_that_ends_its_process_is_told(step_file, capsys, call, place):
    with pytest.raises(SystemExit) as ended:
        doctor.main([step_file(place, f"{place[: -len(place.strip())]}{call}")])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "my_step.py:" in said and "raised SystemExit" in said


def test_a_batch_that_contains_itself_is_one_line(step_file):
    with pytest.raises(ValueError, match="batch 0 contains itself") as caught:
        StepState(step_file(new="batches = [[]]; batches[0] += [batches[0]]"), torch.device("cpu"), "p")
    assert str(caught.value).isprintable()
