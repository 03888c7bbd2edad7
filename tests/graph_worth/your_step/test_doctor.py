"""Rules of the doctor that the gallery does not show, on variations of one step."""

import pytest
import torch

from graph_worth.your_step import doctor
from graph_worth.your_step.doctor import MODULES, UP_TO_OPTIMIZER, WHOLE, diagnose
from graph_worth.your_step.findings import NOTE, STOPS, WRONG
from graph_worth.your_step.trial import EQUAL

STEP = """
import torch, random, threading
import numpy as np
from torch import nn
from collections import deque

def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
    # more
    def step(batch):
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [model, optimizer]
"""
LOSS = "loss = nn.functional.cross_entropy(model(x), y)"
HOOK = "def hook(module, args, output):\n        calls.append(1)\n        return output * len(calls)"
# name: (kind, level, text on the line that is named, {what is replaced: by what})
FOUND = {
    "a hook counts": (
        "host value",
        WRONG,
        "output * len",
        {"# more": f"calls = []\n    {HOOK}\n    model[0].register_forward_hook(hook)"},
    ),
    "weight decay changes": (
        "host value",
        WRONG,
        "optimizer.step",
        {"loss.backward()": "loss.backward()\n        optimizer.param_groups[0]['weight_decay'] += 0.1"},
    ),
    "a queue of outputs": (
        "kept tensor",
        WRONG,
        "bank.append",
        {
            "# more": "bank = deque([torch.zeros(8, 4)] * 2, maxlen=2)",
            LOSS: "out = model(x)\n        loss = (out - torch.stack(list(bank)).mean(0)).square().mean()\n"
            "        bank.append(out.detach())",
        },
    ),
    "a buffer bound anew": (
        "kept tensor",
        WRONG,
        "model.bank = ",
        {
            "# more": "model.register_buffer('bank', torch.zeros(4, 16))",
            LOSS: "model.bank = torch.cat([model.bank[1:], x[:1]])\n"
            "        loss = (model(x) + model.bank.mean()).mean()",
        },
    ),
    "two models take turns": (
        "control flow",
        WRONG,
        "loss = ",
        {
            "# more": "other = nn.Linear(16, 4)\n    both = [nn.Linear(16, 4), nn.Linear(16, 4)]\n"
            "    model = nn.ModuleList(both)\n"
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)",
            LOSS: "both.reverse()\n        loss = nn.functional.cross_entropy(both[0](x), y)",
        },
    ),
    "noise of numpy": (
        "host data",
        STOPS,
        "from_numpy",
        {"model(x)": "model(x + torch.from_numpy(np.random.randn(8, 16).astype('float32')))"},
    ),
    "a schedule of a rate in a tensor": (
        "learning rate",
        WRONG,
        "torch.optim.SGD",
        {
            "lr=0.1": "lr=torch.tensor(0.1)",
            "# more": "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.9**i)",
            "optimizer.step()": "optimizer.step(); schedule.step()",
            "[model, optimizer]": "[model, optimizer, schedule]",
        },
    ),
    "the batch is written": ("not handed over", WRONG, "x.mul_", {LOSS: f"x.mul_(0.9); {LOSS}"}),
    "a scaler": (
        "loss scaler",
        STOPS,
        "GradScaler",
        {
            ", fused=True": "",
            "# more": "scaler = torch.amp.GradScaler('cpu', init_scale=8.0)",
            "loss.backward()": "scaler.scale(loss).backward()",
            "optimizer.step()": "scaler.step(optimizer); scaler.update()",
            "[model, optimizer]": "[model, optimizer, scaler]",
        },
    ),
    "an f-string": ("host read", STOPS, "f'{loss", {"return loss": "f'{loss:.3f}'; return loss"}),
    "autocast around all steps": (
        "autocast cache",
        WRONG,
        "autocast",
        {"# more": "torch.autocast('cpu', torch.bfloat16).__enter__()"},
    ),
    "averaged weights": (
        "host read",
        STOPS,
        "update_parameters",
        {
            "# more": "average = torch.optim.swa_utils.AveragedModel(model)",
            "return loss": "average.update_parameters(model)\n        return loss",
            "[model, optimizer]": "[model, optimizer, average]",
        },
    ),
    "a solver that looks for errors": (
        "host read",
        STOPS,
        "linalg.eigh",
        {"loss.backward()": "loss.backward()\n        torch.linalg.eigh(model[2].weight @ model[2].weight.T)"},
    ),
    "sparse gradients": (
        "optimizer",
        STOPS,
        "SparseAdam",
        {
            "nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))": "nn.Embedding(4, 4, sparse=True)",
            "SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)": "SparseAdam(model.parameters())",
            "model(x)": "model(y)",
        },
    ),
    "a thread works on weights": (
        "thread",
        WRONG,
        "Thread",
        {
            "return loss": "thread = threading.Thread(target=lambda: model[0].bias.data.mul_(0.9)); thread.start()\n"
            "        thread.join(); return loss"
        },
    ),
    "layers are frozen in turn": (
        "control flow",
        WRONG,
        "requires_grad_",
        {
            ", fused=True": "",
            "# more": "count = [0]",
            LOSS: f"count[0] += 1\n        model[0].weight.requires_grad_(count[0] % 2 == 0)\n        {LOSS}",
        },
    ),
    "an optimizer of one's own without a rate": (
        "host value",
        WRONG,
        "p.add_",
        {
            "def build": "class Own(torch.optim.Optimizer):\n    @torch.no_grad()\n    def step(self):\n"
            "        for p in self.param_groups[0]['params']:\n            state = self.state[p]\n"
            "            state['step'] = state.get('step', 0) + 1\n"
            "            p.add_(p.grad, alpha=-0.1 / state['step'])\n\ndef build",
            "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)": "Own(model.parameters(), {})",
        },
    ),
    "a metric that is not handed over": (
        "not handed over",
        NOTE,
        "total +=",
        {"# more": "total = torch.zeros(())", "return loss": "nonlocal total; total += loss.detach(); return loss"},
    ),
    "a branch that is rarely taken": (
        "control flow",
        NOTE,
        "% 100",
        {
            "# more": "count = [0]",
            "return loss": "count[0] += 1\n        if count[0] % 100 == 0:\n            model[0].weight.data.zero_()\n"
            "        return loss",
        },
    ),
}
SOUND = {
    "a number stored": {LOSS: f"x = x.clone(); x[:, 0] = 1.0; {LOSS}"},
    "one_hot": {LOSS: "loss = (model(x) - nn.functional.one_hot(y, 4)).square().mean()"},
    "empty, then written": {LOSS: f"z = torch.empty_like(x); z[:4] = x[:4]; z[4:] = x[4:]; x = z; {LOSS}"},
    "gradients in one buffer": {
        "# more": "flat = torch.zeros(sum(p.numel() for p in model.parameters()))\n    start = 0\n"
                  "    for p in model.parameters():\n"
                  "        p.grad = flat[start : start + p.numel()].view_as(p); start += p.numel()",
        "optimizer.zero_grad()": "flat.zero_()"},
    "two backward passes": {
        "nn.ReLU()": "nn.Tanh()",
        LOSS: "x = x.clone().requires_grad_()\n"
              "        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)"
              f"\n        {LOSS} + slope.square().mean()"},
    "an operator without deterministic kernels": {
        LOSS: f"z = torch.zeros_like(x)\n        x = z.put_(torch.arange(x.numel()), x)\n        {LOSS}",
    },
    "a frozen backbone that is not handed over": {
        "# more": "backbone = nn.Linear(16, 16)", "model(x)": "model(backbone(x).detach())"},
}  # fmt: skip


