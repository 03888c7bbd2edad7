"""The full iteration captured under Lightning's own loop: equal to eager, refused by name."""

import functools
import logging
import os
import warnings
from unittest import mock

import pytest
import torch

pytest.importorskip("lightning", reason="an extra: ./setup.sh lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from graph_worth.capture.pool import CaptureError
from graph_worth.lightning import CUDAGraphCallback
from tests.helpers.loops import seen_loops
from tests.helpers.reads import Reads

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Lightning's hints at what else one could use, and at its own future.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning"),
]

WARM, BATCHES = 3, 12
REPLACED = {"configure_optimizers", "optimizer_step", "training_step", "log"}


class Toy(LightningModule):
    """Dropout, a tensor learning rate with a schedule, a dictionary as batch."""

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
        self.metric = MeanMetric()
        self.seen = []

    def training_step(self, batch, batch_idx):
        y = self.layers(batch["x"])
        loss = F.mse_loss(y, batch["y"])
        return {"loss": loss, "y": y}

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self.layers(batch["x"]), batch["y"]))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs:
            self.seen.append((outputs["loss"], outputs.get("y", outputs["loss"]), self.global_step))

    def configure_optimizers(self):
        lr = self.optimizer["lr"]
        lr = lr.to(self.device, copy=True) if isinstance(lr, torch.Tensor) else lr
        optimizer = torch.optim.AdamW(self.parameters(), **self.optimizer | {"lr": lr})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def batches(count=BATCHES, size=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 6, generator=generator)
        yield {"x": x, "y": x.sum(1, keepdim=True).sin()}


def load(data):
    # With a generator of its own: the start of an epoch then draws nothing from the one that dropout uses.
    return DataLoader(data, batch_size=None, generator=torch.Generator())


def callback_of(**options):
    return CUDAGraphCallback(**{"warm_up": WARM, "cpu": "host_graph"} | options)


def fit(callback=None, module=None, loader=None, val=None, callbacks=(), **settings):
    """A Trainer after `fit` on the CPU with everything else off, and its module; callback None: eager."""
    torch.manual_seed(0)
    module = module if isinstance(module, LightningModule) else (module or Toy)()
    settings = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False} | settings
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [*callbacks, *([callback] if callback else [])]
    trainer = Trainer(devices=1, callbacks=callbacks, **settings)
    with warnings.catch_warnings():
        for kind in (UserWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=kind, module="lightning")
        trainer.fit(module, load(loader or list(batches())), val and load(val))
    return trainer, module


def difference(ours, theirs):
    """Name of the first tensor of weights, buffers, optimizer or outputs that differs between two fits, or None."""
    (trainer, module), (other_trainer, other) = ours, theirs
    state, others = module.state_dict(), other.state_dict()
    for name in state:
        if not torch.equal(state[name], others[name]):
            return name
    moments, other_moments = (t.optimizers[0].state_dict()["state"] for t in (trainer, other_trainer))
    for index, own in moments.items():
        for name, tensor in own.items():
            if not torch.equal(tensor, other_moments[index][name]):
                return f"{index}.{name}"
    if trainer.optimizers[0].param_groups[0]["lr"] != other_trainer.optimizers[0].param_groups[0]["lr"]:
        return "lr"
    assert len(module.seen) == len(other.seen) > 0
    for step, (a, b) in enumerate(zip(module.seen, other.seen, strict=True)):
        if not (torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and a[2] == b[2]):
            return f"outputs of step {step}"
    return None


def test_watch_tells_the_loop_of_lightning():
    with seen_loops() as loops:
        fit(max_epochs=1)
    assert loops == {"lightning"}


# ------------------------------------------------------------------------------------------------
# Equal to eager


def test_a_graphed_fit_equals_an_eager_one_bit_for_bit():
    callback = callback_of()
    graphed, eager = fit(callback), fit()
    assert difference(graphed, eager) is None
    steps = 2 * BATCHES
    assert graphed[0].global_step == steps
    assert callback.num_replays == steps - WARM
    losses = [float(loss) for loss, _, _ in graphed[1].seen]
    assert len(set(losses)) == steps and sum(losses[-5:]) < sum(losses[:5])
    # A second fit captures anew; the module is left as it was.
    assert not REPLACED & vars(graphed[1]).keys() and callback.pool is None
    fit(callback, graphed[1], max_epochs=1)
    assert callback.num_replays == steps + BATCHES - 2 * WARM


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_clipping_and_precisions(settings):
    callback = callback_of()
    pair = [fit(c, max_epochs=1, **settings) for c in (callback, None)]
    assert difference(*pair) is None
    assert callback.num_replays == BATCHES - WARM
    plain = fit(max_epochs=1)
    assert [float(step[0]) for step in plain[1].seen] != [float(step[0]) for step in pair[0][1].seen]


