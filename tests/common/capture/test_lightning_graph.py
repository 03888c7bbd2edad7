"""The full iteration captured under Lightning's own loop: equal to eager, resumed, refused by name."""

import logging
import signal
import sys
import warnings
from dataclasses import replace

import pytest
import torch

pytest.importorskip("lightning", reason="an extra: ./setup.sh lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader

from common.capture.lightning import CUDAGraphCallback
from common.capture.pool import CaptureError, StaticInputs
from common.measuring.state_hash import StateHasher
from common.script.step_checks import compare_with_eager
from common.variant import Unsupported
from stable_diffusion import other_variants
from stable_diffusion.config import PRESETS
from stable_diffusion.data import synthetic
from stable_diffusion.state import State
from stable_diffusion.train import eager_step

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Lightning's hints at what else one could use, and at its own future.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning")

WARM = 3
BATCHES = 12


class Toy(LightningModule):
    """Dropout, a tensor learning rate with a schedule, a dictionary as batch, the loss and another number logged."""

    def __init__(self, **optimizer):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 1),
        )
        self.optimizer = {"lr": torch.tensor(1e-2), "fused": True, "capturable": True} | optimizer
        self.seen = []

    def training_step(self, batch, batch_idx):
        y = self.layers(batch["x"])
        loss = F.mse_loss(y, batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("y", y.mean())
        return {"loss": loss, "y": y}

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.layers(batch["x"]), batch["y"]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs:
            self.seen.append((outputs["loss"], outputs.get("y", outputs["loss"]), self.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), **self.optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count=BATCHES, sizes=(8,), dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    for index in range(count):
        x = torch.randn(sizes[index % len(sizes)], 6, generator=generator)
        yield {"x": x.to(dtype), "y": x.sum(1, keepdim=True).sin().to(dtype)}


def load(data):
    # With a generator of its own: the start of an epoch then draws nothing from the one that dropout uses.
    return DataLoader(data, batch_size=None, generator=torch.Generator())


def fit(
    callback=None, module=None, loader=None, ckpt_path=None, val=None, callbacks=(), seed=0, quiet=True, **settings
):
    """A Trainer after `fit` on the CPU with everything else off, and its module; callback None: eager."""
    torch.manual_seed(seed)
    module = module or Toy()
    settings = {"max_epochs": 3, "logger": False, "enable_checkpointing": False} | settings
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*callbacks, *([callback] if callback else [])],
        **settings,
    )
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        trainer.fit(module, load(loader or list(batches())), val and load(val), ckpt_path=ckpt_path)
    return trainer, module


def seeded(make):
    torch.manual_seed(3)
    return make()


def difference(ours, theirs):
    """Name of the first tensor of weights, buffers, optimizer or outputs that differs between two fits, or None."""
    (trainer, module), (other_trainer, other) = ours, theirs
    state, others = module.state_dict(), other.state_dict()
    for name in state:
        if not torch.equal(state[name], others[name]):
            return name
    moments, other_moments = (t.optimizers[0].state_dict()["state"] for t in (trainer, other_trainer))
    for index in moments:
        for name in moments[index]:
            if not torch.equal(moments[index][name], other_moments[index][name]):
                return f"{index}.{name}"
    lr, other_lr = (t.optimizers[0].param_groups[0]["lr"] for t in (trainer, other_trainer))
    if not torch.equal(lr, other_lr):
        return "lr"
    assert len(module.seen) == len(other.seen) > 0
    for step, (a, b) in enumerate(zip(module.seen, other.seen, strict=True)):
        if not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]):
            return f"outputs of step {step}"
    return None


# ------------------------------------------------------------------------------------------------
# Equal to eager


def test_a_graphed_fit_equals_an_eager_one_bit_for_bit():
    callback = CUDAGraphCallback(warmup_steps=WARM)
    graphed, eager = fit(callback), fit()
    assert difference(graphed, eager) is None
    steps = 3 * BATCHES
    assert graphed[0].global_step == steps
    # On the host the capture itself makes its step.
    assert callback.num_replays == steps - WARM - 1
    assert callback.num_ragged == 0
    losses = [float(loss) for loss, _, _ in graphed[1].seen]
    assert len(set(losses)) == steps and sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("part", ["inputs", "loss", "lr"])
