"""`graphed`: trains as eager does, or refuses before a wrong loss reaches the caller. On a CPU with host graphs."""

import copy
import functools
import importlib.util
import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graph_worth import CaptureError, graphed, one_stream
from graph_worth.folders import ROOT
from graph_worth.measuring.torch_settings import deterministic_kernels
from graph_worth.snapshot import Snapshot
from graph_worth.your_step.graphed import _calls
from graph_worth.your_step.parts import loss_of
from tests.gallery.test_gallery import BROKEN, NEED_GPU, SOUND
from tests.helpers import gloo_ranks

CPU = torch.device("cpu")
# Eager reads memory that nothing has written, or a thread draws beside it: no two trainings are equal.
NOT_REPEATABLE = {"expert_without_rows", "uninitialised_memory", "noise_thread"}
# On a GPU these are refused in the capture; a host graph holds them, the first within a rounding.
HELD_ON_A_CPU = {"product_in_loss", "fill_with_tensor", "normal_with_deviations"}
# Their step is sound, or their shapes come too seldom to be captured here. A step's own capture is not looked at.
SOUND_HERE = {"counting_router", "longest_in_batch", "longest_in_many", "many_shapes", "not_handed_over"}
SOUND_HERE |= {"warm_statistics", *HELD_ON_A_CPU}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    if request.param == "cpu":
        yield CPU
        return
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with torch.cuda.stream(torch.cuda.Stream()), deterministic_kernels(where_there_are=True):
        yield torch.device("cuda", 0)


class Training:
    """A small model with dropout, its AdamW and a step that gives a loss and the number of right answers."""

    def __init__(self, device, lr=None, change=lambda training, loss: loss):
        torch.manual_seed(1)
        layers = nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.model, self.change, self.scale = nn.Sequential(*layers).to(device), change, 1.0
        lr = torch.tensor(0.01, device=device) if lr is None else lr
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, fused=True, capturable=on_gpu)
        self.owned = [self.model, self.optimizer]
        torch.manual_seed(2)

    def step(self, batch):
        self.optimizer.zero_grad()
        scores = self.model(batch["x"].to(self.model[0].weight.device, non_blocking=True))
        labels = batch["y"].to(scores.device, non_blocking=True)
        loss = self.change(self, nn.functional.cross_entropy(scores, labels))
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "right": (scores.argmax(-1) == labels).sum()}

    def state(self):
        return [tensor.detach().clone() for _, tensor in Snapshot(self.owned, self.model[0].weight.device).tensors]


def batches(count, rows=(6,), pinned=False):
    generator = torch.Generator().manual_seed(3)
    sizes = [rows[index % len(rows)] for index in range(count)]
    made = [
        {"x": torch.randn(n, 8, generator=generator), "y": torch.randint(4, (n,), generator=generator)} for n in sizes
    ]
    return [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in made] if pinned else made


def graphed_on(training, **options):
    return graphed(training.step, training.owned, cpu="host_graph", **options)


def assert_trains_alike(eager, ours, step, data, before=lambda training, index: None):
    """Both trainings over the batches: results and states are equal bit for bit. Results are read at the end."""
    expected, results = [], []
    seed = torch.initial_seed()
    for training, make, rows in ((eager, eager.step, expected), (ours, step, results)):
        torch.manual_seed(seed)
        for index, batch in enumerate(data):
            before(training, index)
            rows.append(make(batch))
    for index, (a, b) in enumerate(zip(expected, results, strict=True)):
        assert torch.equal(a["loss"].detach(), b["loss"]), index
        assert torch.equal(a["right"], b["right"]), index
        assert not b["loss"].requires_grad
    assert all(map(torch.equal, eager.state(), ours.state()))


# --- it trains as eager does


def test_twenty_steps_are_eager_s_bit_for_bit_and_each_batch_counts_once(device):
    eager, ours = Training(device), Training(device)
    step = graphed_on(ours)
    assert_trains_alike(eager, ours, step, batches(20, pinned=device.type == "cuda"))
    assert (step.replays, len(step.shapes)) == (17, 1)
    assert step.pool_bytes > 0
    step.release()
    assert (step.replays, step.shapes, step.pool_bytes) == (17, [], 0)


def test_shapes_in_turn_and_a_last_batch_of_another_shape_share_a_pool(device):
    data = batches(24, rows=(6, 4)) + batches(1, rows=(3,))
    eager, ours = Training(device), Training(device)
    step = graphed_on(ours)
    assert_trains_alike(eager, ours, step, data)
    assert [signature[0][0][0] for signature in step.shapes] == [6, 4]
    assert step.replays == 18, "the last shape came once: it was eager"


