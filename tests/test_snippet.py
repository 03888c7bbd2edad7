"""The code to paste in README.md: a step to measure; a capture that trains as eager does, and its preconditions.

On a GPU the code runs as it stands. Elsewhere the calls of torch.cuda go to a host graph, and the two lines that
capture become one call, because a host graph records a function and not a block.
"""

import contextlib
import re

import pytest
import torch

from graph_worth.capture.host_graph import HostPool
from graph_worth.folders import ROOT
from graph_worth.your_step import doctor
from graph_worth.your_step.findings import STOPS, WRONG

README = (ROOT / "README.md").read_text()
(SNIPPET,) = re.findall(r"```python\n(def graphed.*?)```", README, re.DOTALL)
(STEP,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)
CAPTURE = re.compile(r"with (torch\.cuda\.graph\(.*?\)):\n +loss = step\(static\).*\n")


class HostGraph:
    """The part of torch.cuda.CUDAGraph that the snippet uses, by a host graph.

    A capture on a GPU runs nothing. Here it runs the step once, so `state` is put back afterwards.
    """

    state: tuple[torch.Tensor, ...] = ()

    def __init__(self):
        self.pool = HostPool()

    def register_generator_state(self, generator):
        self.pool.register_generator(generator)

    def capture(self, fn):
        before = [tensor.detach().clone() for tensor in self.state]
        self.graph, result = self.pool.capture(fn)
        with torch.no_grad():
            for tensor, value in zip(self.state, before, strict=True):
                tensor.copy_(value)
        return result

    def replay(self):
        self.graph.replay()


class Stream:
    def wait_stream(self, other):
        """Nothing runs beside anything on the host."""

    def is_capturing(self):
        return True


def graphed_on(device, monkeypatch):
    """The snippet's function `graphed`."""
    code = SNIPPET
    if device == "cpu":
        assert len(CAPTURE.findall(code)) == 1
        code = CAPTURE.sub("with torch.cuda.graph(graph): loss = graph.capture(lambda: step(static))\n", code)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", HostGraph)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph", lambda graph: capturing())
    names = {"torch": torch}
    exec(compile(code, "README.md", "exec"), names)
    return names["graphed"]


