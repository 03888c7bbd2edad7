"""The code to paste: README.md's step, and each block of docs/capture_it.md, which trains as its step does eagerly.

On a CPU host graphs stand in for CUDA's, and modules stay as they are where a block compiles them.
"""

import functools
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch

import graph_worth
from graph_worth.folders import ROOT
from graph_worth.measuring import torch_settings
from graph_worth.your_step import doctor
from graph_worth.your_step.findings import STOPS, WRONG

README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "capture_it.md").read_text()
YOUR_STEP = (ROOT / "docs" / "your_step.md").read_text()
STEP, USE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
(MINE,) = re.findall(r"```python\n(def mine.*?)```", YOUR_STEP, re.DOTALL)
# Heading -> its blocks.
BLOCKS = {
    part.partition("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in PAGE.split("\n## ")[1:]
}
(LOOP,) = BLOCKS["A loop of your own"]
# Its block is a line of the loop's.
COMPILED = "Compiled modules"
# Those that have a test of their own: processes, and other libraries.
ELSEWHERE = {"DDP", "Lightning", "Transformers' Trainer", "accelerate"}
CASES = [name for name, blocks in BLOCKS.items() if blocks and name not in ELSEWHERE]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """The device; on a CPU no GPU is seen, and host graphs are made."""
    if request.param == "cuda":
        before = torch.cuda.current_stream()
        yield torch.device("cuda")
        torch.cuda.set_stream(before)
        return
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    graphed = functools.partial(graph_worth.graphed, cpu="host_graph")
    monkeypatch.setattr(graph_worth, "graphed", graphed, raising=False)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *args, **kwargs: None)
    monkeypatch.setattr(graph_worth, "one_stream", lambda: None, raising=False)
    yield torch.device("cpu")


def loader(name, count=28):
    """Batches of rows and labels; of sequences in turn of three lengths; the last one is smaller."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 7 + 4 * (index % 3)) if name == "Changing lengths" else (6,) for index in range(count)]
    if name == "A loop of your own":
        shapes[-1] = (3,)
    return [(torch.randn(*s, 16, generator=generator), torch.randint(4, s, generator=generator)) for s in shapes]


def trained(name, monkeypatch=None):
    """Run the first block and the case's, and return the names that they leave; eagerly where they may be patched."""
    if monkeypatch:
        monkeypatch.setattr(graph_worth, "graphed", lambda step, owned, **_: step, raising=False)
    is_first = name in ("A loop of your own", COMPILED)
    names = {"loader": loader(name) if is_first else loader("A loop of your own")[:1]}
    torch.manual_seed(0)
    more = BLOCKS[name][0] if name == COMPILED else ""
    exec(compile(LOOP.replace("step = graphed(", f"{more}step = graphed("), "capture_it.md", "exec"), names)
    if not is_first:
        names["loader"] = loader(name)
        exec(compile(BLOCKS[name][0], "capture_it.md", "exec"), names)
    return names