def test_evaluation_zero_grad_and_loaded_states_between_steps_are_free(device):
    kept = {}

    def between(training, index):
        training.model.eval()
        with torch.no_grad():
            training.model(torch.ones(2, 8, device=device))
        training.model.train()
        training.optimizer.zero_grad(set_to_none=True)
        # Of others, or read by nothing.
        nn.Linear(2, 2).register_forward_hook(lambda *_: None)
        setattr(training.model[0], f"seen_{index}", index)
        training.optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + index))
        if index == 5:
            kept[training] = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        if index == 10:
            training.model.load_state_dict(kept[training][0])
            training.optimizer.load_state_dict(kept[training][1])

    eager, ours = Training(device), Training(device)
    assert_trains_alike(eager, ours, graphed_on(ours), batches(14), before=between)


def test_a_shape_captured_before_training_leaves_the_state_as_it_was(device):
    eager, ours = Training(device), Training(device)
    step = graphed_on(ours)
    step.capture(batches(1)[0])
    assert len(step.shapes) == 1
    assert all(not tensor.any() for state in ours.optimizer.state.values() for tensor in state.values())
    assert_trains_alike(eager, ours, step, batches(8))
    assert step.replays == 8


def test_a_tensor_that_a_module_keeps_and_the_same_step_reads_is_sound(device):
    class Keeping(nn.Module):
        def forward(self, x):
            self.extra = x.square().mean()
            return x

    def change(training, loss):
        return loss + 0.1 * training.model[1].extra

    eager, ours = Training(device, change=change), Training(device, change=change)
    for training in (eager, ours):
        training.model[1] = Keeping()
    step = graphed_on(ours)
    assert_trains_alike(eager, ours, step, batches(12))
    assert step.replays == 9


def test_gradients_of_eager_steps_are_not_left_as_if_they_were_of_a_replay(device):
    ours = Training(device)
    step = graphed_on(ours)
    for batch in batches(8):
        step(batch)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "object", "slots"])
def test_nests_of_batches_and_results_are_taken_and_results_are_the_caller_s_to_keep(kind):
    @dataclass
    class Batch:
        x: torch.Tensor
        scale: float

    class Output:
        def __init__(self, loss, extra):
            self.loss, self.extra, self.callback = loss, extra, lambda: None

    class Slots:
        __slots__ = ("extra", "loss", "model")

        def __init__(self, loss, extra):
            self.loss, self.extra, self.model = loss, [Output(loss, extra)], optimizer

    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def step(batch):
        optimizer.zero_grad()
        x, scale = (batch.x, batch.scale) if isinstance(batch, Batch) else batch[:2]
        loss = (weight * x).square().sum() * scale
        loss.backward()
        optimizer.step()
        if kind in ("object", "slots"):
            return Output(loss, [x * 2]) if kind == "object" else Slots(loss, [x * 2])
        return loss, {"twice": x * 2}

    ours = graphed(step, [optimizer, weight], cpu="host_graph")
    xs = [torch.full((3,), float(number)) for number in range(1, 9)]
    results = [ours(Batch(x, 0.5) if kind == "dataclass" else (x, 0.5)) for x in xs]
    assert ours.replays == 5
    results_in = [result.extra[0] if kind == "slots" else result for result in results]
    twice = [result[1]["twice"] if isinstance(result, tuple) else result.extra[0] for result in results_in]
    assert all(torch.equal(a, 2 * b) for a, b in zip(twice, xs, strict=True))
    assert len({float(loss_of(result)) for result in results}) == len(results)


# --- it refuses


def change_rate(training):
    training.optimizer.param_groups[0]["lr"] = 0.5


def change_decay(training):
    training.optimizer.param_groups[0]["weight_decay"] = 0.5


def new_key(training):
    training.optimizer.param_groups[0]["warm"] = 1


def move_weight(training):
    training.model[0].weight.data = training.model[0].weight.data.clone()


def bind_weight(training):
    training.model[0].weight = nn.Parameter(training.model[0].weight.detach().clone())


def bind_statistics(training):
    training.model[3].running_mean = training.model[3].running_mean.clone()


def bind_moment(training):
    state = training.optimizer.state[training.model[0].weight]
    state["exp_avg"] = state["exp_avg"].clone()


def replace_layer(training):
    training.model[1] = nn.GELU()


def evaluate(training):
    training.model.eval()


