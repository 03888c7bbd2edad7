"""Files that cannot be used, each with one line that says why."""

import multiprocessing
import sys
import time

import pytest
import torch

from graph_worth.measuring import marks
from graph_worth.your_step import step_file, user_file
from graph_worth.your_step.doctor import WHOLE, diagnose
from graph_worth.your_step.state import StepState

CPU = torch.device("cpu")
GOOD = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [torch.randn(3, 4), torch.randn(3, 4)]
    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""
# (what is replaced in GOOD, by what, words of the message)
BAD = {
    "build raises": ("model = ", "model = 1 / 0 or ", r"my_step.py:6: build\(device\) raised ZeroDivisionError"),
    "does not import": ("import torch\n", "import torch, no_such_module\n", "no_such_module.*: PYTHON=PATH"),
    "needs a rank": ("model = ", "import os; os.environ['LOCAL_RANK']; model = ", "KeyError: 'LOCAL_RANK': .* NGPU=2"),
    "needs a group": ("model = ", "torch.distributed.get_rank(); model = ", "initialized, please .*: .* NGPU=2"),
    "is a replica": (
        "model = torch.nn.Linear(4, 2).to(device)",
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2).to(device))",
        r"ranks, NGPU=2 \(--ngpu 2\) starts two",
    ),
    "returns one value": ("return step, batches, [model, optimizer]", "return step", "returned a function; it has to"),
    "returns two values": ("batches, [model, optimizer]", "batches", "returned a tuple of 2"),
    "no function": ("return step, batches", "return model.weight, batches", "first value is a Parameter"),
    "no batches": ("return step, batches", "return step, []", "not list of none"),
    "batches without tensors": ("return step, batches", "return step, [{'a': 1}]", "batch 0 has no tensor"),
    "a batch of its own class": (
        "return step, batches",
        "from types import SimpleNamespace as Own; return step, [(batch, Own(x=batch)) for batch in batches]",
        "batch 0 has a SimpleNamespace, whose tensors",
    ),
    "another device": ("Linear(4, 2).to(device)", 'Linear(4, 2).to("meta")', "weight lies on meta, .*is to run on cpu"),
    "no state_dict": ("[model, optimizer]", "[model, optimizer, object()]", "has a object: it needs state_dict"),
    "step raises": ("loss.backward()", "loss.backwards()", "my_step.py:12: the step raised AttributeError"),
    "no loss": ("return loss\n", "return model(batch)\n", r"returned a tensor of shape \(3, 2\); it has to return its"),
    "nothing returned": ("return loss\n", "return None\n", "returned a NoneType"),
    "many shapes": ("return step, batches", "return step, [torch.randn(n, 4) for n in range(1, 20)]", "19 shapes"),
}


def written(tmp_path, text):
    path = tmp_path / "my_step.py"
    path.write_text(text)
    return f"{path}:build"


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_used_is_told_in_one_line(tmp_path, name):
    old, new, words = BAD[name]
    assert old in GOOD

    with pytest.raises(ValueError, match=words) as error:
        StepState(written(tmp_path, GOOD.replace(old, new)), CPU, "doctor")

    assert "\n" not in str(error.value)


def test_a_step_that_raises_later_is_told_with_its_line(tmp_path):
    late = GOOD.replace("    def step(batch):", "    calls = []\n    def step(batch):\n        calls.append(1)")
    late = late.replace("loss.backward()", "loss.backward()\n        assert len(calls) < 5, 'the fifth call'")

    with pytest.raises(ValueError, match="my_step.py:15: the step raised AssertionError: the fifth call"):
        diagnose(written(tmp_path, late), CPU)


def test_state_that_is_not_handed_over_is_named_with_its_line(tmp_path):
    found = diagnose(written(tmp_path, GOOD.replace("[model, optimizer]", "[torch.zeros(1)]")), CPU)

    finding = next(finding for finding in found.findings if finding.kind == "not handed over")
    assert finding.where.endswith("my_step.py:13") and "model.weight" in finding.evidence


def test_a_batch_that_breaks_the_warm_up_is_named(tmp_path):
    text = GOOD.replace("    def step(batch):", "    batches[1][0, 0] = float('nan')\n    def step(batch):")

    found = diagnose(written(tmp_path, text), CPU)

    assert "warm-up step 1, of batch 1, is nan" in found.outcomes[WHOLE.title]


def test_an_update_of_several_steps_names_the_count_that_decides(tmp_path):
    text = GOOD.replace("    def step(batch):", "    count = 0\n    def step(batch):\n        nonlocal count")
    text = text.replace("        optimizer.zero_grad()\n", "")
    update = "count += 1\n        if count % 2 == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"
    text = text.replace("optimizer.step()\n", update)

    found = diagnose(written(tmp_path, text), CPU)

    finding = next(finding for finding in found.findings if finding.kind == "gradient")
    assert "count goes from 3 to 8 at" in finding.evidence and "microbatches" in finding.text()


def _hangs():
    with user_file.watchdog("doctor", 0.2):
        time.sleep(600)


def test_a_step_that_never_ends_is_ended(capfd):
    process = multiprocessing.get_context("fork").Process(target=_hangs)
    process.start()
    process.join(300)

    assert process.exitcode == 2
    assert capfd.readouterr().err == f"doctor: {user_file.STARTS_NO_STEP}\n"


def test_a_file_is_found_with_what_lies_beside_it(tmp_path):
    (tmp_path / "my_width.py").write_text("WIDTH = 2\n")
    text = GOOD.replace("import torch\n", "import torch\nfrom my_width import WIDTH\n").replace("(4, 2)", "(4, WIDTH)")

    handed = user_file.load(written(tmp_path, text), CPU)

    assert len(handed.batches) == 2 and handed.step(handed.batches[0]).item() > 0


def test_a_change_in_a_file_beside_the_step_is_another_step(tmp_path):
    (tmp_path / "step.py").write_text("def build(device): ...\n")
    (tmp_path / "helper.py").write_text("LR = 0.5\n")
    before = step_file.digest(str(tmp_path / "step.py"))
    (tmp_path / "helper.py").write_text("LR = 50\n")
    assert step_file.digest(str(tmp_path / "step.py")) != before


def test_a_build_that_exits_is_refused_in_one_line(tmp_path):
    path = tmp_path / "step.py"
    path.write_text("import sys\ndef build(device):\n    sys.exit(0)\n")
    words = list(sys.argv)
    with pytest.raises(ValueError, match=r"step\.py:3: build\(device\) raised SystemExit"):
        user_file.load(f"{path}:build", torch.device("cpu"))
    assert sys.argv == words


def test_layers_are_marked_only_where_somebody_watches(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(
        "import torch\n"
        "def build(device):\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())\n"
        "    def step(batch):\n"
        "        loss = model(batch).mean()\n"
        "        loss.backward()\n"
        "        return loss\n"
        "    return step, [torch.randn(2, 4)], [model]\n"
    )
    state = StepState(f"{path}:build", torch.device("cpu"), "test")
    seen = []
    with marks.watching_marks(lambda: seen.append(1)):
        state.marked_train(0)
    state.marked_train(0)
    # Forward and backward of both layers, once.
    assert len(seen) == 4