def diagnosed(tmp_path, changes):
    text = STEP
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path = tmp_path / "my_step.py"
    path.write_text(text)
    try:
        return diagnose(f"{path}:build", torch.device("cpu")), text.splitlines()
    finally:
        if torch.is_autocast_enabled("cpu"):
            torch.set_autocast_enabled("cpu", False)
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()


@pytest.mark.parametrize("name", FOUND)
def test_a_broken_step_is_named(tmp_path, name):
    kind, level, line, changes = FOUND[name]

    found, lines = diagnosed(tmp_path, changes)

    wanted = [finding for finding in found.findings if (finding.kind, finding.level) == (kind, level)]
    numbers = [int(finding.where.rpartition(":")[2]) for finding in wanted if line]
    assert wanted and all(line in lines[number - 1] for number in numbers[:1]), found.text()


def test_the_state_of_an_optimizer_that_is_not_handed_over_is_named(tmp_path):
    found, _ = diagnosed(tmp_path, {"[model, optimizer]": "[model]"})

    (finding,) = [finding for finding in found.findings if finding.kind == "not handed over"]
    assert "the step writes the state of optimizer" in finding.evidence


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_step_is_not(tmp_path, name):
    found, _ = diagnosed(tmp_path, SOUND[name])

    assert not [finding for finding in found.findings if finding.level != NOTE], found.text()
    assert found.outcomes[WHOLE.title] == EQUAL


def test_a_step_that_knows_its_batch_is_told_apart_from_a_wrong_capture(tmp_path):
    found, _ = diagnosed(tmp_path, {LOSS: LOSS + " * (2.0 if any(batch is each for each in batches) else 1.0)"})

    assert [finding.kind for finding in found.findings] == ["wrong copy"]