@pytest.mark.parametrize("name", CASES)
def test_a_block_trains_as_its_step_does_eagerly(name, device, monkeypatch):
    ours = trained(name)
    with monkeypatch.context() as patch:
        eager = trained(name, patch)
    assert ours["step"].replays >= 5, ours["step"].replays
    assert not ours["step"].refusal
    losses = [float(loss.detach()) for loss in ours["losses"]]
    assert losses == [float(loss.detach()) for loss in eager["losses"]]
    assert len(set(losses)) == len(losses)
    states = zip(ours["model"].state_dict().values(), eager["model"].state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    if name == "Changing lengths":
        assert len(ours["step"].shapes) == 3


def test_the_page_has_half_a_screen_for_each_case_and_names_every_argument():
    assert len(CASES) >= 5
    for name, blocks in BLOCKS.items():
        assert len(blocks) <= 1 or name in ELSEWHERE, name
        assert all(len(block.splitlines()) <= 30 for block in blocks), name
    options = ("shapes=8", "verify=3", "warm_up=3", 'on_refusal="eager"', 'check="always"', 'cpu="host_graph"')
    assert all(option in PAGE for option in options)
    assert "step = step.eager" in PAGE.partition("## When not to")[2]
    assert "capture_it.md" in README
    assert "capture_it.md" in (ROOT / "docs" / "SKILL.md").read_text()


def library_case(name, **names):
    """Run the block of a library's section, and return the names that it leaves."""
    torch.manual_seed(0)
    (block,) = BLOCKS[name]
    exec(compile(block, "capture_it.md", "exec"), names)
    return names


@pytest.mark.slow
def test_lightning(device, tmp_path, monkeypatch):
    pytest.importorskip("lightning", reason="an extra: ./setup.sh lightning")
    from lightning.pytorch import Callback

    from graph_worth import lightning

    monkeypatch.chdir(tmp_path)
    # With a generator of its own: it draws nothing from the one that dropout uses.
    data = torch.utils.data.DataLoader(loader("Lightning"), batch_size=None, generator=torch.Generator())
    callback = functools.partial(lightning.CUDAGraphCallback, cpu="host_graph")
    monkeypatch.setattr(lightning, "CUDAGraphCallback", callback)
    ours = library_case("Lightning", loader=data)
    assert ours["graphs"].num_replays == 2 * 28 - 3
    monkeypatch.setattr(lightning, "CUDAGraphCallback", type("Eager", (Callback,), {"num_replays": 0}))
    eager = library_case("Lightning", loader=data)
    states = [names["module"].state_dict().values() for names in (ours, eager)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert ours["trainer"].callback_metrics == eager["trainer"].callback_metrics


@pytest.mark.slow
def test_trainer(device, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", reason="an extra: ./setup.sh peft")
    import graph_worth.transformers

    monkeypatch.chdir(tmp_path)
    tokens = torch.randint(0, 64, (120, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    graphed = functools.partial(graph_worth.transformers.GraphedTrainer, graph_options={"cpu": "host_graph"})
    monkeypatch.setattr(graph_worth.transformers, "GraphedTrainer", graphed)
    ours = library_case("Transformers' Trainer", rows=rows)["trainer"]
    assert ours.num_replays == 24 - 3
    stock = type("Stock", (transformers.Trainer,), {"num_replays": 0})
    monkeypatch.setattr(graph_worth.transformers, "GraphedTrainer", stock)
    eager = library_case("Transformers' Trainer", rows=rows)["trainer"]
    losses = [[row["loss"] for row in trainer.state.log_history if "loss" in row] for trainer in (ours, eager)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and len(losses[0]) == 3


@pytest.mark.slow
def test_accelerate(device, monkeypatch):
    state = pytest.importorskip("accelerate", reason="an extra: ./setup.sh peft").state
    results = []
    for is_eager in False, True:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        data = torch.utils.data.DataLoader(loader("accelerate"), batch_size=None, generator=torch.Generator())
        if is_eager:
            monkeypatch.setattr(graph_worth, "graphed", lambda step, owned: step)
        results.append(library_case("accelerate", loader=data))
    state.AcceleratorState._reset_state(reset_partial_state=True)
    ours, eager = results
    assert ours["step"].replays == 14 - 3
    assert all(map(torch.equal, ours["losses"], eager["losses"])) and len(set(map(float, ours["losses"]))) == 14
    assert all(map(torch.equal, ours["model"].state_dict().values(), eager["model"].state_dict().values()))


def ranks(code, count, tmp_path):
    """Run a program under torchrun; each rank writes its losses."""
    path = tmp_path / "program.py"
    path.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", path.name]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]


DDP = """
import json, os, torch
rank = int(os.environ["RANK"])
generator = torch.Generator().manual_seed(rank)
loader = [(torch.randn(6, 16, generator=generator), torch.randint(4, (6,), generator=generator)) for _ in range(20)]
torch.manual_seed(0)
{block}
replays = getattr(step, "replays", 0)
with open(f"{{rank}}.json", "w") as file:
    json.dump([replays, [float(loss.detach()) for loss in losses]], file)
# At a normal end threads of gloo, which DDP still holds, may abort the process.
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ddp_trains_as_its_step_does_eagerly(kind, tmp_path):
    (block,) = BLOCKS["DDP"]
    count = torch.cuda.device_count() if kind == "cuda" else 2
    ours = ranks(DDP.format(block=block), count, tmp_path)
    line = "step = graphed(step, [model, optimizer])\n"
    assert line in block
    eager = ranks(DDP.format(block=block.replace(line, "").replace("step.release()", "")), count, tmp_path)
    # Without a GPU the step stays eager.
    assert all(replays == (9 if kind == "cuda" else 0) for replays, _ in ours)
    assert [losses for _, losses in ours] == [losses for _, losses in eager]


# --- the front page


def test_the_step_to_measure_has_twelve_lines_and_trains(device):
    assert len([line for line in STEP.splitlines() if line]) == 12
    names = {}
    exec(compile(STEP, "my_step.py", "exec"), names)
    torch.manual_seed(0)
    step, batches, changed = names["build"](device)
    losses = [step(batch).item() for batch in batches * 4]
    assert losses[-1] < losses[0] and len(changed) == 2


def test_the_step_to_measure_is_captured_as_the_page_says(device, tmp_path, monkeypatch, capsys):
    """Both blocks of the page together, the first one as the file my_step.py."""
    (tmp_path / "my_step.py").write_text(STEP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_step", raising=False)
    torch.manual_seed(0)
    names = {}
    exec(compile(USE, "README.md", "exec"), names)
    assert capsys.readouterr().out == "5 of 8 steps were replays of a graph\n"
    torch.manual_seed(0)
    step, batches, _ = names["build"](device)
    assert all(torch.equal(step(batch), loss) for batch, loss in zip(batches, names["losses"], strict=True))
    del sys.modules["my_step"]


def test_the_capture_of_your_own_that_the_page_shows_trains_as_eager_does(device):
    names = {"device": device, "graphed": graph_worth.graphed}
    exec(compile(STEP, "my_step.py", "exec"), names)
    code = "def build_mine():\n    step, batches, owned = build(device)\n" + textwrap.indent(MINE, "    ")
    exec(compile(code, "your_step.md", "exec"), names)
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else torch.no_grad()
    torch.manual_seed(0)
    with stream, torch.enable_grad():
        steps, batches, _ = names["build_mine"]()
        mine = steps["mine"]()
        ours = [mine(batch) for batch in batches]
        torch.manual_seed(0)
        step, batches, _ = names["build"](device)
        assert all(torch.equal(step(batch), loss) for batch, loss in zip(batches, ours, strict=True))
    assert mine.replays == len(batches)


@pytest.mark.slow
def test_a_graph_of_the_step_to_measure_trains_as_eager_does(device, tmp_path):
    path = tmp_path / "my_step.py"
    path.write_text(STEP)
    torch_settings.prepare(torch.device("cuda", 0) if device.type == "cuda" else device)
    found = doctor.diagnose(f"{path}:build", device)
    assert not {finding.level for finding in found.findings} & {STOPS, WRONG}, found.text()
    assert found.outcomes[doctor.UP_TO_OPTIMIZER.title] == "trains as eager does"
