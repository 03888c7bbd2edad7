"""The wheel, unpacked and started as the command graph-worth, beside a project with packages of our names."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from graph_worth.folders import ROOT, START
from graph_worth.harness import measure
from graph_worth.your_step import step_file

# The launcher's environment has no torch.
LAUNCHER = "import sys; sys.modules['torch'] = None; from graph_worth.__main__ import main; sys.exit(main())"
PROJECT = {
    "common/__init__.py": "WIDTH = 8",
    "common/config.py": "from common import WIDTH\ndef width(): return WIDTH",
    "tests/__init__.py": "SCALE = 1.0",
    "benchmarks/__init__.py": "RATE = 0.1",
    "data/rows.txt": "16",
    "steps/my_step.py": """
import torch
from benchmarks import RATE
from common.config import width
from tests import SCALE

def build(device):
    torch.manual_seed(0)
    rows = int(open("data/rows.txt").read())
    model = torch.nn.Linear(width(), width()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, fused=True)
    def step(batch):
        import common.config
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean() * SCALE * common.config.width()
        loss.backward()
        optimizer.step()
        return loss
    return step, [torch.randn(rows, width()) for _ in range(2)], [model, optimizer]
""",
}


@pytest.fixture
def project(tmp_path):
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def copy_package(site):
    """Copy into a folder what the wheel holds."""
    bytecode = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "graph_worth", site / "graph_worth", ignore=bytecode)
    shutil.copytree(ROOT / "results" / "operators", site / "graph_worth" / "results" / "operators")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    if importlib.util.find_spec("hatchling"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder / "site")
    else:  # on a GPU machine without a registry
        copy_package(folder / "site")
    # Nothing else of the wheel can be imported by a user's program.
    assert {path.name for path in (folder / "site").iterdir() if path.suffix != ".dist-info"} == {"graph_worth"}

    def run(where, *words):
        code = f"import sys; sys.path.insert(0, {str(folder / 'site')!r}); {LAUNCHER}"
        return subprocess.run(
            [sys.executable, "-c", code, *words], cwd=where, capture_output=True, text=True, timeout=300
        )

    run.site = folder / "site"
    return run


@pytest.mark.slow
def test_an_installed_command_measures_a_step_beside_packages_of_our_names(installed, project):
    done = installed(project, "measure", "steps/my_step.py:build", "--python", sys.executable, "--json")
    told = json.loads(done.stdout)
    assert done.returncode == told["status"] == measure.NOT_MEASURED, done.stderr
    assert told["verdict"] == "not measured" and {"graph_step", "graph_fwd_bwd"} <= told["variants"].keys()
    assert list((project / "runs").rglob("*.json")) == [type(project)(told["run"])]
    page = installed(project, "report", told["run"])
    assert page.returncode == 0 and (project / page.stdout.strip()).is_file()


@pytest.mark.slow
def test_an_installed_doctor_names_the_line(installed, project):
    path = project / "steps" / "my_step.py"
    text = path.read_text().replace("return loss", "return loss.item()")
    path.write_text(text.replace("loss.backward()", "loss.backward(); torch.linalg.lu_factor(model.weight.detach())"))
    done = installed(project, "doctor", "steps/my_step.py:build", "--python", sys.executable)
    assert done.returncode == measure.NO_CAPTURE, done.stderr
    line = path.read_text().splitlines().index("        return loss.item()") + 1
    assert f"{path}:{line}: host read, cannot be captured" in done.stdout
    # By the table of operators, which the wheel has, too.
    assert "linalg_lu_factor is held by no graph: it waits for the GPU in 4 of 4 samples" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["doctor", "measure"])
def test_an_installed_command_names_itself_in_mistakes_of_a_step(installed, project, name):
    path = project / "steps" / "my_step.py"
    path.write_text(path.read_text().replace("return step, ", "return "))
    done = installed(project, name, "steps/my_step.py:build", "--python", sys.executable)
    assert done.returncode == measure.MISTAKE and not done.stdout.startswith("python")
    assert done.stderr.startswith(f"graph-worth {name}: my_step.py: build(device) returned a tuple of 2"), done.stderr
    done = installed(project, name, "steps/my_step.py:build", "--cycles", "x")
    assert done.returncode == measure.MISTAKE and done.stderr.startswith(f"graph-worth {name}: ")


@pytest.mark.slow
def test_an_installed_watch_looks_at_a_script(installed, project):
    code = "import torch\nfrom common.config import width\nmodel = torch.nn.Linear(width(), 1)\n"
    code += "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nfor _ in range(30):\n"
    code += "    float(model(torch.ones(2, width())).sum())\n    optimizer.step()\nraise SystemExit(4)"
    (project / "train.py").write_text(code)
    done = installed(project, "watch", "--", sys.executable, "train.py")
    assert done.returncode == 4 and f"{project}/train.py:6: Tensor.__float__, 1 in a step" in done.stderr, done.stderr


@pytest.mark.slow
def test_the_wheel_holds_the_files_that_are_copied_where_none_is_built(installed, tmp_path):
    copy_package(tmp_path / "copy")
    folders = installed.site / "graph_worth", tmp_path / "copy" / "graph_worth"
    names = [{path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in folders]
    assert {name for name in names[0] if "__pycache__" not in name.parts} == names[1]


# A step with a capture of the user's own beside it, and a script.
ON_GPU = """
import torch
from graph_worth import graphed

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(20)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    batches = [torch.randn(32, 256, device=device) for _ in range(4)]

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def mine():
        captured = graphed(step, [model, optimizer], verify=0)
        captured.capture(batches[0])
        return captured

    return {"eager": step, "mine": mine}, batches, [model, optimizer]

