"""Everything that training changes goes back to its start, in place and bit for bit."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from graph_worth.snapshot import Snapshot

CPU = torch.device("cpu")


def model_and_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    inputs = torch.randn(5, 6)
    return model, lambda: model(inputs).square().mean()


def train(model, make_loss, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        make_loss().backward()
        optimizer.step()


def tensors_of(model, optimizer):
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    return [*model.parameters(), *model.buffers(), *state]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1), fused=True),
        lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True),
    ],
    ids=["adamw", "adamw fused", "sgd momentum", "sgd tensor rate", "rmsprop"],
)
def test_a_model_and_its_optimizer_go_back_in_place(make):
    model, make_loss = model_and_loss()
    optimizer = make(model.parameters())
    train(model, make_loss, optimizer)
    tensors = tensors_of(model, optimizer)
    values = [tensor.detach().clone() for tensor in tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    snapshot = Snapshot([model, optimizer], CPU)

    courses = []
    for _ in range(2):
        train(model, make_loss, optimizer)
        courses.append([tensor.detach().clone() for tensor in tensors_of(model, optimizer)])
        assert not torch.equal(tensors[0], values[0])
        snapshot.restore()
        assert all(map(torch.equal, tensors_of(model, optimizer), values))

    assert all(map(torch.equal, *courses))
    assert [tensor.data_ptr() for tensor in tensors_of(model, optimizer)] == places


def test_lbfgs_which_binds_its_state_anew_goes_back_whole():
    model, make_loss = model_and_loss()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = make_loss()
        loss.backward()
        return loss

    optimizer.step(closure)
    snapshot = Snapshot([model, optimizer], CPU)
    courses = []
    for _ in range(2):
        courses.append([float(optimizer.step(closure)) for _ in range(4)])
        snapshot.restore()
    assert courses[0] == courses[1] and len(set(courses[0])) == 4
    state = optimizer.state_dict()["state"][0]
    assert state["func_evals"] < 12 and any(name.endswith("old_dirs.0") for name, _ in snapshot.tensors)


def test_schedules_scalers_and_rates_on_the_host_go_back():
    model, make_loss = model_and_loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

    def train_scaled():
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(make_loss()).backward()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()

    train_scaled()
    before = (optimizer.param_groups[0]["lr"], schedule.last_epoch, scaler.get_scale())
    snapshot = Snapshot([model, optimizer, schedule, scaler], CPU)

    train_scaled()
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch, scaler.get_scale()) != before
    snapshot.restore()

    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch, scaler.get_scale()) == before


def test_random_numbers_and_gradients_go_back():
    model, make_loss = model_and_loss()
    make_loss().backward()
    gradient, value = model[0].weight.grad, model[0].weight.grad.clone()
    generator = torch.Generator().manual_seed(3)
    snapshot = Snapshot([model, generator], CPU)

    def drawn():
        own = torch.rand(2, generator=generator).tolist()
        return own, torch.rand(2).tolist(), random.random(), float(np.random.rand())

    first = drawn()
    model[0].weight.grad = torch.zeros_like(value)
    gradient.zero_()
    snapshot.restore()

    assert drawn() == first
    assert model[0].weight.grad is gradient and torch.equal(gradient, value)
    assert snapshot.generators == [generator]


def test_nests_and_objects_with_a_state_dict_go_back():
    class Average:
        def __init__(self):
            self.mean, self.count = torch.ones(3), 0

        def state_dict(self):
            return {"mean": self.mean.clone(), "count": self.count}

        def load_state_dict(self, state):
            self.mean, self.count = state["mean"], state["count"]

    average, nest = Average(), {"a": torch.ones(2), "b": [torch.zeros(1), (torch.zeros(1),)]}
    snapshot = Snapshot([average, nest], CPU)

    average.mean.add_(1)
    average.count = 4
    for tensor in (nest["a"], nest["b"][0], nest["b"][1][0]):
        tensor.add_(5)
    snapshot.restore()

    assert average.count == 0 and average.mean.tolist() == [1, 1, 1]
    assert nest["a"].tolist() == [1, 1] and nest["b"][0] == 0 and nest["b"][1][0] == 0


def test_tied_weights_are_kept_once_and_names_tell_objects_apart():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    snapshot = Snapshot([model, nn.Sequential(nn.Linear(2, 2)), torch.zeros(1)], CPU)

    names = [name for name, _ in snapshot.tensors]
    assert names == ["Sequential 0.0.weight", "Sequential 1.0.weight", "Sequential 1.0.bias", "Tensor"]


def test_draws_are_known_until_they_are_put_back():
    snapshot = Snapshot([nn.Linear(2, 2)], CPU)
    assert not snapshot.has_drawn()
    torch.rand(1)
    assert snapshot.has_drawn()
    snapshot.restore()
    assert not snapshot.has_drawn()
