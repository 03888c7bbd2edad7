"""Steps of real libraries, as their docs write them, with the right answer beside: on a CPU and on a GPU the same.

A line that a graph cannot hold is marked by `# <- KIND[ at FILE][, KIND ...]`, with the library's file. The exit
status follows from the marks: none 0, others those of the findings. A library that is absent is named and skipped.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch

from graph_worth.measuring import torch_settings
from graph_worth.your_step.doctor import UP_TO_OPTIMIZER, WHOLE, diagnose
from graph_worth.your_step.findings import NOTE
from graph_worth.your_step.trial import EQUAL

pytestmark = pytest.mark.slow
STEPS = sorted((Path(__file__).parent / "steps").glob("*.py"))
_IMPORT = re.compile(r"^(?:from|import) (\w+)", re.MULTILINE)
# Kinds that no capture holds; the other ones would train wrongly.
STOP = {"optimizer", "host data", "host read", "shape from values"}
DEVICES = [pytest.param("cpu", marks=pytest.mark.long), pytest.param("cuda:0", marks=pytest.mark.gpu)]


def marks_of(path):
    """{(line, kind): file of the library, or ""} of a step."""
    marks = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for mark in filter(None, line.partition("# <- ")[2].split(", ")):
            kind, _, file = mark.partition(" at ")
            marks[number, kind] = file
    return marks


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", STEPS, ids=[path.stem for path in STEPS])
def test_doctor_says_of_a_step_of_a_library_what_is_right(path, device, tmp_path, monkeypatch):
    for name in _IMPORT.findall(path.read_text()):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError) as error:  # absent, or built for another torch
            pytest.skip(f"{name}: {error}".splitlines()[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    device, marks = torch.device(device), marks_of(path)
    torch_settings.prepare(device)

    diagnosis = diagnose(f"{path}:build", device)

    named = {(finding.kind, finding.where): finding for finding in diagnosis.findings if finding.level != NOTE}
    expected = {(kind, f"{path}:{line}"): file for (line, kind), file in marks.items()}
    # A GPU also sees calls that wait within an operator.
    more = named.keys() - expected.keys() if device.type == "cpu" else set()
    assert expected.keys() <= named.keys() and not more, diagnosis.text()
    for key, file in expected.items():
        assert f"/{file}:" in named[key].evidence or not file, diagnosis.text()
    assert diagnosis.status == max((6 if kind in STOP else 5 for _, kind in marks), default=0), diagnosis.text()
    # A graph of a GPU does what is said here of the host graph, but a wrong number need not show in eight steps.
    if device.type == "cpu" or diagnosis.status != 5:
        assert (diagnosis.outcomes[WHOLE.title] == EQUAL) == (not marks), diagnosis.text()


STEP = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.OPTIMIZER(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step, [torch.randn(8, 16) for _ in range(4)], [model, optimizer]
"""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Adagrad", "Adafactor"])
def test_an_optimizer_that_counts_or_measures_on_the_host_stays_eager(name, device, tmp_path):
    (tmp_path / "my_step.py").write_text(STEP.replace("OPTIMIZER", name))
    torch_settings.prepare(torch.device(device))

    diagnosis = diagnose(f"{tmp_path}/my_step.py:build", torch.device(device))

    assert diagnosis.status in (5, 6) and diagnosis.outcomes[WHOLE.title] != EQUAL, diagnosis.text()
    assert diagnosis.outcomes[UP_TO_OPTIMIZER.title] == EQUAL, diagnosis.text()