def test_a_broken_callback_is_caught(part, monkeypatch):
    """Check that the test above would find a replay of stale inputs, stale results or a frozen learning rate."""
    callback, module = CUDAGraphCallback(warmup_steps=WARM), Toy()
    if part == "inputs":
        monkeypatch.setattr(StaticInputs, "load", lambda self, batch: None)
    if part == "loss":
        monkeypatch.setattr(torch.Tensor, "clone", lambda self, **kwargs: self.detach(), raising=True)
    if part == "lr":
        capture = CUDAGraphCallback._capture

        def with_a_copy_of_the_lr(self, step, closure):
            group = self._optimizer.param_groups[0]
            lr, group["lr"] = group["lr"], group["lr"] + 0
            capture(self, step, closure)
            self.kept, group["lr"] = group["lr"], lr
            self._settings[0]["lr"] = id(lr)

        monkeypatch.setattr(CUDAGraphCallback, "_capture", with_a_copy_of_the_lr)
    graphed = fit(callback, module)
    monkeypatch.undo()
    assert difference(graphed, fit()) is not None


@pytest.mark.parametrize("kind", [tuple, list, torch.Tensor])
def test_batches_of_other_kinds(kind):
    class Sum(Toy):
        def training_step(self, batch, batch_idx):
            x = batch if kind is torch.Tensor else batch[0]
            loss = F.mse_loss(self.layers(x), x.sum(1, keepdim=True).sin())
            return {"loss": loss, "y": loss.detach()}

    data = [batch["x"] if kind is torch.Tensor else kind((batch["x"], 3)) for batch in batches()]
    callback = CUDAGraphCallback(warmup_steps=WARM)
    assert difference(fit(callback, seeded(Sum), data), fit(None, seeded(Sum), data)) is None
    assert callback.num_replays == 3 * BATCHES - WARM - 1


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-true"},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
    ],
    ids=str,
)
def test_clipping_and_precisions(settings):
    dtype = torch.float64 if settings.get("precision") == "64-true" else torch.float32
    callback, data = CUDAGraphCallback(warmup_steps=WARM), list(batches(dtype=dtype))
    pair = [fit(c, seeded(Toy), data, max_epochs=1, **settings) for c in (callback, None)]
    assert difference(*pair) is None
    assert callback.num_replays == BATCHES - WARM - 1
    plain = fit(None, seeded(Toy), max_epochs=1)
    assert [float(step[0]) for step in plain[1].seen] != [float(step[0]) for step in pair[0][1].seen]


def test_sixteen_bit_with_a_loss_scale_of_the_modules_own():
    class Scaled(Toy):
        def __init__(self):
            super().__init__()
            self.scale = torch.tensor(1024.0)

        def backward(self, loss):
            (loss * self.scale).backward()

        def on_before_optimizer_step(self, optimizer):
            torch._foreach_div_([p.grad for p in self.parameters()], self.scale)

    callback = CUDAGraphCallback(warmup_steps=WARM)
    pair = [fit(c, seeded(Scaled), max_epochs=1, precision="16-true") for c in (callback, None)]
    assert difference(*pair) is None
    assert pair[0][1].layers[0].weight.dtype == torch.float16
    assert callback.num_replays == BATCHES - WARM - 1


# ------------------------------------------------------------------------------------------------
# Lightning's own work