def add_hook(training):
    training.model[1].register_forward_hook(lambda *args: None)


def add_tensor_hook(training):
    training.model[0].weight.register_hook(lambda gradient: 2 * gradient)


def add_gradient_hook(training):
    training.model[0].weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))


def replace_method(training):
    training.model[1].forward = lambda x: x


def forget_moments(training):
    training.optimizer.load_state_dict(training.optimizer.state_dict() | {"state": {}})


def load_by_assigning(training):
    training.model.load_state_dict(copy.deepcopy(training.model.state_dict()), assign=True)
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))


def freeze(training):
    training.model[0].requires_grad_(False)


def add_optimizer_hook(training):
    training.optimizer.register_step_pre_hook(lambda *_: None)


def add_parameters(training):
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_rate, r"lr in param_groups is 0.5, .*fill_\(value\)"),
        (change_decay, "weight_decay in param_groups is 0.5, and the graph keeps 0.01"),
        (new_key, "warm in param_groups is 1, and the graph keeps None"),
        (move_weight, "lies elsewhere"),
        (bind_weight, "lies elsewhere"),
        (bind_statistics, "lies elsewhere"),
        (bind_moment, "another tensor in its state"),
        (replace_layer, "another child"),
        (evaluate, r"train\(\) or eval\(\)"),
        (add_hook, "hooks"),
        (add_optimizer_hook, "hooks"),
        (add_tensor_hook, "a tensor or an optimizer has other hooks"),
        (add_gradient_hook, "a tensor or an optimizer has other hooks"),
        (replace_method, "a method was replaced"),
        (freeze, "requires_grad of a parameter"),
        (add_parameters, "param_groups|left out"),
        (load_by_assigning, "lies elsewhere"),
        (forget_moments, "left out state of an optimizer"),
    ],
)
def test_what_the_caller_changes_is_refused_before_the_replay(change, words):
    ours = Training(CPU)
    step = graphed_on(ours)
    for batch in batches(8):
        step(batch)
    change(ours)
    before, replays = ours.state(), step.replays
    with pytest.raises(CaptureError, match=words) as raised:
        step(batches(1)[0])
    assert all(map(torch.equal, before, ours.state()))
    assert step.replays == replays
    assert "graph-worth doctor" in str(raised.value)
    assert raised.value.place.startswith(__file__)
    with pytest.raises(CaptureError, match=words):
        step(batches(1)[0])


def test_another_hook_or_autocast_is_refused_and_who_puts_it_back_goes_on():
    eager, ours = Training(CPU), Training(CPU)
    step = graphed_on(ours)
    assert_trains_alike(eager, ours, step, batches(8))
    ours.model.eval()
    with pytest.raises(CaptureError, match=r"train\(\) or eval\(\)"):
        step(batches(1)[0])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="autocast"):
        ours.model.train()
        step(batches(1)[0])
    assert_trains_alike(eager, ours, step, batches(8))

    hooked = Training(CPU)
    handle = hooked.model[0].register_forward_hook(lambda *_: None)
    step = graphed_on(hooked)
    for batch in batches(8):
        step(batch)
    handle.remove()
    hooked.model[0].register_forward_hook(lambda module, args, result: 2 * result)
    with pytest.raises(CaptureError, match="other hooks"):
        step(batches(1)[0])


@pytest.mark.parametrize(
    ("where", "words"),
    [("outside", "AdamW was handed over and makes no step"), ("schedule", "a schedule steps inside of the step")],
)
def test_an_optimizer_outside_of_the_step_and_a_schedule_inside_are_refused(where, words):
    ours = Training(CPU)
    schedule = torch.optim.lr_scheduler.StepLR(ours.optimizer, 100)
    make_step = ours.optimizer.step

    def step(batch):
        result = ours.step(batch)
        if where == "schedule":
            schedule.step()
        return result

    if where == "outside":
        ours.optimizer.step = lambda: None
    step = graphed(step, ours.owned, cpu="host_graph")
    with pytest.raises(CaptureError, match=words):
        for batch in batches(8):
            step(batch)
            make_step()
    assert step.replays == 0


def test_an_average_of_many_tensors_is_made_once_a_step():
    eager, ours = Training(CPU), Training(CPU)
    for training in (eager, ours):
        averages = SimpleNamespace(shadow={f"{index}": torch.zeros(()) for index in range(50)})
        training.averages = averages
        training.change = lambda training, loss: (
            [tensor.mul_(0.9).add_(loss.detach()) for tensor in training.averages.shadow.values()] and loss
        )
    assert_trains_alike(eager, ours, graphed_on(ours), batches(12))
    assert all(map(torch.equal, eager.averages.shadow.values(), ours.averages.shadow.values()))


