"""The full iteration captured under Lightning's own loop: equal to eager, refused by name."""

import logging
import warnings

import pytest
import torch

pytest.importorskip("lightning", reason="an extra: ./setup.sh lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader

from graph_worth.capture.lightning import CUDAGraphCallback
from graph_worth.capture.pool import CaptureError

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

# Lightning's hints at what else one could use, and at its own future.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning:lightning"),
]

WARM, BATCHES = 3, 12


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
        optimizer = torch.optim.AdamW(self.parameters(), **self.optimizer)
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


def fit(callback=None, module=None, loader=None, val=None, callbacks=(), **settings):
    """A Trainer after `fit` on the CPU with everything else off, and its module; callback None: eager."""
    torch.manual_seed(0)
    module = module or Toy()
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | settings
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [*callbacks, *([callback] if callback else [])]
    trainer = Trainer(accelerator="cpu", devices=1, callbacks=callbacks, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
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


# ------------------------------------------------------------------------------------------------
# Equal to eager


def test_a_graphed_fit_equals_an_eager_one_bit_for_bit():
    callback = CUDAGraphCallback(warmup_steps=WARM)
    graphed, eager = fit(callback), fit()
    assert difference(graphed, eager) is None
    steps = 2 * BATCHES
    assert graphed[0].global_step == steps
    # On the host the capture itself makes its step.
    assert callback.num_replays == steps - WARM - 1
    losses = [float(loss) for loss, _, _ in graphed[1].seen]
    assert len(set(losses)) == steps and sum(losses[-5:]) < sum(losses[:5])
    # A second fit captures anew; the module is left as it was.
    assert not {"optimizer_step", "training_step", "log"} & vars(graphed[1]).keys() and callback.pool is None
    fit(callback, graphed[1], max_epochs=1)
    assert callback.num_replays == steps + BATCHES - 2 * (WARM + 1)


@pytest.mark.parametrize("settings", [{"gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}], ids=str)
def test_clipping_and_precisions(settings):
    callback = CUDAGraphCallback(warmup_steps=WARM)
    pair = [fit(c, max_epochs=1, **settings) for c in (callback, None)]
    assert difference(*pair) is None
    assert callback.num_replays == BATCHES - WARM - 1
    plain = fit(max_epochs=1)
    assert [float(step[0]) for step in plain[1].seen] != [float(step[0]) for step in pair[0][1].seen]


# ------------------------------------------------------------------------------------------------
# Lightning's own work


def test_validation_and_checkpoints_in_between_see_the_live_weights(tmp_path):
    values, files, fits = [], [], []
    graphed = CUDAGraphCallback(warmup_steps=WARM)
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
    assert graphed.num_replays == 2 * BATCHES - WARM - 1


# ------------------------------------------------------------------------------------------------
# Batches that do not fit


def test_a_batch_that_does_not_fit_is_a_named_error():
    data = [*batches(BATCHES - 1), *batches(1, size=3)]
    for warm in (WARM, 100):
        with pytest.raises(ValueError, match=r"the batch does not fit.*'x'.*\(3, 6\).*\(8, 6\).*drop_last=True"):
            fit(CUDAGraphCallback(warmup_steps=warm), loader=data)
    data = [batch if index != 9 else batch | {"z": batch["x"]} for index, batch in enumerate(batches())]
    with pytest.raises(ValueError, match="'z'"):
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=data)
    with pytest.raises(ValueError, match="a dictionary"):
        fit(CUDAGraphCallback(warmup_steps=WARM), loader=[batch | {"z": "text"} for batch in batches()])


# ------------------------------------------------------------------------------------------------
# Refusals


class Manual(Toy):
    automatic_optimization = False


class OwnStep(Toy):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    "module, settings, words",
    [
        (Toy, {"accumulate_grad_batches": 2}, "accumulate_grad_batches is 2.*inside training_step"),
        (Manual, {}, "automatic_optimization = True"),
        (OwnStep, {}, "OwnStep.optimizer_step is overridden"),
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

    with pytest.raises(ValueError, match="warmup_steps=0.*from 1 up"):
        CUDAGraphCallback(warmup_steps=0)
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="precision '16-mixed'.*host.*'bf16-mixed'"):
        fit(CUDAGraphCallback(), plugins=[scaled])
    with pytest.raises(ValueError, match=r"not with DDPStrategy.*Trainer\(devices=1\)"):
        fit(CUDAGraphCallback(), strategy="ddp")
    torch.distributed.destroy_process_group()  # Lightning's, which it leaves


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
        r"self.log\('n'.*on_train_batch_end": lambda s, b, i, loss: s.log("n", loss) or loss,
        "training_step returned None": lambda s, b, i, loss: None,
    }
    for words, body in cases.items():
        module = _with_step(body)
        with pytest.raises(CaptureError, match=words):
            fit(CUDAGraphCallback(warmup_steps=WARM), module)
        assert not {"optimizer_step", "training_step", "log"} & vars(module).keys(), "left as it was"


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

    for name, value in (("lr", 0.1), ("betas", (0.8, 0.9)), ("load", None), ("group", None)):
        with pytest.raises(ValueError, match="param_groups or state changed after the capture"):
            fit(CUDAGraphCallback(warmup_steps=WARM), callbacks=[change(name, value)])
