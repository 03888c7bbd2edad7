"""python -m benchmarks.watch: reads, shapes and steps of scripts as they are, and scripts that it cannot watch."""

import json
import os
import re
import subprocess
import sys

import pytest

from graph_worth.folders import ROOT
from graph_worth.harness import watch

HEAD = """
import os, signal, sys, torch
torch.set_num_threads(1)
model, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
first = torch.optim.AdamW(model.parameters(), lr=1e-3)
second = torch.optim.SGD(critic.parameters(), lr=0.1)
def train(steps, rows=lambda index: 8, optimizers=(first,), micro=1, end=lambda index: None):
    for index in range(steps):
        for optimizer in optimizers:
            for _ in range(micro):
                critic(model(torch.randn(rows(index), 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        end(index)
"""
FEW = "fewer than 30 steps were made"


def watched(tmp_path, code, python=()):
    """(exit status, stdout, the lines of the watch) of a script."""
    (tmp_path / "train.py").write_text(HEAD + code)
    words = [sys.executable, "-m", "benchmarks.watch", "--", sys.executable, *python, str(tmp_path / "train.py")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if line]


@pytest.mark.slow
def test_a_script_as_it_is_shows_its_reads_and_shapes_and_keeps_its_status_output_and_hooks(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own = 'its own sitecustomize'")
    (tmp_path / "common.py").write_text("WIDTH = 4")
    end = "\nimport common\ndef end(index): index % 5 or model.weight.sum().item()"
    code = f"{end}\ntrain(40, lambda index: 8 + index % 2, end=end)"
    code += "\nfrom torch.optim.optimizer import _global_optimizer_post_hooks as hooks"
    code += "\nprint(sys.own, common.WIDTH, dict(hooks), torch.Tensor.item.__qualname__)"
    status, out, lines = watched(tmp_path, f"{code}\nsys.exit(7)")
    assert (status, out) == (7, "its own sitecustomize 4 {} TensorBase.item\n")
    step, ms, reads, read, rare, shapes = lines
    assert step == f"a step is a call of step() of AdamW at {tmp_path}/train.py:12"
    assert 0 < float(ms.split()[1]) < 1000 and "needs a GPU" in ms and reads.startswith("reads on the host, which")
    line = (tmp_path / "train.py").read_text().splitlines().index(end.splitlines()[2]) + 1
    assert read == f"  {tmp_path}/train.py:{line}: Tensor.item, 0.2 in a step" and rare == watch.RARE
    assert shapes.startswith("the inputs of Linear change their shapes") and shapes.endswith("[8, 4]; [9, 4]")


SCRIPTS = [
    # The optimizer that is called least often and last ends a step.
    ("train(30, optimizers=[first] * 5 + [second])", 0, ["of SGD", "  in it are 5 calls of AdamW", "host: none"]),
]
MORE = [
    ("", 0, ["nothing was seen: no optimizer of torch.optim has made a step"]),
    ("train(30)\nos.kill(os.getpid(), signal.SIGKILL)", 137, ["the script was ended by SIGKILL", "host: none"]),
    ("os.fork() and os.wait()\ntrain(30)", 0, ["2 processes made steps", "host: none"]),
    ("train(29)", 0, ["reads on the host were not looked at in fewer than 30 steps"]),
    ("train(3)\nsys.exit(5)", 5, [FEW]),
    ("train(5)\nos.kill(os.getpid(), signal.SIGKILL)", 137, ["the script was ended by SIGKILL", FEW]),
    # A child that trains is watched, and one of a parent that trains is not.
    ("os.fork() and os.wait() or train(30)\nos._exit(0)", 0, ["a step is a call", "host: none"]),
    ("train(15)\nos.fork() and os.wait() and train(15) or train(20)\n", 0, ["a step is a call", "host: none"]),
    # Microbatches are one step.
    ("train(30, micro=4)", 0, ["a step is a call of step() of AdamW", "host: none"]),
    ("train(1, optimizers=[second])\ntrain(130)", 0, ["of AdamW", "host: none"]),
]


@pytest.mark.parametrize(
    ("code", "status", "said"), [*SCRIPTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
)
def test_scripts_that_train_otherwise_or_end_early(tmp_path, code, status, said):
    found, _, lines = watched(tmp_path, code)
    assert found == status
    text = "\n".join(lines)
    for each in said:
        assert each in text, text
    assert ("in it are" in text) == ("in it are" in str(said)) and "2 processes" not in text.replace(said[0], "")


@pytest.mark.slow
def test_json_is_all_that_stdout_has(tmp_path):
    (tmp_path / "train.py").write_text(f"{HEAD}\nprint('the script speaks', flush=True)\ntrain(30)\nsys.exit(3)")
    command = [sys.executable, "-m", "benchmarks.watch", "--json", "--", sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    told = json.loads(done.stdout)
    assert done.returncode == told["status"] == 3 and "the script speaks" in done.stderr
    assert told["steps"] == 30 and told["step_ms"] > 0 and "at_most" not in told and told["reads"] == []
    assert told["optimizer"].startswith("AdamW at ") and told["text"] in done.stderr


def test_json_has_the_most_that_a_graph_can_gain_and_the_lines_that_read(tmp_path):
    assert watch.as_json(tmp_path, 0, "nothing") == {"status": 0, "text": "nothing", "processes": 0, "reads": []}
    told = TOLD | {"reads": [["a.py:3", "Tensor.item", 0.2, ""]]}
    (tmp_path / "steps-1.json").write_text(json.dumps(told))
    found = watch.as_json(tmp_path, 0, "")
    read = {"line": "a.py:3", "call": "Tensor.item", "in_a_step": 0.2, "note": ""}
    assert found["at_most"] == found["expected"] == 1.5 and found["reads"] == [read] and found["kernels"] == 500


SEEN = """
mask = torch.tensor([True, False, True, False])
kind = torch.optim.LBFGS(model.parameters(), max_iter=2)
def is_tracing():
    return torch.cuda.is_current_stream_capturing()
def look(rows):
    if not is_tracing():
        rows.isnan().any().item()
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 400
    def __getitem__(self, index):
        return torch.full((4,), float(torch.tensor(index).item()))
for index, rows in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=8)):
    look(rows)
    rows[:, mask]
    rows.nonzero()
    rows.unique()
    rows[0]
    index % 7 or rows.sum().item()
    kind.step(lambda: (kind.zero_grad(), loss := model(rows).square().mean(), loss.backward())[1])
    if index == 32:
        break
"""


def test_reads_of_loaders_masks_and_lbfgs_are_seen_and_those_that_a_capture_skips_stand_apart(tmp_path):
    asked = "import torch\ntorch.cuda.is_current_stream_capturing = lambda: False\n"
    _, _, lines = watched(tmp_path, asked + SEEN)
    code = (tmp_path / "train.py").read_text().splitlines()
    titles, found = list(watch.TITLES), {}
    for line in lines[2:]:
        if line in titles:
            title = line
        elif read := re.match(r"  /[^ ]*train.py:(\d+): ([^,]*), ", line):
            found.setdefault(titles.index(title), []).append((code[int(read[1]) - 1].strip(), read[2]))
    assert {line for line, _ in found[2]} == {"return torch.full((4,), float(torch.tensor(index).item()))"}, lines
    assert found[1] == [("rows.isnan().any().item()", "Tensor.item")], lines
    seen = {line for line, _ in found[0]}
    assert {"rows[:, mask]", "rows.nonzero()", "rows.unique()", "index % 7 or rows.sum().item()"} < seen, lines
    assert any("kind.step" in line for line in seen) and not any("rows[0]" in line for line in seen)
    assert lines[-1] == watch.RARE, lines


def test_what_was_seen_stands_there_while_the_script_goes_on_and_once(tmp_path):
    code = f"train(30)\nwhile not os.path.exists({str(tmp_path / 'end')!r}): torch.ones(1)\nos.kill(os.getpid(), 9)"
    (tmp_path / "train.py").write_text(HEAD + code)
    words = [sys.executable, "-m", "benchmarks.watch", "--", sys.executable, str(tmp_path / "train.py")]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        lines = [next(process.stderr) for _ in range(4)]
        (tmp_path / "end").touch()
        assert lines[1].startswith("a step is a call of step()") and lines[3] == "reads on the host: none\n"
        assert process.stderr.read() == "\nthe script was ended by SIGKILL\n" and process.wait() == 137


def test_no_package_is_needed():
    code = "import sys; sys.modules |= {'msgspec': None, 'torch': None}; import graph_worth.harness.watch"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_signal_is_handed_on_to_the_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import signal, time\nprint('ready', flush=True)\ntime.sleep(60)")
    words = [sys.executable, "-m", "benchmarks.watch", "--", sys.executable, str(path)]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    _, said = process.communicate(timeout=300)
    assert process.returncode == 143 and "the script was ended by SIGTERM" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("python", "code", "said"),
    [
        (["-I"], "train(30)", watch.NOT_SEEN[""]),
        (["-c", "print(1)"], "", watch.NOT_SEEN["python"]),
    ],
)
def test_a_script_that_the_watch_does_not_reach_is_told_so_in_one_line(tmp_path, python, code, said):
    status, _, lines = watched(tmp_path, code, python)
    assert (status, lines) == (0, [f"nothing was seen: {said}"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "takes a command behind --"),
        (["--"], "takes a command behind --"),
        (["--", "/nowhere/python"], "/nowhere/python: No such file or directory"),
        (["python", "train.py"], "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_line(words, said):
    command = [sys.executable, "-m", "benchmarks.watch", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1 and not done.stdout


TOLD = {"pid": 1, "rank": 0, "steps": 30, "step_ms": 15.0, "on_gpu": True, "busy_ms": 10.0, "graph_share": 0.0}
TOLD |= {"optimizer": "Adam at a.py:1", "num_calls": {}, "reads": [], "shapes": {"Net": [[[8, 4]]]}}
TOLD |= {"kernels": 500, "issue_ms": 15.0, "collective_ms": 0.0, "loop": ""}
HOST = "us a kernel for all that the script does in a step: "


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "step 15 ms: 500 kernels keep the GPU busy for 10 ms of it, 20 us each\nthis host takes 30 us a kernel"),
        (
            {},
            f"{HOST}expect up to 1.50x from a graph of the whole step\n  half of our graphs that gained over 1.1x",
        ),
        ({}, "\n  for it: graph_worth.graphed of your step\n"),
        (
            {"loop": "transformers"},
            "\n  for it: graph_worth.transformers.GraphedTrainer in the place of Trainer, on one",
        ),
        (
            {"loop": "lightning"},
            "\n  for it: graph_worth.lightning.CUDAGraphCallback among the Trainer's callbacks, on",
        ),
        # A step that waits for more than its launches.
        (
            {"issue_ms": 12.0},
            f"takes 24 {HOST}expect up to 1.20x from a graph of the whole step, and 1.50x (step / busy)",
        ),
        (
            {"issue_ms": 6.0},
            f"takes 12 {HOST}a graph has little to remove, though the GPU waits for 33 % of the step\nre",
        ),
        ({"step_ms": 10.05, "issue_ms": 10.0}, f"takes 20 {HOST}a graph has little to remove\nreads"),
        ({"graph_share": 0.98}, "20 us each; graphs launch 98 % of them already\nthis host"),
        (
            {"collective_ms": 4.0},
            "\n4 ms of these are NCCL's, which also wait for other ranks: a graph may gain more\nthis",
        ),
        ({"busy_ms": None}, "step 15 ms; the GPU's busy time was not seen\nreads"),
        ({"busy_ms": 0.0, "kernels": 3}, "step 15 ms; the GPU's busy time was not seen\nreads"),
        ({"kernels": None}, "step 15 ms; the GPU's busy time was not seen\nreads"),
        ({"issue_ms": None}, "20 us each\nreads"),
        ({"on_gpu": False, "kernels": None, "busy_ms": None}, "what a graph can gain, needs a GPU\nreads"),
        ({"second_streams": ["a.py:7"]}, "your step\nsecond stream: a.py:7; a graph of kernels this short"),
        ({"second_streams": [""]}, "\nsecond stream: set by no line of the script; "),
        ({"error": "RuntimeError: profiler"}, "the watch has ended early: RuntimeError: profiler\n"),
    ],
)
def test_the_gain_to_expect_is_the_hosts_time_over_busy(tmp_path, changed, said):
    for rank, more in enumerate([changed, {"step_ms": 99.0}]):
        (tmp_path / f"steps-{rank}.json").write_text(json.dumps(TOLD | more | {"rank": rank, "pid": 10 + rank}))
    text = watch.text_of(tmp_path)
    assert said in text and text.startswith("2 processes made steps; this is process 10\n") and "shapes" not in text


@pytest.mark.parametrize("value", ["", ":4096:8"])
def test_a_variable_that_slows_eager_is_named(tmp_path, monkeypatch, value):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if value:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    (tmp_path / "steps-0.json").write_text(json.dumps(TOLD))
    assert ("CUBLAS_WORKSPACE_CONFIG is set" in watch.text_of(tmp_path)) == bool(value)


SMALL = """
import torch
layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(64)]).cuda()
optimizer = torch.optim.AdamW(layers.parameters(), fused=True)
for _ in range(40):
    layers(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.gpu
def test_on_a_gpu_small_kernels_promise_a_gain(tmp_path):
    (tmp_path / "train.py").write_text(SMALL)
    words = [sys.executable, "-m", "benchmarks.watch", "--json", "--", sys.executable, str(tmp_path / "train.py")]
    told = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout)
    assert "error" not in told and told["kernels"] > 64 and 0 < told["busy_ms"] < told["issue_ms"] <= told["step_ms"]
    assert 1 < told["expected"] <= told["at_most"] and told["collective_ms"] == 0
    assert "expect up to" in told["text"] and "for it: graph_worth.graphed of your step" in told["text"]