def test_a_number_that_the_caller_changes_is_seen_by_check_always():
    def scaled(training, loss):
        return loss * training.scale

    ours = Training(CPU)
    step = graphed_on(ours, check="always")
    for batch in batches(5):
        step(batch)
    ours.model[2].p = 0.5
    with pytest.raises(CaptureError, match=r"2.p was 0.1 at the capture and is 0.5"):
        step(batches(1)[0])
    for check in ("numbers", "always"):
        ours = Training(CPU, change=scaled)
        step = graphed_on(ours, check=check)
        for batch in batches(8):
            step(batch)
        ours.scale = 2.0
        if check == "numbers":
            step(batches(1)[0])  # as the page says
            continue
        with pytest.raises(CaptureError, match=r"self.scale was 1.0 at the capture and is 2.0"):
            step(batches(1)[0])


def test_a_shape_too_many_is_refused_or_stays_eager():
    ours = Training(CPU)
    step = graphed_on(ours, shapes=1)
    step(batches(1)[0])
    with pytest.raises(CaptureError, match=r"a batch of \[5, 8\], \[5\] has shape 2, and shapes=1"):
        step(batches(1, rows=(5,))[0])
    eager, ours = Training(CPU), Training(CPU)
    step = graphed_on(ours, shapes=1, on_refusal="eager")
    with pytest.warns(UserWarning, match="such batches stay eager") as seen:
        assert_trains_alike(eager, ours, step, batches(16, rows=(6, 5, 4)))
    assert len(seen) == 2, "once for each shape"
    assert step.replays > 0


def test_a_refused_step_goes_on_eagerly_and_says_so_once():
    def reads(training, loss):
        return loss * 2 if loss.item() > 1e9 else loss

    eager, ours = Training(CPU, change=reads), Training(CPU, change=reads)
    step = graphed_on(ours, on_refusal="eager")
    with pytest.warns(UserWarning, match="from now on the step runs eagerly") as seen:
        assert_trains_alike(eager, ours, step, batches(8))
    assert len(seen) == 1
    assert "reads a value" in step.refusal
    assert step.replays == 0
    eager, ours = Training(CPU, change=reads), Training(CPU, change=reads)
    step = graphed_on(ours, on_refusal="eager")
    with pytest.warns(UserWarning, match="from now on the step runs eagerly"):
        step.capture(batches(1)[0])
    assert_trains_alike(eager, ours, step, batches(8))


@pytest.mark.parametrize("wrap", [lambda number: number, lambda number: torch.full((2,), float(number))])
def test_a_number_in_the_result_that_changes_is_refused(wrap):
    # Iterators whose position nobody sees.
    count = map(int, range(100))
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss, wrap(count.__next__())

    ours = graphed(step, [weight, optimizer], cpu="host_graph")
    for _ in range(3):
        ours(torch.ones(3))
    with pytest.raises(CaptureError, match="returns|result 1 differs"):
        ours(torch.ones(3))


@pytest.mark.parametrize("option", ["on_refusal", "cpu", "check"])
def test_mistakes_are_told_before_training(option):
    ours = Training(CPU)
    with pytest.raises(ValueError, match=rf"graphed\({option}='never'\): takes '"):
        graphed(ours.step, ours.owned, **{option: "never"})
    for name, number in (("shapes", 0), ("verify", -1), ("warm_up", 0)):
        with pytest.raises(ValueError, match=rf"graphed\({name}={number}\): takes . or more"):
            graphed(ours.step, ours.owned, **{name: number})
    with pytest.raises(TypeError, match="a graphed step cannot be copied"):
        copy.deepcopy(graphed_on(ours))
    with pytest.raises(ValueError, match="it needs state_dict"):
        graphed(ours.step, [*ours.owned, object()])
    with pytest.raises(ValueError, match="the batch has no tensor"):
        graphed_on(ours)("a.png")
    with pytest.raises(ValueError, match="has a SimpleNamespace, whose tensors a graph would keep"):
        graphed_on(ours)((torch.ones(2), SimpleNamespace(x=[torch.ones(2)])))