# ------------------------------------------------------------------------------------------------
# Lightning's own work


def test_validation_and_checkpoints_in_between_see_the_live_weights(tmp_path):
    values, files, fits = [], [], []
    graphed = callback_of()
    for name, callback in (("graph", graphed), ("eager", None)):

        class Watch(Callback):
            def on_validation_end(self, trainer, pl_module, own=name):
                values.append((own, float(trainer.callback_metrics["val"])))

        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        settings = {"val": list(batches(2)), "val_check_interval": 5, "check_val_every_n_epoch": None}
        fits.append(fit(callback, callbacks=[saver, Watch()], enable_checkpointing=True, **settings))
        files.append(sorted((tmp_path / name).glob("*.ckpt")))
    assert difference(*fits) is None
    ours, eager = ([value for own, value in values if own == name] for name in ("graph", "eager"))
    assert ours == eager and len(set(ours)) == len(ours) >= 4
    assert [path.name for path in files[0]] == [path.name for path in files[1]] and len(files[0]) == 4
    for paths in zip(*files, strict=True):
        a, b = (torch.load(path, weights_only=False) for path in paths)
        assert a["global_step"] == b["global_step"]
        assert all(torch.equal(a["state_dict"][key], b["state_dict"][key]) for key in b["state_dict"])
        assert a["lr_schedulers"][0]["last_epoch"] == b["lr_schedulers"][0]["last_epoch"]
    assert graphed.num_replays == 2 * BATCHES - WARM


# ------------------------------------------------------------------------------------------------
# Batches


def test_a_last_batch_of_another_size_is_a_shape():
    data = [*batches(BATCHES - 1), *batches(1, size=3)]
    callback = callback_of()
    assert difference(fit(callback, loader=data), fit(loader=data)) is None
    assert callback.num_replays == 2 * (BATCHES - 1) - WARM
    with pytest.raises(CaptureError, match=r"\[3, 6\].* has shape 2.*drop_last=True"):
        fit(callback_of(shapes=1), loader=data)


class Pairs(Toy):
    """Tuples as batches, with a name in them."""

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        return F.mse_loss(self.layers(x), y)


def test_batches_are_any_nests():
    data = [(batch["x"], batch["y"], "train") for batch in batches()]
    callback = callback_of()
    assert difference(fit(callback, Pairs, data), fit(None, Pairs, data)) is None
    assert callback.num_replays == 2 * BATCHES - WARM


# ------------------------------------------------------------------------------------------------
# Refusals


class Manual(Toy):
    automatic_optimization = False


class OwnStep(Toy):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Checkpointed(Toy):
    """As Transformers' models after gradient_checkpointing_enable()."""

    gradient_checkpointing = True

    def __init__(self):
        super().__init__()
        self._gradient_checkpointing_func = functools.partial(print, preserve_rng_state=True)


@pytest.mark.parametrize(
    "module, settings, words",
    [
        (Checkpointed, {}, "gradient checkpointing that saves random states: .*'preserve_rng_state': False"),
        (Toy, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2.*inside training_step"),
        (Toy, {"callbacks": [GradientAccumulationScheduler({1: 2})]}, "accumulate_grad_batches changes by a callback"),
        (Manual, {}, "automatic_optimization = True"),
        (OwnStep, {}, "OwnStep.optimizer_step is overridden"),
        (lambda: Toy(lr=1e-2), {}, r"learning rate of AdamW is 0.01.*lr=torch.tensor\(..., device=self.device\)"),
        (lambda: Toy(capturable=False), {}, "AdamW is not capturable.*capturable=True"),
    ],
)
def test_refused_by_name_before_the_first_step(module, settings, words):
    module = module()
    with pytest.raises(ValueError, match=words):
        fit(callback_of(), module, **settings)
    assert not module.seen and "optimizer_step" not in vars(module)


def test_all_of_them_are_one_list():
    class Bad(OwnStep):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=10)]

    module = Bad()
    with pytest.raises(ValueError) as refusal:
        fit(callback_of(), module, accumulate_grad_batches=4)
    lines = str(refusal.value).splitlines()
    words = "cannot capture", "accumulate_grad", "is overridden", "learning rate", "not capturable", "OneCycleLR"
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))
    assert not module.seen and not REPLACED & vars(module).keys()