if __name__ == "__main__":
    steps, batches, _ = build(torch.device("cuda"))
    for index in range(40):
        steps["eager"](batches[index % 4]).item()
"""


@pytest.mark.gpu
def test_on_a_gpu_an_installed_command_measures_a_step_and_a_capture_of_the_users_own(installed, project):
    (project / "on_gpu.py").write_text(ON_GPU)
    words = ["--python", sys.executable, "--variants", "eager,graph_step,mine", "--cycles", "3", "--json"]
    done = installed(project, "measure", "on_gpu.py:build", *words)
    told = json.loads(done.stdout)
    assert done.returncode == told["status"] and told["verdict"] in ("faster", "same", "unclear", "slower"), done.stderr
    assert {"graph_step", "mine"} <= told["variants"].keys(), done.stderr  # those that train as eager does


@pytest.mark.gpu
def test_on_a_gpu_an_installed_watch_tells_the_most_that_a_graph_can_gain(installed, project):
    (project / "on_gpu.py").write_text(ON_GPU)
    done = installed(project, "watch", "--", sys.executable, "on_gpu.py")
    assert done.returncode == 0 and "x at most" in done.stderr, done.stderr
    assert f"{project}/on_gpu.py:{len(ON_GPU.splitlines())}: " in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nope"], 2, "graph-worth: takes one of measure, bench, doctor"),
        (["measure", "nowhere.py"], 2, "graph-worth measure: --step nowhere.py: there is no file"),
        (["report", "nowhere.json"], 2, "graph-worth report: nowhere.json"),
        (["--help"], 0, ""),
    ],
)
def test_a_mistake_is_one_line(installed, project, words, status, said):
    done = installed(project, *words)
    assert done.returncode == status and done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)
    assert ("graph-worth measure my_step.py:build" in done.stdout) == (words == ["--help"])


@pytest.mark.slow
def test_a_clone_leaves_the_names_free_too(project):
    words = [sys.executable, str(START), "graph_worth.your_step.doctor", "steps/my_step.py:build"]
    variables = os.environ | {step_file.FOLDER: str(project)}
    done = subprocess.run(words, cwd=project, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Nothing stands against a graph" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------------------
# A training script of somebody's own, by the contract


def run_in(project, way, installed, *words):
    """(finished command) of `graph-worth` from the wheel, or of `python -m graph_worth` with a clone on PYTHONPATH."""
    path = installed.site if way == "wheel" else ROOT
    variables = os.environ | {"PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, timeout=300)


@pytest.fixture
def script(project):
    """The script of examples/minimal, in a project with packages of our names."""
    text = (ROOT / "examples" / "minimal" / "train.py").read_text()
    (project / "mine").mkdir()
    (project / "mine" / "train.py").write_text(text.replace("examples.minimal", "mine"))
    return project / "mine" / "train.py"


@pytest.mark.slow
def test_a_training_script_of_a_project_trains_and_is_measured(installed, project, script):
    flags = ("--preset", "tiny", "--variant", "graph_step", "--steps", "4")
    trained = run_in(project, "wheel", installed, "mine.train", *flags)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    words = ("graph_worth", "bench", "--model", "mine", "--preset", "tiny", "--cycles", "1", "--no-audit")
    hashes = set()
    for _ in range(2):
        done = run_in(project, "wheel", installed, *words)
        assert done.returncode == 0 and "graph_step" in done.stdout, done.stdout + done.stderr
        hashes |= {json.loads(path.read_text())["source"]["hash"] for path in (project / "runs").rglob("*.json")}
        script.write_text(script.read_text() + "\n# another script\n")
    assert len(hashes) == 2, "the script's code is in the hash"
    done = run_in(project, "wheel", installed, "graph_worth", "bench", "--model", "nope")
    assert (done.returncode, done.stderr) == (2, "graph-worth bench: unknown model 'nope', --model takes one of mine\n")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "clone"])
def test_a_project_with_packages_of_our_names_imports_the_public_names(installed, project, way):
    code = "import common, benchmarks, tests\nfrom graph_worth import Pool, Training, session, variant\n"
    code += "print(common.WIDTH, Pool.__name__)"
    (project / "program.py").write_text(code)
    done = run_in(project, way, installed, "program")
    assert done.stdout == "8 Pool\n", done.stderr