@pytest.mark.parametrize("effect", ["a rounding", "another state", "another loss", "nothing"])
def test_code_that_asks_whether_a_stream_captures_is_named_by_what_it_changes(effect, monkeypatch):
    # torch without CUDA raises where it is asked.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rate = torch.ones(())

    def change(training, loss):
        if not torch.cuda.is_current_stream_capturing():
            loss = loss * (1 + 1e-5) if effect == "a rounding" else loss
            if effect == "another state":
                rate.mul_(0.9999)
            if effect == "another loss":
                loss = loss * 1.05
        return loss

    ours = Training(CPU, change=change)
    ours.owned.append(rate)
    step = graphed_on(ours)
    line = rf"code at {re.escape(__file__)}:{change.__code__.co_firstlineno + 1} does something else"
    data = batches(8)
    for batch in data[:3]:
        step(batch)
    if effect.startswith("another"):
        with pytest.raises(CaptureError, match=line):
            step(data[3])
        assert step.replays == 1
        return
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in data[3:]:
            step(batch)
    assert step.replays == 5
    assert [bool(re.search(line, str(warning.message))) for warning in seen] == [True] * (effect == "a rounding")


def test_a_step_without_a_loss_is_compared_by_its_state():
    weight, slow = torch.ones(3, requires_grad=True), [torch.ones(3), torch.ones(3)]
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    count = map(int, range(100))

    def step(x):
        optimizer.zero_grad()
        ((weight - slow[count.__next__() % 2]) * x).square().sum().backward()
        optimizer.step()

    ours = graphed(step, [weight, optimizer], cpu="host_graph")
    slow[1].zero_()
    for _ in range(3):
        assert ours(torch.ones(3)) is None
    with pytest.raises(CaptureError, match=r"differs from eager's|two eager steps from one state differ"):
        for _ in range(3):
            ours(torch.ones(3))