def test_other_precisions_and_strategies_are_refused():
    from lightning.pytorch.plugins.precision import MixedPrecision

    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="precision '16-mixed'.*host.*'bf16-mixed'"):
        fit(callback_of(), plugins=[scaled])
    refused = pytest.raises(ValueError, match=r"DDPStrategy on cpu: use Trainer\(devices=1\)")
    # Lightning leaves its ranks in the environment, too.
    with mock.patch.dict(os.environ), refused:
        fit(callback_of(), strategy="ddp")
    torch.distributed.destroy_process_group()  # Lightning's, which it leaves


def _with_step(body):
    """A Toy whose training_step is `body(self, batch, batch_idx, loss)` after the forward pass."""

    class Other(Toy):
        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layers(batch["x"]), batch["y"])
            return body(self, batch, batch_idx, loss)

    return Other()


def test_what_a_step_shows_names_its_cause():
    cases = {
        r"Tensor.item at .*test_lightning.py:\d+ cannot be captured": lambda s, b, i, loss: loss * loss.item(),
        r"reads batch_idx, which a graph freezes.*test_lightning.py:\d+": lambda s, b, i, loss: loss * (1 + i % 2),
        r"self.log\('n', ...\) of a int.*on_train_batch_end": lambda s, b, i, loss: s.log("n", 3) or loss,
        r"self.log\('m', ...\) of a MeanMetric": lambda s, b, i, loss: s.log("m", s.metric) or loss,
        r"self.log\('d', ...\) of a float": lambda s, b, i, loss: s.log("d", {"a": loss, "b": 0.5}) or loss,
        "the step reads self.current_epoch": lambda s, b, i, loss: loss * (1 if s.current_epoch < 1 else 2),
        "the step reads trainer.current_epoch": lambda s, b, i, loss: loss * (1 + (s.trainer.current_epoch > 8)),
        "the step reads trainer.is_last_batch": lambda s, b, i, loss: loss * (1 + s.trainer.is_last_batch),
        "the step reads self.global_step": lambda s, b, i, loss: loss * (1 if s.global_step < 99 else 2),
        "training_step reads batch_idx.*; self.log": lambda s, b, i, loss: s.log("n", 3 + i % 2) or loss,
        "replay 2 of this shape does not train as the eager step": lambda s, b, i, loss: loss * i,
        r"__bool__ at .*aggregation.py:\d+ cannot be captured": lambda s, b, i, loss: s.metric.update(loss) or loss,
        "training_step returned None": lambda s, b, i, loss: None,
    }
    for words, body in cases.items():
        module = _with_step(body)
        with pytest.raises(CaptureError, match=words):
            fit(callback_of(), module)
        assert not REPLACED & vars(module).keys(), "left as it was"


class Change(Callback):
    """Does something to the optimizer after a step in the middle of an epoch."""

    def __init__(self, change):
        self.change = change

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 7:
            self.change(trainer.optimizers[0])


def test_changes_of_the_optimizer_after_the_capture():
    new_group = {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": torch.tensor(0.1)}
    refused = {
        r"lr in param_groups.* is 0.1": lambda optimizer: optimizer.param_groups[0].update(lr=0.1),
        r"betas in param_groups": lambda optimizer: optimizer.param_groups[0].update(betas=(0.8, 0.9)),
        r"param_groups": lambda optimizer: optimizer.add_param_group(new_group),
    }
    for words, change in refused.items():
        with pytest.raises(CaptureError, match=words):
            fit(callback_of(), callbacks=[Change(change)])
    load = Change(lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()))
    assert difference(fit(callback_of(), callbacks=[load]), fit(callbacks=[load])) is None


