"""Rules of the doctor that the gallery does not show, on variations of one step."""

from types import SimpleNamespace

import pytest
import torch

from graph_worth.capture.asking import answering
from graph_worth.your_step import doctor
from graph_worth.your_step.doctor import MODULES, UP_TO_OPTIMIZER, WHOLE, diagnose
from graph_worth.your_step.findings import MAY, NOTE, STOPS, WRONG, Finding
from graph_worth.your_step.state import StepState
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
    "weights that are bound back, as SAM does": (
        "moved memory",
        WRONG,
        "p.data = kept[p]",
        {
            "# more": "kept = {}",
            LOSS: "for p in model.parameters():\n            kept[p] = p.data.clone()\n            p.data.mul_(0.9)\n"
            f"        {LOSS}",
            "optimizer.step()": "for p in model.parameters():\n            p.data = kept[p]\n        optimizer.step()",
        },
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
    "a model's zero_grad at the end": {
        "optimizer.zero_grad()\n": "pass\n", "optimizer.step()": "optimizer.step(); model.zero_grad()"},
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
    assert found.outcomes[WHOLE.title] == found.outcomes[UP_TO_OPTIMIZER.title] == EQUAL


@pytest.mark.parametrize("fewer_are_faster", [True, False])
def test_threads_that_wait_for_one_another_are_left_out(tmp_path, monkeypatch, fewer_are_faster):
    """On two busy cores a detector's step took 5 s with two threads, and 0.6 s with one."""
    clock, before = [0.0], torch.get_num_threads()
    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    original = StepState.train

    def train(state, index):
        clock[0] += torch.get_num_threads() if fewer_are_faster else 1 / torch.get_num_threads()
        return original(state, index)

    monkeypatch.setattr(StepState, "train", train)
    numbers, look = [], doctor.EagerSteps
    monkeypatch.setattr(doctor, "EagerSteps", lambda state: numbers.append(torch.get_num_threads()) or look(state))
    try:
        torch.set_num_threads(2)
        diagnosed(tmp_path, {})
        assert numbers == [1 if fewer_are_faster else 2] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_step_that_knows_its_batch_is_told_apart_from_a_wrong_capture(tmp_path):
    found, _ = diagnosed(tmp_path, {LOSS: LOSS + " * (2.0 if any(batch is each for each in batches) else 1.0)"})

    assert [finding.kind for finding in found.findings] == ["wrong copy"]


def test_wrong_numbers_name_step_and_tensor(tmp_path):
    hook = "model[1].register_forward_hook(lambda module, args, out: out * random.random())"

    found, _ = diagnosed(tmp_path, {"# more": hook})

    assert "Sequential.0.weight differs from eager's after step 1" in found.outcomes[WHOLE.title]
    assert "python random" in {finding.kind for finding in found.findings}


@pytest.fixture
def can_ask(monkeypatch):
    """torch for a CPU raises where code asks whether a stream captures."""

    def is_current_stream_capturing():
        return False

    for module in (torch.cuda, torch.cuda.graphs):
        monkeypatch.setattr(module, "is_current_stream_capturing", is_current_stream_capturing)


@pytest.mark.usefixtures("can_ask")
def test_code_that_asks_whether_a_stream_captures_is_named(tmp_path):
    aware = LOSS + "\n        if not torch.cuda.is_current_stream_capturing():\n            rate.mul_(0.9)"

    found, lines = diagnosed(tmp_path, {"# more": "rate = torch.ones(())", LOSS: aware, "r]": "r, rate]"})

    (finding,) = [finding for finding in found.findings if finding.kind == "capture-aware code"]
    assert "rate.mul_" in lines[int(finding.where.rpartition(":")[2]) - 1]


ASKS = {
    "by its name": ("", "torch.cuda.is_current_stream_capturing()"),
    "of its module": ("", "torch.cuda.graphs.is_current_stream_capturing()"),
    "imported": ("from torch.cuda import is_current_stream_capturing as asks", "asks()"),
}


@pytest.mark.usefixtures("can_ask")
@pytest.mark.parametrize("words", ASKS.values(), ids=ASKS)
def test_a_read_that_a_capture_skips_is_none_and_one_that_it_alone_makes_is(tmp_path, words):
    line, asks = words
    step = {"import torch, random": f"{line}\nimport torch, random"}
    skipped = step | {LOSS: f"{LOSS}\n        if not {asks}:\n            loss.item()"}
    made = step | {LOSS: f"{LOSS}\n        if {asks}:\n            loss.item()"}

    found, _ = diagnosed(tmp_path, skipped)
    also, lines = diagnosed(tmp_path, made)

    (note,) = found.findings
    assert (found.status, note.kind, note.level) == (0, "capture-aware code", NOTE), found.text()
    assert "losses of 8 steps are equal" in note.evidence and found.is_capture_aware
    assert found.outcomes[WHOLE.title] == EQUAL
    (read,) = [finding for finding in also.findings if finding.level == STOPS]
    assert also.status == 6 and "loss.item" in lines[int(read.where.rpartition(":")[2]) - 1]


@pytest.mark.usefixtures("can_ask")
@pytest.mark.parametrize(("factor", "status"), [("1.001", 0), ("1.1", 5)])
def test_a_capture_that_takes_another_kernel_has_a_price_and_beyond_it_trains_wrongly(tmp_path, factor, status):
    other = f"{LOSS}\n        if torch.cuda.is_current_stream_capturing():\n            loss = loss * {factor}"

    found, _ = diagnosed(tmp_path, {LOSS: other})

    (finding,) = found.findings
    assert (found.status, finding.kind) == (status, "capture-aware code"), found.text()
    assert "losses of 8 steps differ by" in finding.evidence
    # The graph is compared with steps that do what it does, or with plain ones.
    assert (found.outcomes[WHOLE.title] == EQUAL) == (status == 0), found.text()


@pytest.mark.usefixtures("can_ask")
def test_the_question_is_put_back_also_where_a_module_was_imported_meanwhile():
    before = torch.cuda.is_current_stream_capturing
    with answering():
        from torch.cuda import is_current_stream_capturing as imported_meanwhile

        assert imported_meanwhile() and not torch.compiler.is_compiling()
        with answering(False):
            assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.is_current_stream_capturing is torch.cuda.graphs.is_current_stream_capturing is before
    assert imported_meanwhile() == before()


@pytest.mark.usefixtures("can_ask")
def test_a_step_that_raises_while_a_stream_captures_is_a_finding(tmp_path):
    raising = (
        LOSS + "\n        if torch.cuda.is_current_stream_capturing():\n            raise RuntimeError('not here')"
    )

    found, _ = diagnosed(tmp_path, {LOSS: raising})

    (finding,) = [finding for finding in found.findings if finding.kind == "capture-aware code"]
    assert finding.level == STOPS and "not here" in finding.evidence


# Beside a GPU these stay on the CPU, and nothing waits for it.
OF_HOST = {
    "a factory": "axes = torch.arange(1, 2).tolist()",
    "made of one": "axes = [int((torch.arange(3) * 2).sum())]",
    "from data": "axes = [torch.tensor([1, 2]).max().item()]",
    "a mask": "axes = torch.arange(4)[torch.arange(4) > 2].tolist()",
    "a draw": "axes = [torch.empty(1).uniform_(0.0, 1.0).item()]",
}
# With this way to the GPU they are read on the host, or data that comes from it.
TO_GPU = {
    "to": "axes = torch.arange(1, 2).to(device).tolist()",
    "cuda": "axes = torch.zeros(1).to(x).tolist()",
    "a device": "axes = torch.arange(1, 2, device=device).tolist()",
    "made again": "axes = torch.as_tensor(torch.arange(2), device=device).tolist()",
    "beside the batch": "axes = (torch.arange(16) + x).sum().tolist()",
    "to the host": "axes = x.detach().cpu()",
    "a constant": "axes = torch.ones(1).to(device)",
    "data beside the batch": "x = x * torch.tensor([2.0])",
    "with device": "with torch.device(device):\n            axes = torch.arange(1, 2).tolist()",
}


@pytest.mark.parametrize("line", OF_HOST.values(), ids=OF_HOST)
def test_a_factory_without_a_device_stays_on_the_host(tmp_path, line):
    found, _ = diagnosed(tmp_path, {LOSS: f"{line}\n        {LOSS}"})

    assert found.status == 0 and found.outcomes[WHOLE.title] == EQUAL, found.text()


@pytest.mark.parametrize("line", TO_GPU.values(), ids=TO_GPU)
def test_what_meets_the_model_or_is_given_a_device_is_on_the_gpu(tmp_path, line):
    found, lines = diagnosed(tmp_path, {LOSS: f"{line}\n        {LOSS}"})

    places = {finding.where for finding in found.findings if finding.level == STOPS}
    (number,) = {int(place.rpartition(":")[2]) for place in places}
    assert "axes" in lines[number - 1] or "tensor" in line
    # The host graph refuses it, too.
    assert found.outcomes[WHOLE.title].startswith("failed"), found.text()


def test_a_build_may_make_tensors_without_memory(tmp_path):
    found, _ = diagnosed(tmp_path, {"# more": "shapes = model[0].weight.detach().to('meta')"})

    assert found.status == 0, found.text()


def test_an_empty_tensor_copies_nothing(tmp_path):
    line = "x = torch.cat([torch.tensor([], device=device), x])"

    found, _ = diagnosed(tmp_path, {LOSS: f"{line}\n        {LOSS}"})

    assert found.status == 0 and found.outcomes[WHOLE.title] == EQUAL, found.text()


DRAWS = {
    "random": ("random.random()", "random.seed(0)"),
    "np.random": ("np.random.rand()", "np.random.seed(0)"),
    "Random": ("source.random()", "source = random.Random(0)"),
    "Generator": ("source.random()", "source = np.random.default_rng(0)"),
}


def test_a_sum_that_no_loss_shows_may_train_wrongly(tmp_path):
    """Old sums live on, as in the allocator of a GPU, so that graphs read memory that holds something."""
    adds = f"{LOSS}\n        kept.append(model.total)\n        model.total = model.total + loss.detach()"

    found, lines = diagnosed(tmp_path, {"# more": "kept, model.total = [], torch.zeros((), device=device)", LOSS: adds})

    (finding,) = [finding for finding in found.findings if finding.level != NOTE]
    assert (found.status, finding.kind, finding.level) == (5, "kept tensor", MAY), found.text()
    assert "model.total =" in lines[int(finding.where.rpartition(":")[2]) - 1]
    assert found.outcomes[WHOLE.title] == EQUAL


@pytest.mark.parametrize(("draw", "make"), DRAWS.values(), ids=DRAWS)
def test_a_draw_on_the_host_is_a_finding_whatever_eight_steps_show(tmp_path, draw, make):
    rare = f"if {draw} > 0.999999:\n            x = x * 2\n        {LOSS}"

    for _ in range(2):
        found, lines = diagnosed(tmp_path, {"# more": make, LOSS: rare})

        (finding,) = [finding for finding in found.findings if finding.level != NOTE]
        assert (found.status, finding.kind, finding.level) == (5, "python random", MAY), found.text()
        assert draw in lines[int(finding.where.rpartition(":")[2]) - 1]
        assert not found.text().startswith("Nothing stands")
        assert found.outcomes[WHOLE.title] == EQUAL and "draws from" in found.suspects[0]


@pytest.mark.parametrize("seed", ["", "random.seed(0)\n    "])
def test_data_that_nothing_seeds_are_told(tmp_path, seed):
    found, _ = diagnosed(tmp_path, {"# more": f"{seed}batches = [(x * random.random(), y) for x, y in batches]"})

    assert found.status == 0
    assert [finding.kind for finding in found.findings] == ([] if seed else ["unseeded data"])
    assert seed or "other data in another process" in found.text()


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


BATCHES = {
    "a dataclass": (
        "@dataclasses.dataclass\nclass Batch:\n    x: object\n    y: object\n",
        "[Batch(x, y) for x, y in batches]",
        "batch.x, batch.y",
    ),
    "a frozen one": (
        "@dataclasses.dataclass(frozen=True)\nclass Batch:\n    x: object\n    y: object\n",
        "[Batch(x, y) for x, y in batches]",
        "batch.x, batch.y",
    ),
    "a UserDict": ("", "[UserDict(x=x, y=y) for x, y in batches]", "batch['x'], batch['y']"),
    "a namedtuple": ("Batch = namedtuple('Batch', 'x y')\n", "[Batch(*pair) for pair in batches]", "batch.x, batch.y"),
    "a Data as PyG has it": (
        "class Data:\n    def __init__(self, **kept):\n        self._store = kept\n"
        "    def to_dict(self):\n        return dict(self._store)\n"
        "    def __copy__(self):\n        return Data(**self._store)\n"
        "    def __setitem__(self, key, value):\n        self._store[key] = value\n",
        "[Data(x=x, y=y) for x, y in batches]",
        "batch._store['x'], batch._store['y']",
    ),
}
RESULTS = ("{'loss': loss, 'logits': x}", "(x, loss)", "SimpleNamespace(loss=loss)", "UserDict(loss=loss)")
IMPORTS = "import dataclasses\nfrom collections import UserDict, namedtuple\nfrom types import SimpleNamespace\n"


@pytest.mark.parametrize(("kind", "batches", "read"), BATCHES.values(), ids=BATCHES)
def test_batches_as_libraries_have_them_are_copied_to_a_graph(tmp_path, kind, batches, read):
    new = {"import torch, random": f"{IMPORTS}{kind}import torch, random", "# more": f"batches = {batches}"}

    found, _ = diagnosed(tmp_path, new | {"x, y = batch": f"x, y = {read}"})

    assert found.status == 0 and found.outcomes[WHOLE.title] == EQUAL, found.text()


@pytest.mark.parametrize("result", RESULTS)
def test_results_as_libraries_have_them_have_a_loss(tmp_path, result):
    new = {"import torch, random": f"{IMPORTS}import torch, random", "return loss": f"return {result}"}

    found, _ = diagnosed(tmp_path, new)

    assert found.status == 0 and found.outcomes[WHOLE.title] == EQUAL, found.text()


def test_a_counter_in_a_class_is_named_as_in_an_instance(tmp_path):
    counter = "class Count:\n    steps = 0\n\ndef build"

    found, _ = diagnosed(
        tmp_path, {"def build": counter, LOSS: f"Count.steps += 1\n        {LOSS} * (1 + Count.steps)"}
    )

    (finding,) = [finding for finding in found.findings if finding.level == WRONG]
    assert finding.kind == "host value" and "Count.steps goes from" in finding.evidence
    assert found.outcomes[WHOLE.title].startswith("wrong numbers"), found.text()


@pytest.mark.parametrize(
    ("read", "number"), [("batch['x'], batch['y']", 1), ("batch['x'] + len(batch['path']), batch['y']", 4)]
)
def test_names_in_a_batch_that_a_step_never_reads_make_no_shapes(tmp_path, read, number):
    batches = "[{'x': x, 'y': y, 'path': 'p' * i} for i, (x, y) in enumerate(batches)]"

    found, _ = diagnosed(tmp_path, {"# more": f"batches = {batches}", "x, y = batch": f"x, y = {read}"})

    state = StepState(f"{tmp_path / 'my_step.py'}:build", torch.device("cpu"), "test")
    assert len(set(state.classes)) == number
    assert ("shapes of batches" in {finding.kind for finding in found.findings}) == (number > 1)
    assert found.outcomes[WHOLE.title] == EQUAL


def test_heads_in_turn_are_named_where_they_are_read_and_there_alone(tmp_path):
    heads = "model = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])\n    count = [0]\n"
    heads += "    optimizer = torch.optim.AdamW(model.parameters(), fused=True)"
    in_turn = f"count[0] += 1\n        {LOSS.replace('model(x)', 'model[count[0] % 2](x)')}"

    found, lines = diagnosed(tmp_path, {"# more": heads, LOSS: in_turn})

    (finding,) = found.findings
    assert (finding.kind, finding.level) == ("control flow", WRONG), found.text()
    assert "model[count" in lines[int(finding.where.rpartition(":")[2]) - 1]


@pytest.mark.parametrize("is_in_library", [False, True])
def test_a_schedule_is_named_where_it_steps(tmp_path, is_in_library):
    """Transformers' Trainer makes both itself, so that no line of the user's makes them."""
    changes = {
        "# more": "schedule = getattr(torch.optim.lr_scheduler, 'StepLR')(optimizer, 1, 0.5)",
        "optimizer.step()": "optimizer.step()\n        schedule.step()",
        "r]": "r, schedule]",
    }
    changes |= {"torch.optim.SGD(": "getattr(torch.optim, 'SGD')("} if is_in_library else {}

    found, lines = diagnosed(tmp_path, changes)

    (finding,) = [finding for finding in found.findings if finding.kind == "learning rate"]
    line = f"my_step.py:{1 + lines.index('        schedule.step()')}"
    assert line in (finding.where if is_in_library else finding.evidence), found.text()


def test_lbfgs_is_named_as_what_it_is(tmp_path):
    make = "optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)"
    step = "optimizer.step(lambda: (loss := nn.functional.cross_entropy(model(x), y), loss.backward())[0])"

    found, lines = diagnosed(tmp_path, {"# more": make, "optimizer.step()": f"{step}"})

    (finding,) = found.findings
    assert finding.kind == "optimizer" and "LBFGS(" in lines[int(finding.where.rpartition(":")[2]) - 1]
    assert "another optimizer" in finding.text() and "AdamW" not in finding.text()


@pytest.mark.parametrize(
    ("findings", "whole", "first"),
    [
        ([], EQUAL, "Nothing stands against a graph."),
        ([], "not possible: several ranks", "Eager steps show nothing that stands against a graph; none was tried."),
        (
            [Finding("control flow", NOTE, "a.py:1", "")],
            EQUAL,
            "These steps can be in a graph, but a branch may change.",
        ),
        ([Finding("warm-up", NOTE, "a.py:1", "")], EQUAL, "Nothing stands against a graph."),
    ],
)
def test_the_first_line_contradicts_none_below_it(findings, whole, first):
    text = doctor.Diagnosis(findings=findings, outcomes={WHOLE.title: whole}).text()

    assert text.splitlines()[0] == first


def test_an_optimizer_finding_says_that_leaving_it_eager_was_just_seen_to_train_right(tmp_path):
    make = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)"
    step = "optimizer.step()\n        schedule.step()"

    found, lines = diagnosed(tmp_path, {"# more": make, "optimizer.step()": step, "r]": "r, schedule]"})

    (finding,) = [finding for finding in found.findings if finding.kind in ("learning rate", "rate by hand")]
    assert found.outcomes[UP_TO_OPTIMIZER.title] == EQUAL, found.text()
    assert "graph_fwd_bwd, which trains as eager does here" in finding.text()
    assert finding.text().count("graph_fwd_bwd") == 1 and "lr=torch.tensor" in finding.text()
    assert "SGD(" in lines[int(finding.where.rpartition(":")[2]) - 1]