@contextlib.contextmanager
def capturing():
    """Optimizers of torch look whether a GPU captures, and refuse what is not capturable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
        patch.setattr(torch.accelerator, "current_stream", Stream)
        patch.setattr(torch.backends.cuda, "is_built", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    yield request.param
    if request.param == "cuda":
        # A capture that failed leaves torch's generator as in a capture: the next test would draw outside of one.
        torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())


@pytest.fixture
def graphed(device, monkeypatch):
    return graphed_on(device, monkeypatch)


class Training:
    """A model with dropout, its optimizer, and a step; `change(loss, x)` runs in the step before the backward."""

    def __init__(self, device, change=None, optimizer=None):
        torch.manual_seed(1)
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        self.model = torch.nn.Sequential(*layers).to(device)
        self.optimizer = (optimizer or capturable_adam)(self.model.parameters())
        self.change = change

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(batch["x"]), batch["y"])
        if self.change:
            loss = self.change(loss, batch["x"])
        loss.backward()
        self.optimizer.step()
        HostGraph.state = tuple(self.tensors())
        return loss.detach()

    def tensors(self):
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [*self.model.parameters(), *(value for value in states if isinstance(value, torch.Tensor))]


def batches(device, num=4, rows=4):
    torch.manual_seed(2)
    return [{"x": torch.randn(rows, 8, device=device), "y": torch.randn(rows, 1, device=device)} for _ in range(num)]


def capturable_adam(parameters, lr=0.01):
    return torch.optim.AdamW(parameters, lr=lr, fused=True, capturable=True)


def trained_twice(graphed, device, eager, own, generators=(), before_step=lambda training, number: None):
    """Losses of eager steps and of replays as the README says: the first batch three times, then each batch.

    eager, own: two equal Trainings. generators: (of eager, of own). before_step: changes a training between steps.
    """
    data = batches(device)
    torch.manual_seed(3)
    for _ in range(3):
        eager.step(data[0])
    middle = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    expected = []
    for number, batch in enumerate(data):
        before_step(eager, number)
        expected.append(eager.step(batch))
    torch.manual_seed(3)
    replay = graphed(own.step, data[0], generators)
    torch.set_rng_state(middle) if device == "cpu" else torch.cuda.set_rng_state(middle)
    losses = []
    for number, batch in enumerate(data):
        before_step(own, number)
        losses.append(replay(batch))
    # Read late: each replay returned a tensor of its own.
    return torch.stack(losses), torch.stack(expected)


def test_replays_train_as_eager_steps_do(graphed, device):
    eager, own = Training(device), Training(device)
    losses, expected = trained_twice(graphed, device, eager, own)
    assert torch.equal(losses, expected) and len(set(losses.tolist())) == len(losses)
    assert all(map(torch.equal, own.tensors(), eager.tensors()))


def test_a_learning_rate_changed_in_place_reaches_the_replays(graphed, device):
    rates = {}

    def training():
        lr = torch.tensor(0.01, device=device)
        made = Training(device, optimizer=lambda parameters: capturable_adam(parameters, lr))
        rates[made] = lr
        return made

    def decay(training, number):
        rates[training].fill_(0.01 / (1 + number))

    changed, expected = trained_twice(graphed, device, training(), training(), before_step=decay)
    assert torch.equal(changed, expected)
    constant, _ = trained_twice(graphed, device, training(), training())
    assert not torch.equal(changed, constant)


def test_a_registered_generator_draws_anew_in_each_replay(graphed, device):
    eager, own = (Generator(device) for _ in range(2))
    replay = graphed(own.step, batches(device)[0], [own.generator])
    drawn = [replay(batch) for batch in batches(device)]
    assert len({float(loss) for loss in drawn}) == len(drawn)
    # The warm-up drew three times; a host graph draws while it records, too.
    gone = 3 if device == "cuda" else 4
    expected = [eager.step(batch) for batch in [batches(device)[0]] * gone + batches(device)][gone:]
    assert torch.equal(torch.stack(drawn), torch.stack(expected))


class Generator:
    """A step that draws from a generator of its own."""

    def __init__(self, device):
        self.generator = torch.Generator(device).manual_seed(5)

    def step(self, batch):
        return torch.rand(3, device=batch["x"].device, generator=self.generator).sum()


class Scaled(Training):
    """The same with a GradScaler."""

    def __init__(self, device, optimizer=None):
        super().__init__(device, optimizer=optimizer)
        self.scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(self.model(batch["x"]), batch["y"])
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        HostGraph.state = tuple(self.tensors())
        return loss.detach()


def test_a_scaler_needs_a_fused_optimizer(graphed, device):
    losses, expected = trained_twice(graphed, device, Scaled(device), Scaled(device))
    assert torch.equal(losses, expected)
    # Without one it asks on the host whether gradients overflowed.
    with pytest.raises(RuntimeError):
        graphed(Scaled(device, optimizer=plain_adam).step, batches(device)[0])
    assert "`GradScaler` needs a fused optimizer" in " ".join(README.split())


def reads_back(loss, x):
    return loss if loss.item() < 1e9 else 2 * loss


def shape_by_value(loss, x):
    return loss + x[x > 0].sum()


def draws(loss, x):
    # No generator can be made in a capture.
    if x.device.type not in draws.generators:
        draws.generators[x.device.type] = torch.Generator(x.device).manual_seed(5)
    generator = draws.generators[x.device.type]
    return loss + torch.rand(3, device=x.device, generator=generator).sum()


draws.generators = {}


def plain_adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


@pytest.mark.parametrize(
    "changes",
    [{"change": reads_back}, {"change": shape_by_value}, {"optimizer": plain_adam}, {"change": draws}],
    ids=["item", "mask", "optimizer", "generator"],
)
def test_a_step_that_breaks_a_precondition_is_not_captured(graphed, device, changes):
    with pytest.raises(RuntimeError):
        graphed(Training(device, **changes).step, batches(device)[0])
    assert len(re.findall(r"(?m)^\d\. \*\*", README)) == 5


@pytest.mark.parametrize("change", [lambda x: x[:1], lambda x: x.double()], ids=["shape", "dtype"])
def test_a_batch_of_another_shape_is_refused_and_never_broadcast(graphed, device, change):
    data = batches(device)
    replay = graphed(Training(device).step, data[0])
    with pytest.raises(ValueError, match="x is not like in the first batch"):
        replay({"x": change(data[1]["x"]), "y": data[1]["y"]})


def test_what_the_snippet_cannot_see(graphed, device):
    """A Python number keeps the value of the capture; README says so."""
    scale = [1.0]
    replay = graphed(lambda batch: scale[0] * batch["x"].abs().sum(), batches(device)[0])
    before = replay(batches(device)[0])
    scale[0] = 2.0
    assert torch.equal(replay(batches(device)[0]), before)
    assert "cannot see a Python number that changes" in README


def test_the_step_to_measure_has_twelve_lines_and_trains(device):
    assert len([line for line in STEP.splitlines() if line]) == 12
    names = {}
    exec(compile(STEP, "my_step.py", "exec"), names)
    torch.manual_seed(0)
    step, batches, changed = names["build"](torch.device(device))
    losses = [step(batch).item() for batch in batches * 4]
    assert losses[-1] < losses[0] and len(changed) == 2


@pytest.mark.slow
def test_a_graph_of_the_step_to_measure_trains_as_eager_does(device, tmp_path):
    path = tmp_path / "my_step.py"
    path.write_text(STEP)
    found = doctor.diagnose(f"{path}:build", torch.device(device))
    assert not {finding.level for finding in found.findings} & {STOPS, WRONG}, found.text()
    assert found.outcomes[doctor.UP_TO_OPTIMIZER.title] == "trains as eager does"
