"""A model in a new folder: with no edit elsewhere it is described, measured, and in every table, page and figure."""

import shutil
import subprocess
import sys

import pytest
from msgspec.structs import replace

from benchmarks import frame, overview, plot
from benchmarks.pages import tables
from graph_worth.folders import ROOT
from graph_worth.harness import judge
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Gpu
from tests.helpers.made_run import H200, write

pytestmark = pytest.mark.slow

README = "# Mine\n\n<!-- table: model my_model -->\n<!-- end -->\n"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A checkout with the harness and the folder my_model alone, whose script is that of examples/minimal."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("benchmarks", "common", "graph_worth"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "examples" / "minimal" / "train.py").read_text()
    (folder / "my_model").mkdir()
    (folder / "my_model" / "train.py").write_text(text.replace("examples.minimal", "my_model"))
    (folder / "my_model" / "README.md").write_text(README)
    command = [sys.executable, "-m", "benchmarks.run", "--model=my_model/", "--preset=tiny", "--cycles=8"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def found(checkout):
    """Its run, with a GPU's name written into it, since pages show no runs on CPUs."""
    (path,) = (checkout / "runs").rglob("*.json")
    run = run_file.read(path)
    for cycle in run.builds[""].cycles:
        # As of an older file, whose host's pace nobody asks for: this host may be busy.
        cycle.others = None
    for variant in run.builds[""].variants.values():
        # What a GPU would have measured: less than any host takes for a step.
        variant.profile.busy_ms, variant.profile.kernels = 1e-3, 9.0
        for block in variant.blocks:
            block.issue_ms = [1e-3]
    # A worker on a GPU drops the variable by which older runs are slowed.
    host = replace(run.host, gpus=[Gpu(**gpu) for gpu in H200], variables={})
    on_gpu = replace(run, preset="bench", host=host, device="cuda")
    write(on_gpu, checkout / "results" / "h200x1" / "my_model-bench")
    return frame.load(checkout / "results")


def test_the_script_to_start_from_stays_small():
    text = (ROOT / "examples" / "minimal" / "train.py").read_text()
    code = text.split('"""', 2)[2].strip()
    assert len(code.splitlines()) <= 79


def test_a_copy_passes_the_contract(checkout):
    """As it is, in the hour in which somebody starts a model."""
    shutil.copytree(ROOT / "tests" / "helpers", checkout / "tests" / "helpers")
    for name in ("tests/__init__.py", "tests/conftest.py", "tests/test_contract.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, checkout / name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_contract.py"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout and "failed" not in done.stdout


def test_a_copy_that_still_names_the_example_is_refused(checkout):
    (checkout / "other_model").mkdir()
    shutil.copyfile(ROOT / "examples" / "minimal" / "train.py", checkout / "other_model" / "train.py")
    shutil.copytree(ROOT / "examples" / "minimal", checkout / "examples" / "minimal")
    command = [sys.executable, "-m", "benchmarks.run", "--model=other_model", "--preset=tiny"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)
    shutil.rmtree(checkout / "other_model")
    shutil.rmtree(checkout / "examples")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "other_model.train parses the command line of examples.minimal" in done.stderr


@pytest.mark.parametrize(
    ("line", "said"), [("if index == 7: break", ""), ("1 / (index - 7)", " and raised ZeroDivisionError")]
)
def test_a_loop_that_ends_early_fails_when_it_is_measured_too(checkout, line, said):
    text = (ROOT / "examples" / "minimal" / "train.py").read_text().replace("examples.minimal", "early")
    (checkout / "early").mkdir(exist_ok=True)
    loop = f"run.step(index)\n            {line}"
    (checkout / "early" / "train.py").write_text(text.replace("run.step(index)", loop))
    command = [sys.executable, "-m", "benchmarks.run", "--model=early", "--preset=tiny"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=300)
    shutil.rmtree(checkout / "early")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the loop in early/train.py made " in done.stdout and said in done.stdout and "Traceback" not in done.stdout


def test_it_is_measured(checkout):
    (path,) = (checkout / "runs").rglob("*.json")
    assert path.parent.name == "my_model-tiny"
    (own,) = judge.judged(run_file.read(path)).values()
    verdict = own.verdicts["graph_step"]
    assert verdict.status == "pass" and verdict.parity == verdict.after == "bitwise"
    assert own.build.variants["graph_step"].capture.graphs == 1


def test_it_is_in_the_tables_and_pages(checkout, found):
    screen = tables.screen(found, found.rows)
    assert "my_model/bench" in screen and "graph_step" in screen
    pages = {path.relative_to(checkout).as_posix(): text for path, text in overview.wanted(found, checkout).items()}
    assert set(pages) == {"results/overview.md", "results/overview.csv", "my_model/README.md"}
    assert "| [my_model](../my_model/README.md) |" in pages["results/overview.md"]
    assert "h200x1/my_model-bench) | graph_step |" in pages["my_model/README.md"]


def test_it_is_in_the_figures(found, tmp_path):
    drawn, left_out = plot.draw(found, tmp_path)
    assert "roofline" in drawn, left_out
    for name in drawn:
        assert "my_model" in (tmp_path / f"{name}.svg").read_text()
