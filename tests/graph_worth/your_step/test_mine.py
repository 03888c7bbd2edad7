"""A capture that a user's file makes itself, beside the eager step: right, stale, frozen, or broken."""

import pytest
import torch

from graph_worth.your_step import doctor
from graph_worth.your_step.findings import WRONG
from graph_worth.your_step.state import StepState

CPU = torch.device("cpu")
# What stands for a capture replays Python code. KEPT is the batch, BEFORE what comes before each replay.
STEP = """
import torch

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    batches = [torch.randn(8, 16, device=device) for _ in range(4)]
    count = {"it": 0}

    def step(batch):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + count["it"])
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        count["it"] += 1
        return loss

    def mine():
        step(batches[0])
        kept = dict(count)

        def replay(batch):
            BEFORE
            return step(KEPT)

        return replay

    return {"eager": step, "mine": mine}, batches, [model, optimizer]
"""
HANDED = '{"eager": step, "mine": mine}'


def written(tmp_path, before="pass", kept="batch", handed=HANDED, returned="return replay"):
    text = STEP.replace("BEFORE", before).replace("KEPT", kept)
    (tmp_path / "my_step.py").write_text(text.replace(HANDED, handed).replace("return replay", returned))
    return f"{tmp_path}/my_step.py:build"


def found_by(step):
    return doctor.of_mine(StepState(step, CPU, "doctor"))


def test_a_capture_that_trains_alike_is_equal_and_what_it_trained_is_put_back(tmp_path):
    state = StepState(written(tmp_path), CPU, "doctor")
    before = [tensor.clone() for _, tensor in state.named_state()]
    own = doctor.of_mine(state)
    assert own.is_equal and own.finding is None
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, state.named_state(), strict=True))


@pytest.mark.parametrize(
    ("before", "kept", "cause"),
    [
        ("count.update(kept)", "batch", "it goes on with the numbers on the host of its capture (count['it'])"),
        ("pass", "batches[2]", "it trains on batch 2 whatever batch it is given"),
        ("pass", "batch * 2", "weight differs from eager's after step 0"),
    ],
)
def test_a_capture_that_trains_otherwise_is_told_with_its_cause(tmp_path, before, kept, cause):
    own = found_by(written(tmp_path, before, kept))
    assert not own.is_equal and own.finding.level == WRONG and cause in own.finding.evidence


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("1 / 0", "my_step.py:29: mine raised ZeroDivisionError"),
        ("return 3", "mine() returned a int; it has to return a step"),
    ],
)
def test_a_capture_that_dies_is_told_with_its_line_and_on_a_cpu_stands_against_nothing(tmp_path, returned, said):
    own = found_by(written(tmp_path, returned=returned))
    assert not own.is_equal and own.finding is None and said in own.text and "without a GPU" in own.text


def test_an_optimizer_that_follows_a_replay_steps_on_the_gradients_of_the_capture(tmp_path):
    """A replay fills the gradients of the capture, whatever a reset or eager steps have bound since."""
    capture = """
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        static = [parameter.grad for parameter in model.parameters()]

        def replay(batch):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + count["it"])
            loss = model(batch).square().mean()
            for into, gradient in zip(static, torch.autograd.grad(loss, list(model.parameters()))):
                into.copy_(gradient)
            optimizer.step()
            count["it"] += 1
            return loss
"""
    text = STEP.replace("BEFORE", "pass").replace("KEPT", "batch")
    text = text.replace("        kept = dict(count)\n", capture).replace(
        "        def replay(batch):\n            pass\n", ""
    )
    text = text.replace("            return step(batch)\n", "")
    (tmp_path / "my_step.py").write_text(text)
    assert found_by(f"{tmp_path}/my_step.py:build").is_equal


def test_what_the_capture_alone_moves_is_put_back(tmp_path):
    own = "nonlocal_count = {'it': 0}\n        kept = nonlocal_count"
    before = "count['it'] = START + kept['it']; kept['it'] += 1"
    text = (
        STEP.replace("BEFORE", before.replace("START", "3")).replace("KEPT", "batch").replace("kept = dict(count)", own)
    )
    (tmp_path / "my_step.py").write_text(text)
    assert found_by(f"{tmp_path}/my_step.py:build").is_equal


@pytest.mark.parametrize(
    ("handed", "said"),
    [
        ('{"mine": mine}', 'has \'mine\'; it takes "eager" and "mine"'),
        ("{}", "has nothing; it takes"),
        ('{"eager": step, "yours": mine}', "has 'eager', 'yours'; it takes"),
        ('{"eager": step, "mine": 3}', '"mine" is a int, it has to be a function'),
        ('{"eager": 3, "mine": mine}', "the first value is a int, it has to be a function step"),
    ],
)
def test_a_dict_of_other_things_is_refused_in_one_line(tmp_path, handed, said):
    with pytest.raises(ValueError) as error:
        StepState(written(tmp_path, handed=handed), CPU, "doctor")
    assert said in str(error.value) and "\n" not in str(error.value)


def test_the_whole_diagnosis_names_it(tmp_path):
    found = doctor.diagnose(written(tmp_path, "count.update(kept)"), CPU)
    assert found.has_mine and found.outcomes["your capture"] == "trains otherwise, see above"
    assert "your capture, would train wrongly" in found.text() and found.status == 5