@torch.library.custom_op("tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """As a kernel that gives other bits each time, in a graph too."""
    return x * (1 + 1e-5 * torch.frombuffer(bytearray(os.urandom(x.numel())), dtype=torch.uint8).view(x.shape))


@pytest.mark.parametrize("variable", ["", ":4096:8"])
def test_recurrent_layers_of_cudnn_may_give_other_bits_each_time_without_a_variable(variable, monkeypatch):
    """torch does not warn of them."""
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda weight: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if variable:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", variable)

    class Noisy(nn.LSTM):
        def forward(self, x):
            hidden, last = super().forward(x)
            hidden.register_hook(noisy)
            return hidden, last

    torch.manual_seed(1)
    model = Noisy(8, 16, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step(x):
        optimizer.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss

    ours = graphed(step, [model, optimizer], cpu="host_graph")
    losses = [float(ours(torch.full((4, 9, 8), 0.1))) for _ in range(3)]
    if variable:
        with pytest.raises(CaptureError, match=r"differs from eager's|two eager steps from one state differ"):
            ours(torch.full((4, 9, 8), 0.1))
        return
    losses += [float(ours(torch.full((4, 9, 8), 0.1))) for _ in range(5)]
    assert ours.replays == 5 and losses == sorted(losses, reverse=True)


def test_a_cpu_stays_eager_and_says_so_once():
    eager, ours = Training(CPU), Training(CPU)
    with pytest.warns(UserWarning, match="a CPU, which has no graphs") as seen:
        step = graphed(ours.step, ours.owned)
        expected = [eager.step(batch)["loss"] for batch in batches(8)]
        torch.manual_seed(2)
        results = [step(batch)["loss"] for batch in batches(8)]
    assert len(seen) == 1
    assert all(map(torch.equal, expected, results))
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="no GPU"):
            assert one_stream() is None


def ranks_with_other_shapes():
    """For gloo_ranks: rank 1 sees its shapes the other way round."""
    ours = Training(CPU)
    step = graphed_on(ours)
    data = batches(2, rows=(6, 4))
    try:
        for batch in data if torch.distributed.get_rank() == 0 else data[::-1]:
            step(batch)
    except CaptureError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_ranks_that_see_shapes_in_another_order_all_raise():
    texts = gloo_ranks.run("tests.graph_worth.your_step.test_graphed", "ranks_with_other_shapes", 2)
    assert all("ranks see batches of other shapes" in text for text in texts)


# --- what changes on the host

COUNTER = """
import types
STATE = types.SimpleNamespace(inner=types.SimpleNamespace(deep=types.SimpleNamespace(count=0)))
def scale(loss):
    STATE.inner.deep.count += 1
    return loss * 2 if STATE.inner.deep.count > 100 else loss
"""


class Called:
    """An object that is called and counts, in a slot; code that does not run in the step reads the count."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0

    def __call__(self, loss):
        self.calls += 1
        return loss

    def reported(self):
        return self.calls


class Branching(Called):
    __slots__ = ()

    def __call__(self, loss):
        return super().__call__(loss) * (2 if self.calls > 100 else 1)


def counting(kind, tmp_path):
    """Return a function of a loss that counts on the host, and branches where no compared replay does."""
    calls, drawn = [0], iter(range(1000))

    def closure(loss):
        calls[0] += 1
        return loss * 2 if calls[0] > 100 else loss

    if kind == "another file":
        (tmp_path / "counter_of_a_test.py").write_text(COUNTER)
        spec = importlib.util.spec_from_file_location("counter_of_a_test", tmp_path / "counter_of_a_test.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.scale
    functions = {"closure": closure, "called": Branching(), "only written": Called(), "timer": Timer()}
    functions |= {"list of two": TwoAtOnce(), "getattr": ByName(), "default": by_default, "numpy": InAnArray()}
    functions["partial"] = functools.partial(of_box, {"n": 0})
    functions["islice"] = lambda loss: loss * 2 if [*itertools.islice(drawn, 1)] > [100] else loss
    return functions.get(kind, lambda loss: loss * 2 if next(drawn) > 100 else loss)


class Timer:
    """Counts with locals, arguments and attributes, and reads none of them but to count."""

    def __init__(self):
        self.last, self.total, self.mean, self.calls, self.all = 0.0, 0.0, 0.0, 0, []

    def __call__(self, loss):
        self.add(time.perf_counter())
        self.calls += 1
        return loss

    def add(self, last):
        passed = last - self.last
        self.all.append(passed)
        self.total += passed
        self.mean = max(self.total / 2, passed)
        self.last = last


class TwoAtOnce(Called):
    def __call__(self, loss):
        self.calls, scale = self.calls + 1, 1 + self.calls // 100
        return loss * scale


class ByName(Called):
    def __call__(self, loss):
        self.calls += 1
        return loss * 2 if getattr(self, "calls") > 100 else loss  # noqa: B009


class InAnArray(Called):
    def __init__(self):
        self.calls = torch.zeros(1).numpy()

    def __call__(self, loss):
        self.calls[0] += 1
        return loss * 2 if self.calls[0] > 100 else loss


def by_default(loss, box={"n": 0}):  # noqa: B006
    box["n"] += 1
    return loss * 2 if box["n"] > 100 else loss


def of_box(box, loss):
    box["n"] += 1
    return loss * 2 if box["n"] > 100 else loss


def test_a_count_is_refused_under_a_profiler_too(tmp_path):
    count = counting("another file", tmp_path)
    ours = Training(CPU, change=lambda training, loss: count(loss))
    step = graphed_on(ours)
    sys.setprofile(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="count goes from 2 to 3 between steps"):
            for batch in batches(4):
                step(batch)
    finally:
        sys.setprofile(None)


def test_a_profiler_of_new_threads_is_put_back_after_a_step_that_raises():
    def profiler(*_):
        pass

    threading.setprofile(profiler)
    try:
        with pytest.raises(ZeroDivisionError), _calls({}):
            1 / 0  # noqa: B018
        assert threading.getprofile() is profiler
        assert sys.getprofile() is None
    finally:
        threading.setprofile(None)


def test_a_refused_step_has_drawn_no_batch():
    def drawing(training, loss):
        drawn = next(training.source)
        return loss * (drawn if loss.item() > 0 else 1)

    eager, ours = (Training(CPU, change=drawing) for _ in range(2))
    eager.source, ours.source = (iter(torch.arange(1.0, 13)) for _ in range(2))
    with pytest.warns(UserWarning, match="draws from an iterator"):
        assert_trains_alike(eager, ours, graphed_on(ours, on_refusal="eager"), batches(8))


@pytest.mark.parametrize("kind", ["array", "object"])
def test_values_of_a_batch_that_their_text_does_not_show_are_shapes(kind):
    class Info:
        def __init__(self, scale):
            self.scale = scale

        def __repr__(self):
            return "Info()"

    def made(scale):
        values = torch.zeros(5000)
        values[2500] = scale
        return values.numpy() if kind == "array" else Info(scale)

    ours = Training(CPU)
    step = graphed(lambda batch: ours.step(batch[0]), ours.owned, cpu="host_graph", shapes=2)
    with pytest.raises(CaptureError, match="a batch of .* has shape 3, and shapes=2"):
        for scale in (0.0, 0.0, 1.0, 2.0):
            step((batches(1)[0], made(scale)))


REFUSED_COUNTS = ["another file", "called", "closure", "list of two", "getattr", "default", "partial", "numpy"]


@pytest.mark.parametrize("kind", [*REFUSED_COUNTS, "iterator", "islice", "only written", "timer"])
def test_a_count_of_the_step_is_refused_where_code_of_the_step_reads_it(kind, tmp_path):
    count = counting(kind, tmp_path)
    ours = Training(CPU, change=lambda training, loss: count(loss))
    step = graphed_on(ours)
    for batch in batches(3):
        step(batch)
    if kind in ("only written", "timer"):
        step(batches(1)[0])
        assert step.replays == 1
        return
    drawing = {"iterator": "draws from an iterator", "islice": "draws from .*drawn"}
    words = drawing.get(kind, r"goes from \[?2.* to \[?3.* between steps, and is read here")
    with pytest.raises(CaptureError, match=words) as raised:
        step(batches(1)[0])
    assert raised.value.place.startswith(str(tmp_path) if kind == "another file" else __file__)


def test_a_number_that_the_loop_changes_in_the_first_calls_is_refused():
    ours = Training(CPU, change=lambda training, loss: loss * training.scale)
    step = graphed_on(ours)
    with pytest.raises(CaptureError, match=r"self.scale goes from .* and is read here"):
        for batch in batches(4):
            step(batch)
            ours.scale += 1
    assert step.replays == 0


def test_what_the_step_binds_to_a_name_is_that_of_its_replay(device):
    def change(training, loss):
        training.log["loss"] = loss.detach()
        training.seen += 1
        return loss

    seen = {}

    def read(training, index):
        seen.setdefault(training, []).append(training.log.get("loss"))
        # Beside the step, in the same file.
        assert training.seen <= index

    eager, ours = (Training(device, change=change) for _ in range(2))
    for training in (eager, ours):
        training.log, training.seen = {}, 0
    assert_trains_alike(eager, ours, graphed_on(ours), batches(12), before=read)
    assert all(map(torch.equal, seen[eager][1:], seen[ours][1:]))


def test_an_average_that_is_bound_anew_and_no_loss_shows_is_refused():
    def change(training, loss):
        training.shadow = 0.9 * training.shadow + 0.1 * loss.detach()
        return loss

    ours = Training(CPU, change=change)
    ours.shadow = torch.zeros(())
    step = graphed_on(ours)
    with pytest.raises(CaptureError, match="self.shadow, which the step binds anew, differs"):
        for batch in batches(8):
            step(batch)
    assert step.replays == 2


def test_an_optimizer_that_was_not_handed_over_is_refused():
    ours = Training(CPU)
    step = graphed(ours.step, [ours.model], cpu="host_graph")
    with pytest.raises(CaptureError, match=r"AdamW steps in the step and was not handed over: graphed\(step, "):
        for batch in batches(4):
            step(batch)


# --- the gallery


def trained(path, device, wrap, count=14):
    """Losses and the state of a training of the gallery, up to its refusal, and the refusal."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    step, data, owned = module.build(device)
    step = wrap(step["eager"] if isinstance(step, dict) else step, owned)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for index in range(count):
        try:
            losses.append(float(loss_of(step(data[index % len(data)])).detach()))
        except CaptureError as error:
            return losses, [], error, step
    return losses, [tensor.clone() for _, tensor in Snapshot(owned, device).tensors], None, step


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.gpu if path.stem in NEED_GPU else [], id=path.stem) for path in BROKEN],
)
def test_no_loss_of_a_broken_step_reaches_the_caller_unless_it_is_eager_s(path, device):
    if device.type == "cpu" and path.stem in NEED_GPU:
        pytest.skip("needs a GPU")
    expected, state, _, _ = trained(path, device, lambda step, owned: step)
    wrap = lambda step, owned: graphed(step, owned, cpu="host_graph")  # noqa: E731
    losses, ours, refusal, _ = trained(path, device, wrap)
    if path.stem not in NOT_REPEATABLE:
        assert losses == expected[: len(losses)]
    if refusal is None:
        # A GPU may hold what the host graph does not, as torch 2.11 a checkpoint's random state.
        assert path.stem in SOUND_HERE or device.type == "cuda"
        assert all(torch.allclose(a, b) for a, b in zip(state, ours, strict=True))
    else:
        assert ":" in refusal.place, refusal
        assert str(refusal).endswith("graph-worth doctor FILE.py:build")
    if device.type == "cpu":
        assert (refusal is None) == (path.stem in SOUND_HERE), refusal


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in SOUND])
def test_a_sound_step_trains_bit_for_bit(path, device):
    expected, state, _, _ = trained(path, device, lambda step, owned: step)
    losses, ours, refusal, step = trained(path, device, lambda step, owned: graphed(step, owned, cpu="host_graph"))
    assert refusal is None, refusal
    assert step.replays >= 8
    assert losses == expected
    assert all(map(torch.equal, state, ours))


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [False, True])
def test_amp_with_a_loss_scaler_and_clipping_trains_as_eager_does(clip):
    device = torch.device("cuda", 0)

    class Scaled(Training):
        def __init__(self):
            super().__init__(device)
            self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**17, growth_interval=4)
            self.owned = [*self.owned, self.scaler]

        def step(self, batch):
            self.optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                scores = self.model(batch["x"].to(device))
                labels = batch["y"].to(device)
                loss = nn.functional.cross_entropy(scores, labels)
            self.scaler.scale(loss).backward()
            if clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.5, foreach=True)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            return {"loss": loss, "right": (scores.argmax(-1) == labels).sum()}

    with torch.cuda.stream(torch.cuda.Stream()):
        eager, ours = Scaled(), Scaled()
        step = graphed_on(ours)
        assert_trains_alike(eager, ours, step, batches(20))
        assert eager.scaler.get_scale() == ours.scaler.get_scale()
        assert step.replays == 17


@pytest.mark.gpu
def test_a_capture_leaves_numbers_of_schedules_as_they_were_and_draws_on_the_host_are_refused():
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = Training(device, change=lambda training, loss: loss * (2 if torch.rand([]) < 0.5 else 1))
        step = graphed_on(ours)
        with pytest.raises(CaptureError, match="draws from torch's generator of the host"):
            for batch in batches(4):
                step(batch)
        ours = Training(device, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(ours.optimizer, 2)
        ours.owned.append(schedule)
        ours.change = lambda training, loss: (schedule.step(), loss)[1]
        step = graphed_on(ours)
        for batch in batches(3):
            step(batch)
        with pytest.raises(CaptureError, match="a schedule steps inside of the step"):
            for batch in batches(3):
                step(batch)
        assert schedule.last_epoch < 7


@pytest.mark.gpu
def test_compiled_modules_train_inside_of_the_graph():
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        eager, ours = (Training(device) for _ in range(2))
        for training in (eager, ours):
            training.model[2].p = 0.0  # compiled code draws other numbers
            training.model.compile()
        step = graphed_on(ours)
        assert_trains_alike(eager, ours, step, batches(12))
        assert step.replays == 9


@pytest.mark.gpu
def test_memory_goes_back_and_random_numbers_are_drawn_after_a_failed_capture():
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        ours = Training(device, change=lambda training, loss: loss * 2 if loss.item() > 1e9 else loss)
        step = graphed_on(ours, on_refusal="eager")
        with pytest.warns(UserWarning, match="from now on the step runs eagerly"):
            for batch in batches(6):
                step(batch)
        assert torch.rand(3, device=device).sum() > 0
        ours = Training(device)
        step = graphed_on(ours)
        for batch in batches(8):
            step(batch)
        held = torch.cuda.memory_reserved()
        in_pool = step.pool_bytes
        assert in_pool > 0
        step.release()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= held - in_pool


SCRIPT = """
import sys, warnings, torch
from torch import nn
from graph_worth import graphed, one_stream

if sys.argv[1] == "one":
    one_stream()
    assert one_stream() == torch.cuda.current_stream() != torch.cuda.default_stream()
torch.manual_seed(0)

def trained(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=True)
    def step(batch):
        optimizer.zero_grad()
        loss = (model(batch.cuda(non_blocking=True)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    step, losses = wrap(step, [model, optimizer]), []
    data = [torch.randn(32, 64).pin_memory() for _ in range(20)]
    for batch in data:
        losses.append(step(batch))
        junk = torch.randn(1 << 20, device="cuda")  # memory of results that a replay wrongly reused would show
    return [float(loss) for loss in losses], [p.tolist() for p in model.parameters()]

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    a, b = trained(lambda step, owned: step), trained(graphed)
assert a == b
words = [str(warning.message) for warning in seen]
assert sum("one_stream" in text for text in words) == (sys.argv[1] != "one"), words
"""


@pytest.mark.gpu
@pytest.mark.parametrize("streams", ["one", "default"])
def test_a_program_on_one_stream_or_on_the_default_one_trains_as_eager_does(streams):
    done = subprocess.run([sys.executable, "-c", SCRIPT, streams], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