def test_numbers_of_the_module_may_be_looked_at():
    class Scaled(Toy):
        scale = 1.0

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.layers(batch["x"]), batch["y"]) * self.scale

        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    callback = callback_of(check="always")
    trainer, _ = fit(callback, Scaled)
    assert callback.num_replays == trainer.global_step - WARM, "the loop's own counters are none of them"
    with pytest.raises(CaptureError, match="scale was 1.0 at the capture and is 2.0"):
        fit(callback, Scaled, callbacks=[Change(lambda optimizer: setattr(Scaled, "scale", 2.0))])


def test_a_refused_fit_may_go_on_eagerly():
    def body(module, batch, batch_idx, loss):
        module.log("index", batch_idx)
        return loss * (1 + batch_idx % 2)

    callback = callback_of(on_refusal="eager")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        graphed = fit(callback, lambda: _with_step(body))
    assert difference(graphed, fit(None, lambda: _with_step(body))) is None
    assert callback.num_replays == 0
    assert sum("reads batch_idx" in str(warning.message) for warning in shown) == 1


# ------------------------------------------------------------------------------------------------
# Logs


class Logging(Toy):
    """Logs tensors in the step and in a hook inside of it."""

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layers(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"largest": batch["y"].max(), "parts": loss / 2}, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())


class HookLogs(Callback):
    def on_after_backward(self, trainer, pl_module):
        self.log("bias", pl_module.layers[-1].bias.grad.sum())


class Kept(Logger):
    """A logger that keeps what it is given."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))


def test_logs_of_tensors_are_those_of_an_eager_fit():
    loggers, fits = [Kept(), Kept()], []
    callback = callback_of()
    for graphs, logger in zip((callback, None), loggers, strict=True):
        fits.append(fit(graphs, Logging, logger=logger, log_every_n_steps=3, callbacks=[HookLogs()]))
    assert difference(*fits) is None and callback.num_replays == 2 * BATCHES - WARM
    ours, eager = (logger.rows for logger in loggers)
    assert ours == eager and len(ours) == 2 * (BATCHES // 3 + 1)
    assert {name for _, row in ours for name in row} >= {"loss_step", "loss_epoch", "largest", "parts", "norm", "bias"}
    losses = [row["loss_step"] for _, row in ours if "loss_step" in row]
    assert len(set(losses)) == len(losses)
    assert fits[0][0].callback_metrics == fits[1][0].callback_metrics


def test_nothing_is_read_on_the_host_between_two_logs():
    class Watch(Callback):
        counts = ()

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step >= BATCHES and (trainer.global_step + 1) % 6:
                self.reads = Reads()
                self.reads.__enter__()

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if trainer.global_step > BATCHES and trainer.global_step % 6:
                self.reads.__exit__(None, None, None)
                self.counts += (self.reads.count,)

    watch = Watch()
    fit(callback_of(), Logging(), logger=Kept(), log_every_n_steps=6, callbacks=[watch])
    assert watch.counts == (0,) * 10
    # An eager step that reads is counted.
    fit(None, _with_step(lambda s, b, i, loss: loss * float(loss > 0)), callbacks=[watch])
    assert watch.counts[10:] == (1,) * 10


# ------------------------------------------------------------------------------------------------
# On a GPU


class NoWaits(Callback):
    """What waits for the GPU in a step between two logs is an error."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= BATCHES and (trainer.global_step + 1) % 6:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:graphed. this program works on the default stream")
@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_a_fit_on_a_gpu_equals_an_eager_one_bit_for_bit(settings):
    loggers, fits = [Kept(), Kept()], []
    callback = callback_of()
    settings |= {"accelerator": "gpu", "log_every_n_steps": 6, "callbacks": [HookLogs()]}
    for graphs, logger in zip((callback, None), loggers, strict=True):
        fits.append(fit(graphs, Logging, logger=logger, **settings))
    assert difference(*fits) is None and loggers[0].rows == loggers[1].rows
    assert callback.num_replays == 2 * BATCHES - WARM


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:graphed. this program works on the default stream")
def test_nothing_waits_for_a_gpu_between_two_logs():
    settings = {"accelerator": "gpu", "logger": Kept(), "log_every_n_steps": 6, "callbacks": [NoWaits()]}
    try:
        fit(callback_of(), Logging, **settings)
        with pytest.raises(RuntimeError, match="synchroniz"):
            fit(None, lambda: _with_step(lambda s, b, i, loss: loss * float(loss > 0)), **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