def test_hooks_of_each_step_are_called_and_outputs_may_be_kept():
    calls = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            calls.append(("start", batch_idx, float(batch["x"].sum())))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            calls.append(("end", batch_idx, float(batch["x"].sum())))

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            calls.append(("zero", 0, 0.0))

    callbacks = [CUDAGraphCallback(warmup_steps=WARM), Watch()]
    with pytest.warns(UserWarning, match="Watch.on_before_zero_grad runs in warm-up and at the capture"):
        module = fit(callbacks=callbacks, max_epochs=1, quiet=False)[1]
    sums = [float(batch["x"].sum()) for batch in batches()]
    for name in ("start", "end"):
        assert [call[1:] for call in calls if call[0] == name] == list(enumerate(sums))
    assert sum(call[0] == "zero" for call in calls) == WARM + 1
    # Those kept over the fit are those of their steps.
    eager = fit(max_epochs=1)[1]
    assert [float(kept[0]) for kept in module.seen] == [float(kept[0]) for kept in eager.seen]


def test_logs_are_those_of_an_eager_run(tmp_path):
    texts, metrics = [], []
    for index, callback in enumerate((CUDAGraphCallback(warmup_steps=WARM), None)):
        logger = CSVLogger(tmp_path, version=index)
        trainer, _ = fit(callback, callbacks=[LearningRateMonitor("step")], logger=logger, log_every_n_steps=1)
        texts.append((tmp_path / "lightning_logs" / f"version_{index}" / "metrics.csv").read_text())
        metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    assert texts[0] == texts[1]
    assert "loss_step" in texts[0] and "loss_epoch" in texts[0] and "lr-AdamW" in texts[0]
    assert len(texts[0].splitlines()) > 3 * BATCHES
    assert metrics[0] == metrics[1] and {"loss", "y"} <= metrics[0].keys()


def test_validation_in_between_sees_the_live_weights():
    val = list(batches(2))
    values, gradients = [], []

    class Watch(Callback):
        def on_validation_end(self, trainer, pl_module):
            values.append(float(trainer.callback_metrics["val"]))

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            gradients.append([float(p.grad.abs().sum()) for p in pl_module.parameters()])

    callback = CUDAGraphCallback(warmup_steps=WARM)
    settings = {"val": val, "callbacks": [Watch()], "val_check_interval": 5, "check_val_every_n_epoch": None}
    graphed = fit(callback, **settings)
    ours, our_gradients = values[:], gradients[:]
    values.clear(), gradients.clear()
    assert difference(graphed, fit(None, **settings)) is None
    assert ours == values and len(set(ours)) == len(ours) >= 7
    assert our_gradients == gradients
    assert callback.num_replays == 3 * BATCHES - WARM - 1


