"""CUDA graphs under Transformers' Trainer: each update is replayed from one graph.

    from graph_worth.transformers import GraphedTrainer
    GraphedTrainer(model, args, train_dataset=data).train()

In the graph: forward and backward passes of all microbatches of an update, clipping, the optimizer's step. Eager: the
loop, its loader, logs, evaluation, checkpoints, and the scheduler, which fills the learning rate's tensor. The graph
keeps the gradients: .grad is None between updates. The first updates of a shape are eager, as `graphed` says, and so
compared; an update of fewer microbatches, at an epoch's end, is a shape. Between two logs the loop reads no value of
the GPU. Losses that are not finite are filtered there, where logging_nan_inf_filter asks for it.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback

from graph_worth.your_step.graphed import graphed
from graph_worth.your_step.libraries import CHECKPOINT, PRESERVES

# They act between microbatches, or before the optimizer's step: in the middle of a replay.
_INSIDE = "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step"
_READING = {"ReduceLROnPlateau", "GreedyLR", "reduce_lr_on_plateau", "greedy"}


class GraphedTrainer(Trainer):
    """Transformers' Trainer whose updates are CUDA graphs; it makes the optimizer capturable, with lr in a tensor.

    Args:
        args: Trainer's arguments, as kwargs.
        graph_options: arguments of `graphed`, such as {"shapes": 16, "on_refusal": "eager"}.

    Raises:
        ValueError: by train(), a list of what cannot be captured.
        CaptureError: an update shows that it cannot be captured.
    """

    optimizer: Any
    lr_scheduler: Any

    def __init__(self, *args, graph_options: dict | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.graph_options = graph_options or {}
        self.graphed: graphed | None = None
        self._past_replays, self._norm = 0, None
        self._update: tuple = ()
        self._losses: list[torch.Tensor] = []

    @property
    def num_replays(self) -> int:
        """Replayed updates over all calls of train()."""
        return self._past_replays + (self.graphed.replays if self.graphed else 0)

    def _inner_training_loop(self, *args, **kwargs):
        self._require()
        self._filters = self.args.logging_nan_inf_filter
        try:
            return super()._inner_training_loop(*args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = self._filters
            if self.graphed is not None:
                self.graphed.release()
            self._past_replays, self.graphed, self._update, self._losses = self.num_replays, None, (), []

    def get_train_dataloader(self):
        """Return Trainer's loader; it copies batches to the GPU without waiting for the replays before them."""
        loader = super().get_train_dataloader()
        loader._non_blocking = True
        return loader

    def get_batch_samples(self, *args, **kwargs):
        """Return all microbatches of an update and their number of items, and keep them for the graph."""
        self._update, self._losses = super().get_batch_samples(*args, **kwargs), []
        return self._update

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Train on all microbatches of the update when the first one comes; return the loss of this one."""
        if not self._losses:
            if self.graphed is None:
                # A bound method's object would be looked at, and the loop counts in it.
                step, owned = partial(self._train), [self.model, self.optimizer.optimizer]
                self.graphed = graphed(step, owned, **self.graph_options)
            if not model.training:
                model.train()
            result = self.graphed(dict(zip(("microbatches", "num_items"), self._update, strict=True)))
            self._losses, self._norm = list(result["losses"]), result["norm"]
        loss = self._losses.pop(0)
        if self._filters:
            # Trainer's filter without its read, until _get_grad_norm.
            self.args.logging_nan_inf_filter = False
            steps = 1 + self.state.global_step - self._globalstep_last_logged
            loss = torch.where(torch.isfinite(loss), loss, self._tr_loss / steps)
        return loss

    def _train(self, update):
        """Make one update, eagerly or in a capture. The loop has set the gradients to None."""
        model, losses, norm = self.model_wrapped, [], None
        for inputs in update["microbatches"]:
            losses.append(super().training_step(model, inputs, update["num_items"]))
        if self.args.max_grad_norm > 0:
            norm = super()._clip_grad_norm(model)
        norm = super()._get_grad_norm(model, norm)
        self.optimizer.optimizer.step()
        stacked = torch.stack(losses)
        return {"loss": stacked.sum(), "losses": stacked, "norm": norm}

    def _clip_grad_norm(self, model):
        return self._norm

    def _get_grad_norm(self, model, grad_norm=None):
        self.args.logging_nan_inf_filter = self._filters
        return self._norm

    def _get_learning_rate(self):
        return self.lr_scheduler.get_last_lr()[0]

    def log(self, logs, *args, **kwargs):
        """Read what the loop left on the GPU, and log it."""
        read = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in logs.items()}
        super().log(read, *args, **kwargs)

    def create_optimizer(self, *args, **kwargs):
        """Return Trainer's optimizer, capturable and with learning rates in tensors."""
        super().create_optimizer(*args, **kwargs)
        self._make_capturable()
        return self.optimizer

    def create_scheduler(self, *args, **kwargs):
        """Return Trainer's scheduler, of an accelerated optimizer whose step does nothing: the graph makes it."""
        self.optimizer.step = MethodType(lambda optimizer, closure=None: None, self.optimizer)
        return super().create_scheduler(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        self._make_capturable()

    def _make_capturable(self):
        for group in self.optimizer.param_groups:
            if group.get("lr") is not None:
                group["lr"] = torch.as_tensor(group["lr"], device=self.args.device)
            group.update({"capturable": True} if "capturable" in group else {})
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(self.args.device)

    def _require(self):
        args, version = self.args, tuple(map(int, transformers.__version__.split(".")[:2]))
        num_gpus = max(args.n_gpu, args.world_size)
        is_lomo, is_engine = "lomo" in str(args.optim).lower(), self.is_deepspeed_enabled or self.is_fsdp_enabled
        checkpointing: Any = args.gradient_checkpointing_kwargs or {}
        saves_random = args.gradient_checkpointing and checkpointing.get(*PRESERVES)
        groups = [] if is_lomo or is_engine else self.create_optimizer().param_groups
        name = type(getattr(self.optimizer, "optimizer", self.optimizer)).__name__
        schedules = {type(self.lr_scheduler).__name__, getattr(args.lr_scheduler_type, "value", "")}
        problems = [
            (not (5, 17) <= version <= (5, 24), f"transformers {transformers.__version__}: it knows 5.17 to 5.24"),
            (is_engine, "deepspeed or fsdp, which move parameters: train on one GPU"),
            (args.fp16, "fp16, whose loss scale is read: bf16=True"),
            (
                num_gpus > 1 or self.accelerator.distributed_type != "NO",
                f"{num_gpus} GPUs or torchrun: start it by python with CUDA_VISIBLE_DEVICES=0; graphed() takes DDP",
            ),
            (self.is_model_parallel, "a model over several devices: use one"),
            (_READING & schedules, "a scheduler that reads losses: another lr_scheduler_type"),
            (is_lomo, "LOMO, which steps in the backward pass: optim='adamw_torch_fused'"),
            (
                not all(group.get("capturable") or group.get("fused") for group in groups),
                f"{name}, which is neither capturable nor fused: optim='adamw_torch_fused'",
            ),
            (saves_random, f"gradient_checkpointing that saves random states: {CHECKPOINT}"),
            (args.torch_empty_cache_steps, "torch_empty_cache_steps: a graph keeps its memory, leave it out"),
        ]
        for callback in self.callback_handler.callbacks:
            hooks = [hook for hook in _INSIDE if getattr(type(callback), hook) is not getattr(TrainerCallback, hook)]
            problems += [(True, f"{type(callback).__name__}.{hook} in the middle of an update") for hook in hooks]
        texts = [text for is_there, text in problems if is_there]
        if texts:
            raise ValueError("\n  - ".join(["GraphedTrainer cannot capture this training:", *texts]))