def test_wrong_numbers_name_step_and_tensor(tmp_path):
    hook = "model[1].register_forward_hook(lambda module, args, out: out * random.random())"

    found, _ = diagnosed(tmp_path, {"# more": hook})

    assert "Sequential.0.weight differs from eager's after step 1" in found.outcomes[WHOLE.title]
    assert "python random" in {finding.kind for finding in found.findings}


def test_code_that_asks_whether_a_stream_captures_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    aware = LOSS + "\n        if not torch.cuda.is_current_stream_capturing():\n            rate.mul_(0.9)"

    found, lines = diagnosed(tmp_path, {"# more": "rate = torch.ones(())", LOSS: aware, "r]": "r, rate]"})

    (finding,) = [finding for finding in found.findings if finding.kind == "capture-aware code"]
    assert "rate.mul_" in lines[int(finding.where.rpartition(":")[2]) - 1]


def test_a_step_that_raises_while_a_stream_captures_is_a_finding(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    raising = (
        LOSS + "\n        if torch.cuda.is_current_stream_capturing():\n            raise RuntimeError('not here')"
    )

    found, _ = diagnosed(tmp_path, {LOSS: raising})

    (finding,) = [finding for finding in found.findings if finding.kind == "capture-aware code"]
    assert finding.level == STOPS and "not here" in finding.evidence


READS = "class Reads(nn.Module):\n    def forward(self, x):\n        return x * float(x.detach().mean())\n\ndef build"
DEEP = "nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(32, 32), nn.Tanh())])"


def test_graphs_of_modules_are_tried_where_the_whole_step_cannot_be_captured(tmp_path):
    layers = f"nn.Linear(16, 32), {DEEP}, Reads(), nn.Linear(32, 4)"
    found, _ = diagnosed(tmp_path, {"def build": READS, "nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)": layers})

    assert found.status == 6
    assert found.outcomes[MODULES.title] == f"{EQUAL}: forward and backward of 1 (Sequential)"
    assert f"{MODULES.title}: {EQUAL}" in found.text()


def test_a_step_without_a_large_module_has_no_graphs_of_modules(tmp_path):
    found, _ = diagnosed(tmp_path, {"def build": READS, "nn.ReLU()": "Reads()"})

    assert found.outcomes[MODULES.title].startswith("not possible: no module is large enough")


@pytest.mark.parametrize(("words", "status"), [([], 2), (["no.py:build"], 2)])
def test_a_mistake_on_the_command_line_is_one_line(words, status, capsys):
    with pytest.raises(SystemExit) as error:
        doctor.main(words)
    assert error.value.code == status and capsys.readouterr().err.count("\n") == 1


def test_the_exit_status_says_what_stands_against_a_graph(tmp_path, capsys):
    path = tmp_path / "my_step.py"
    for changes, status in (({}, 0), ({"return loss": "return loss.item()"}, 6), ({"model(x)": "model(x.mul_(2))"}, 5)):
        text = STEP
        for old, new in changes.items():
            text = text.replace(old, new)
        path.write_text(text)
        assert doctor.main([f"{path}:build"]) == status, capsys.readouterr().out


def test_a_scaler_that_unscales_leaves_the_eager_step_as_it_was(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(
        "import torch\n"
        "def build(device):\n"
        "    torch.manual_seed(0)\n"
        "    model = torch.nn.Linear(32, 32).to(device)\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n"
        "    scaler = torch.amp.GradScaler(device.type)\n"
        "    def step(batch):\n"
        "        optimizer.zero_grad()\n"
        "        loss = model(batch).square().mean()\n"
        "        scaler.scale(loss).backward()\n"
        "        scaler.unscale_(optimizer)\n"
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "        scaler.step(optimizer)\n"
        "        scaler.update()\n"
        "        return loss\n"
        "    return step, [torch.randn(8, 32)], [model, optimizer, scaler]\n"
    )
    found = diagnose(f"{path}:build", torch.device("cpu"))
    assert found.outcomes[WHOLE.title] == "trains as eager does" and "unscale_" in found.outcomes[UP_TO_OPTIMIZER.title]


def test_a_read_on_the_host_names_its_line_and_those_that_call_it(tmp_path):
    helper = "def logged(value):\n        return value.item()"

    found, lines = diagnosed(tmp_path, {"# more": helper, "return loss": "return logged(loss)"})

    (finding,) = [finding for finding in found.findings if finding.kind == "host read"]
    inner, outer = (
        int(text.split(":")[-1]) for text in (finding.where, finding.evidence.split("called from ")[1].split(",")[0])
    )
    assert "value.item()" in lines[inner - 1] and "logged(loss)" in lines[outer - 1]