class KeepRandom(Callback):
    """Lightning's checkpoints hold no random state; dropout needs it for a resume that is exact."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.random = checkpoint["random"]

    def on_train_start(self, trainer, pl_module):
        if hasattr(self, "random"):
            torch.set_rng_state(self.random)


@pytest.mark.parametrize("resumed_graphed", [True, False])
def test_resume_from_a_checkpoint_equals_an_uninterrupted_run(tmp_path, resumed_graphed):
    whole = fit(CUDAGraphCallback(warmup_steps=WARM), max_epochs=4)
    saver = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    settings = {"callbacks": [saver, KeepRandom()], "enable_checkpointing": True}
    fit(CUDAGraphCallback(warmup_steps=WARM), max_epochs=2, **settings)
    callback = CUDAGraphCallback(warmup_steps=WARM) if resumed_graphed else None
    module = Toy()
    lr = module.optimizer["lr"]
    resumed = fit(callback, module, max_epochs=4, ckpt_path=tmp_path / "epoch=1.ckpt", seed=9, **settings)
    assert resumed[0].global_step == 4 * BATCHES
    whole[1].seen = whole[1].seen[-2 * BATCHES :]
    assert difference(resumed, whole) is None
    if callback:
        assert callback.num_replays == 2 * BATCHES - WARM - 1
        assert resumed[0].optimizers[0].param_groups[0]["lr"] is lr, "a user's tensor stays the learning rate"


def test_a_checkpoint_in_the_middle_of_replays_holds_the_weights_of_its_step(tmp_path):
    files = []
    for name, callback in (("graph", CUDAGraphCallback(warmup_steps=WARM)), ("eager", None)):
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        fit(callback, callbacks=[saver], enable_checkpointing=True, max_epochs=2)
        files.append(sorted((tmp_path / name).glob("*.ckpt")))
    assert [path.name for path in files[0]] == [path.name for path in files[1]] and len(files[0]) == 4
    for ours, eager in zip(*files, strict=True):
        a, b = (torch.load(path, weights_only=False) for path in (ours, eager))
        assert a["global_step"] == b["global_step"]
        assert all(torch.equal(a["state_dict"][key], b["state_dict"][key]) for key in b["state_dict"])
        assert a["lr_schedulers"][0]["last_epoch"] == b["lr_schedulers"][0]["last_epoch"]


def test_a_second_fit_captures_anew_and_the_module_is_left_as_it_was():
    callback = CUDAGraphCallback(warmup_steps=WARM)
    _, module = fit(callback, max_epochs=1)
    assert not {"optimizer_step", "training_step", "log"} & vars(module).keys()
    assert callback.pool is None
    fit(callback, module, max_epochs=1)
    assert callback.num_replays == 2 * (BATCHES - WARM - 1)


# ------------------------------------------------------------------------------------------------
# Batches that do not fit


def test_a_ragged_last_batch_is_a_named_error():
    data = [*batches(BATCHES - 1), *batches(1, sizes=(3,))]
    with pytest.raises(ValueError, match=r"batch 11 .*batch\['x'\].*\(3, 6\).*\(8, 6\).*drop_last=True") as caught:
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=data)
    assert "ragged='eager'" in str(caught.value)
    # In warm-up too: not only from the capture on.
    with pytest.raises(ValueError, match="batch 11 does not fit"):
        fit(CUDAGraphCallback(warmup_steps=100), loader=data)


def test_a_ragged_last_batch_may_run_eagerly_and_is_counted():
    data = [*batches(BATCHES - 1), *batches(1, sizes=(3,))]
    callback = CUDAGraphCallback(warmup_steps=WARM, ragged="eager")
    assert difference(fit(callback, loader=data), fit(loader=data)) is None
    assert callback.num_ragged == 3
    assert callback.num_replays == 3 * (BATCHES - 1) - WARM - 1


def test_other_values_in_a_batch_must_stay():
    data = [batch | {"name": "b" if index == 9 else "a"} for index, batch in enumerate(batches())]
    with pytest.raises(ValueError, match=r"batch 9 .*batch\['name'\] is 'b', captured as 'a'"):
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=data)
    data = [batch if index != 9 else batch | {"z": batch["x"]} for index, batch in enumerate(batches())]
    with pytest.raises(ValueError, match=r"batch 9 .*'z'"):
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=data)
    data = [batch if index != 9 else batch | {"name": "a"} for index, batch in enumerate(batches())]
    with pytest.raises(ValueError, match=r"batch 9 .*'name'.*the first one was of"):
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=data)
    with pytest.raises(ValueError, match=r"batch\['z'\] is a object: a graph reads tensors"):
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=[batch | {"z": object()} for batch in batches()])


# ------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    "arguments, words",
    [({"warmup_steps": 0}, "warmup_steps=0.*from 1 up"), ({"ragged": "drop"}, "ragged='drop'.*'error' or 'eager'")],
)
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        CUDAGraphCallback(**arguments)


class Manual(Toy):
    automatic_optimization = False


class OwnStep(Toy):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Iterates(Toy):
    def training_step(self, dataloader_iter):
        pass


@pytest.mark.parametrize(
    "module, settings, words",
    [
        (Toy, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2.*inside training_step"),
        (Manual, {}, "automatic_optimization = True"),
        (OwnStep, {}, "OwnStep.optimizer_step is overridden"),
        (Iterates, {}, r"training_step\(dataloader_iter\)"),
        (lambda: Toy(lr=1e-2), {}, r"learning rate of AdamW is 0.01.*lr=torch.tensor\(..., device=...\)"),
        (lambda: Toy(capturable=False), {}, "AdamW is not capturable.*capturable=True"),
    ],
)
def test_refused_by_name_before_the_first_step(module, settings, words):
    module = module()
    with pytest.raises(ValueError, match=words):
        fit(CUDAGraphCallback(), module, **settings)
    assert not module.seen and "optimizer_step" not in vars(module)


def test_other_precisions_and_strategies_are_refused():
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="precision '16-mixed'.*host.*'bf16-mixed'"):
        fit(CUDAGraphCallback(), plugins=[scaled])
    with pytest.raises(ValueError, match=r"not with DDPStrategy.*Trainer\(devices=1\)"):
        fit(CUDAGraphCallback(), strategy="ddp")


def test_an_accumulation_that_starts_later_is_refused():
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    with pytest.raises(ValueError, match="accumulate_grad_batches is 2"):
        fit(CUDAGraphCallback(warmup_steps=WARM), callbacks=[GradientAccumulationScheduler({1: 2})])


def _with_step(body):
    """A Toy whose training_step is `body(self, batch, batch_idx, loss)` after the forward pass."""

    class Other(Toy):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layers(batch["x"]), batch["y"])
            return body(self, batch, batch_idx, loss)

    return Other()


def test_what_the_capture_shows_names_its_cause():
    cases = {
        r"Tensor.item at .*test_lightning_graph.py:\d+ cannot be captured": lambda s, b, i, loss: loss * loss.item(),
        "reads batch_idx, which a graph freezes at 3": lambda s, b, i, loss: loss * (1 + i % 2),
        r"self.log\('n'.*training_step gets a float": lambda s, b, i, loss: s.log("n", 1.0) or loss,
        "training_step returned None": lambda s, b, i, loss: None,
    }
    for words, body in cases.items():
        module = _with_step(body)
        with pytest.raises(CaptureError, match=words):
            fit(CUDAGraphCallback(warmup_steps=WARM), module)
        assert not {"optimizer_step", "training_step", "log"} & vars(module).keys(), "left as it was"


def test_a_metric_updated_in_the_captured_step_is_refused():
    from torchmetrics import MeanSquaredError

    module = _with_step(lambda self, batch, batch_idx, loss: self.error.update(loss, loss * 2) or loss)
    module.error = MeanSquaredError()
    with pytest.raises(CaptureError, match="metric 'error'.*on_train_batch_end"):
        fit(CUDAGraphCallback(warmup_steps=WARM), module)


def test_changes_of_the_optimizer_after_the_capture_are_refused():
    def change(name, value):
        class Change(Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
                optimizer = trainer.optimizers[0]
                if batch_idx != 7:
                    return
                if name == "load":
                    optimizer.load_state_dict(optimizer.state_dict())
                elif name == "group":
                    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
                else:
                    optimizer.param_groups[0][name] = value

        return Change()

    cases = [("lr", 0.1, "changed after the capture: lr"), ("betas", (0.8, 0.9), "changed after the capture: betas")]
    cases += [("load", None, "state was loaded after the capture"), ("group", None, "were added after the capture")]
    for name, value, words in cases:
        with pytest.raises(ValueError, match=words):
            fit(CUDAGraphCallback(warmup_steps=WARM), callbacks=[change(name, value)])


# ------------------------------------------------------------------------------------------------
# Streams, with stand-ins for CUDA's


class Stream:
    def __init__(self, name="side"):
        self.name, self.waited, self.device = name, [], "cuda:0"

    def wait_stream(self, other):
        self.waited.append(other.name)


@pytest.mark.parametrize("given", [True, False])
def test_a_fit_runs_on_a_side_stream_and_gives_the_old_one_back(given, monkeypatch):
    default, users = Stream("default"), Stream("user's")
    current = [users if given else default]
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.insert(0, stream))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    callback = CUDAGraphCallback()
    callback._enter_side_stream(torch.device("cuda", 0))
    side = current[0]
    assert side is users if given else side.name == "side" and side.waited == ["default"]
    for _ in range(2):
        callback.teardown(None, None, "fit")
        assert current[0] is (users if given else default)
    assert default.waited == ([] if given else ["side"])


# ------------------------------------------------------------------------------------------------
# The variant of Stable Diffusion


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    pytest.importorskip("greenlet", reason="an extra: ./setup.sh lightning")
    folder = tmp_path_factory.mktemp("shards")
    synthetic.write(folder, 1, 16, 0, 8, 8, 64)
    return replace(PRESETS["tiny"], latent_size=8, workers=0, data=str(folder))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)


def steps_of(state, step, count):
    """Losses, gradient norms and a hash of the whole state after `count` steps from the seeded start."""
    state.reset()
    for index in range(count):
        step(index)
    hasher = StateHasher(state.named_state())
    hasher.update()
    return state.read_losses(count), state.read_grad_norms(count), hasher.digests()


def with_overflows(state, steps):
    """Moments of infinity in the batches of these steps, counted from each reset."""
    original, reset, count = state.batches.next, state.batches.reset, [0]

    def next_batch():
        batch = dict(original())
        if count[0] in steps:
            batch["moments"] = torch.full_like(batch["moments"], float("inf"))
        count[0] += 1
        return batch

    def start_again():
        count[0] = 0
        reset()

    state.batches.next, state.batches.reset = next_batch, start_again


def test_variant_equals_eager_bit_for_bit_with_draws_and_overflows(config, deterministic, monkeypatch):
    eager = State(config, torch.device("cpu"))
    with_overflows(eager, (2, 3))
    expected = steps_of(eager, lambda index: eager_step(eager, index), 5)
    eager.close()
    handler = signal.getsignal(signal.SIGTERM)
    state = State(config, torch.device("cpu"))
    variant = other_variants.graph_step_lightning(state)
    assert signal.getsignal(signal.SIGTERM) is handler
    # After a canary: it leaves no trace in the steps that follow.
    assert compare_with_eager(state, variant, eager_step, torch.device("cpu")) == []
    with_overflows(state, (2, 3))
    before = variant.capture.num_replays
    # As text: a loss that is not a number is then equal to itself.
    assert repr(steps_of(state, variant.step, 5)) == repr(expected)
    assert variant.capture.num_replays - before == sum(map(variant.replays_of, range(5))) == 5
    assert variant.capture.warmup_s > 0 and variant.capture.capture_s > 0 and variant.capture.pools
    # Three steps of warm-up, the capture's, two of the canary, five: it is Lightning's loop that steps.
    assert variant.trainer.global_step == 3 + 1 + 2 + 5
    # As if the batch were not copied into the static inputs.
    monkeypatch.setattr(variant.callback, "_load", lambda batch: None)
    with pytest.raises(CaptureError, match="canary: step 0 replayed"):
        compare_with_eager(state, variant, eager_step, torch.device("cpu"))
    for _ in range(2):
        variant.close()
        assert variant.loop.dead and variant.callback.pool is None and variant.callback.num_replays == 9
    state.close()


@pytest.mark.slow
def test_variant_passes_an_error_of_a_step_on_and_closes_after_it(config):
    state = State(config, torch.device("cpu"))
    variant = other_variants.graph_step_lightning(state)

    def storm(index):
        raise FloatingPointError("overflow storm")

    state.end_step = storm
    state.inputs.reset()
    with pytest.raises(FloatingPointError, match="overflow storm"):
        variant.step(0)
    with pytest.raises(RuntimeError, match="Trainer.fit has ended"):
        variant.step(1)
    variant.close()
    state.close()


def test_variant_is_unsupported_without_lightning_and_over_several_ranks(config, monkeypatch):
    state = State(config, torch.device("cpu"))
    for missing in ("lightning.pytorch", "greenlet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            patch.delitem(sys.modules, "stable_diffusion.lightning_variant", raising=False)
            with pytest.raises(Unsupported, match=r"graph_step_lightning needs lightning .*: ./setup.sh lightning"):
                other_variants.graph_step_lightning(state)
    state.buckets = object()
    with pytest.raises(Unsupported, match="one GPU"):
        other_variants.graph_step_lightning(state)
    state.close()
