"""The doctor on two ranks of gloo: DDP and FSDP steps, findings of one rank alone, and ranks that part."""

import json
from types import SimpleNamespace

import pytest

from graph_worth.your_step import rank_decisions
from graph_worth.your_step.findings import NOTE, STOPS
from graph_worth.your_step.place import Place
from graph_worth.your_step.step_watch import Operator
from tests.helpers import gloo_ranks

STEP = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def ddp(model):
    return nn.parallel.DistributedDataParallel(model)

def fsdp(model):
    fully_shard(model[0])
    return fully_shard(model)

def build(device):
    torch.manual_seed(0)
    model = SHARED(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    batches = [torch.randn(ROWS, 64) for _ in range(3)]
    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        if READS:
            loss.item()
        return loss
    return step, batches, [model, optimizer]
"""
SOUND = {"SHARED": "ddp", "ROWS": "16", "READS": "False"}


def diagnosed(tmp_path, **changes):
    text = STEP
    for old, new in (SOUND | changes).items():
        text = text.replace(old, new)
    path = tmp_path / "my_step.py"
    path.write_text(text)
    first, second = gloo_ranks.run_script(
        "graph_worth.your_step.doctor", [f"{path}:build", str(tmp_path / "said")], 2, 120
    )
    begun, _, first = first.partition("\n")
    assert begun.startswith("looks at the step")
    assert not second and first.strip() == (tmp_path / "said").read_text().strip()
    return first, json.loads((tmp_path / "said.json").read_text())["status"], text.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["ddp", "fsdp"])
def test_nothing_stands_against_a_step_whose_ranks_do_the_same(tmp_path, shared):
    said, status, _ = diagnosed(tmp_path, SHARED=shared)
    assert status == 0 and "cannot be captured" not in said and "would train wrongly" not in said, said
    assert "host graphs cannot record torch.distributed" in said


def test_what_one_rank_does_alone_is_named_with_its_rank(tmp_path):
    said, status, lines = diagnosed(tmp_path, READS="rank == 1")
    (line,) = [line for line in said.splitlines() if "host read" in line]
    assert status == 6 and "on rank 1 of 2: Tensor.item" in line
    assert lines[int(line.split(":")[1]) - 1].strip() == "loss.item()"


def test_batches_of_other_shapes_on_another_rank_are_named(tmp_path):
    said, status, _ = diagnosed(tmp_path, ROWS="16 + 4 * rank")
    assert status == 0 and "ranks differ, costs time: batch 0 is [16, 64] on rank 0 and [20, 64] on rank 1" in said


def operator(name, line):
    return Operator(name, ((4,),), (), (), Place(f"a.py:{line}", f"a.py:{line}"))


@pytest.mark.parametrize(
    ("other", "level", "line"),
    [
        (["aten.mm", "c10d.allreduce_"], None, 0),
        (["aten.mm", "c10d.broadcast_"], STOPS, 2),
        (["aten.mm"], STOPS, 2),
        (["aten.bmm", "c10d.allreduce_"], NOTE, 1),
    ],
)
def test_other_collectives_stop_a_capture_and_other_operators_do_not(tmp_path, monkeypatch, other, level, line):
    def steps_of_ranks(value):
        if value and isinstance(value[0], Operator):
            theirs = [operator(name, number) for number, name in enumerate(other, 1)]
            return [value, theirs if value[0].name == "aten.mm" else theirs[1:]]
        return [value, value]

    monkeypatch.setattr(rank_decisions, "of_all_ranks", steps_of_ranks)
    (tmp_path / "a.py").write_text("")
    state = SimpleNamespace(path=tmp_path / "a.py", batches=[])
    step = SimpleNamespace(operators=[operator("aten.mm", 1), operator("c10d.allreduce_", 2)])
    found = rank_decisions.parting(state, step)
    assert [each.level for each in found] == ([level] if level else [])
    assert not found or found[0].where == f"a.py:{line}"
