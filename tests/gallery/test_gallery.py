"""The gallery: broken steps that the doctor names with kind, file and line, and sound ones on which it is silent.

A broken step marks its line by `# <- KIND` and names the public thread that it comes from.
"""

import re
from pathlib import Path

import pytest
import torch

from graph_worth.measuring import torch_settings
from graph_worth.your_step.doctor import UP_TO_OPTIMIZER, WHOLE, diagnose
from graph_worth.your_step.findings import NOTE, REMEDIES
from graph_worth.your_step.trial import EQUAL

FOLDER = Path(__file__).parent
BROKEN = sorted((FOLDER / "broken").glob("*.py"))
SOUND = sorted((FOLDER / "sound").glob("*.py"))
# On a CPU there is no stream, no pinned memory, and no capture to ask about.
NEED_GPU = {"capture_aware", "side_stream", "unpinned_copy"}
# They work on their parameters after a step of an optimizer, so there is no graph up to the optimizer.
GO_ON = {"ema_in_place", "two_optimizers"}
_MARK = re.compile(r"# <- ([a-z -]+)( \(note\))?$")
_THREAD = re.compile(r"([\w.-]+/[\w.-]+) (\d+)")
PAGE = FOLDER / "README.md"
DOCTOR = FOLDER.parents[1] / "docs" / "doctor.md"


@pytest.fixture(scope="module")
def device():
    chosen = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kept = torch.backends.cudnn.benchmark
    torch_settings.prepare(chosen)
    yield chosen
    torch.backends.cudnn.benchmark = kept


def _parameters(paths):
    marks = [pytest.mark.gpu]
    return [pytest.param(path, id=path.stem, marks=marks if path.stem in NEED_GPU else []) for path in paths]


def _mark(path):
    """(line, kind, whether it is a note) of the one marked line."""
    marks = [(number, _MARK.search(line)) for number, line in enumerate(path.read_text().splitlines(), 1)]
    ((line, mark),) = [(number, mark) for number, mark in marks if mark]
    return line, mark.group(1), mark.group(2) is not None


@pytest.mark.slow
@pytest.mark.parametrize("path", _parameters(BROKEN))
def test_broken_step_is_named_with_kind_file_and_line(path, device):
    line, kind, is_note = _mark(path)

    found = diagnose(f"{path}:build", device)

    named = {(each.kind, each.where) for each in found.findings if (each.level == NOTE) == is_note}
    assert (kind, f"{path}:{line}") in named, found.text()


@pytest.mark.slow
@pytest.mark.parametrize("path", _parameters(SOUND))
def test_doctor_is_silent_on_a_sound_step(path, device):
    found = diagnose(f"{path}:build", device)

    assert not [finding for finding in found.findings if finding.level != NOTE], found.text()
    assert found.outcomes[WHOLE.title] == EQUAL
    if path.stem in GO_ON:
        assert "after its optimizer's step" in found.outcomes[UP_TO_OPTIMIZER.title]
    else:
        assert found.outcomes[UP_TO_OPTIMIZER.title] == EQUAL


def test_gallery_is_as_large_as_it_says_and_each_broken_step_names_its_thread():
    assert len(BROKEN) == 49
    assert len(SOUND) >= 20
    assert len(BROKEN) - len(NEED_GPU) >= 20
    for path in BROKEN:
        docstring = path.read_text().split('"""')[1]
        assert _THREAD.search(docstring), path.name
        assert _mark(path)[1] in REMEDIES, path.name


def test_page_links_each_broken_step_and_its_thread_and_knows_each_kind():
    page = PAGE.read_text()
    for path in BROKEN:
        repository, number = _THREAD.search(path.read_text().split('"""')[1]).groups()
        assert f"broken/{path.name}" in page, path.name
        assert f"https://github.com/{repository}/issues/{number}" in page, path.name
    assert {_mark(path)[1] for path in BROKEN} <= {kind for kind in REMEDIES if kind in page}
    doctor = " ".join(DOCTOR.read_text().split())
    assert {kind for kind in REMEDIES if kind not in doctor} == set()
    text = " ".join(line for line in DOCTOR.read_text().splitlines() if not line.startswith("|"))
    assert len(text.split()) <= 600
