"""What Llama 2 LoRA's training reads and writes: built once, reset in place, the same for every variant."""

from functools import partial
from pathlib import Path

import torch

from common import collectives
from common.capture import StaticInputs
from common.llama_checkpoint import open_checkpoint
from common.marks import section
from common.memory_plan import GIB
from common.optimizers import MasterAdam
from common.parallel import make_groups
from common.variant import Unsupported
from llama2_lora import adapters
from llama2_lora.attention import attention_for
from llama2_lora.config import Config
from llama2_lora.context import AcrossRanks, own_part
from llama2_lora.data import open_windows
from llama2_lora.lean import LeanStack
from llama2_lora.modules import ModuleStack, operators_for, plain_operators, require_kind
from llama2_lora.plan import plan_for
from llama2_lora.scaling import Formats
from llama2_lora.trainable import Adapters
from llama2_lora.weights import FrozenWeights

SEED = 1234
# MLPerf Training v5.0, llama2_70b_lora: NVIDIA's configs.
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4, "clip": 0.3}
HELD_OUT_WINDOWS = 4
CACHE = Path(__file__).resolve().parent.parent / "runs" / ".cache"
# Ranks count their steps, which are in the masks of dropout, from numbers this far apart.
RANK_STEPS = 1_000_003


class State:
    """The stack of layers, adapters, optimizer, rotating windows, and the losses seen.

    config must be resolved (llama2_lora/resolve.py). kind: "lean", "te" or "torch", of the layers.
    """

    num_losses = 4096

    def __init__(self, config: Config, device: torch.device, kind: str, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.kind, self.rank, self.world_size = config, device, kind, rank, world_size
        self.ranks = config.ranks(world_size)
        self.place = self.ranks.place(rank)
        # What cannot run, or does not fit, is said before weights are read or made.
        require_kind(kind, config, device)
        budget = int(config.memory_gib * GIB) if config.memory_gib else 2**62
        self.plan = plan_for(kind, config, budget)
        checkpoint = open_checkpoint(config.checkpoint, config) if config.checkpoint else None
        self.start, self.first_step = _start_of(config)
        # Names of the groups that share a window, and that have a window each.
        self.context, self.data = collectives.ALONE, ""
        if config.cp > 1:
            groups = make_groups(self.ranks, device.type)
            self.context, self.data = groups.context, groups.data
        self.windows = open_windows(config, CACHE, self.place.data_rank, self.ranks.dp, HELD_OUT_WINDOWS)
        self.batches = [self._host_batch(self.windows.batch(index)) for index in range(config.batches)]
        self.inputs = StaticInputs({name: tensor.to(device, copy=True) for name, tensor in self.batches[0].items()})
        self.weights_of_tokens = torch.zeros(config.tokens, device=device)
        formats = Formats.of(config)
        self.adapters = Adapters(config, formats.main, device)
        weights = FrozenWeights(config, formats, device, checkpoint)
        if device.type == "cuda":
            # What quantising the weights has used.
            torch.cuda.empty_cache()
        inputs = {**self.inputs.buffers, "weights": self.weights_of_tokens}
        if kind == "lean":
            attention = attention_for(config, device)
            if config.cp > 1:
                attention = partial(AcrossRanks, attention, group=self.context, rank=self.place.context_rank)
            parts = operators_for(device), attention
            self.stack = LeanStack(config, formats, weights, self.adapters, inputs, self.plan, *parts)
        else:
            operators = plain_operators(config, formats, device) if kind == "torch" else None
            across = self.context, self.place.context_rank
            again = self.plan.items()["rest"]["recomputed"] if self.plan else 0
            self.stack = ModuleStack(kind, config, weights, self.adapters, inputs, operators, *across, again)
        self.adam = MasterAdam([self.adapters.values], [self.adapters.main_grad], lr=config.learning_rate, **ADAM)
        self.losses = torch.zeros(self.num_losses, device=device)
        self.grad_norms = torch.zeros(self.num_losses, device=device)
        self.reset()

    def reset(self):
        torch.manual_seed(SEED + self.rank)
        self.adapters.initialise(SEED)
        self.adapters.grads.zero_()
        self.adapters.main_grad.zero_()
        self.adam.reset()
        if self.start:
            for name, view in self._trained():
                if name in self.start:
                    view.copy_(self.start[name])
            self.adam.step_count.fill_(self.first_step)
            self.adapters.values.copy_(self.adam.masters[0])
        self.stack.reset((self.rank * RANK_STEPS + self.first_step) % 2**30)
        self.losses.zero_()
        self.grad_norms.zero_()

    def load_window(self, index: int):
        """Copy the window of step `index` into the static buffers. The loss is the mean over the window's tokens that
        are not masked out."""
        with section("data"):
            self._load(self.batches[(index + self.first_step) % len(self.batches)])

    def _load(self, batch):
        self.inputs.load(batch)
        mask = self.inputs["loss_mask"]
        count = mask.sum()
        collectives.all_reduce_sum_(count, self.context)
        torch.div(mask, count.clamp_(min=1.0), out=self.weights_of_tokens)

    def _host_batch(self, window):
        """This rank's part of a window as the step loads it: name -> host tensor, pinned for an asynchronous copy."""
        batch = own_part(window, self.config, self.place.context_rank)
        return {name: t.pin_memory() for name, t in batch.items()} if self.device.type == "cuda" else batch

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """The gradients' sum over the ranks that share a window, and their mean over windows."""
        if self.config.cp > 1:
            collectives.all_reduce_sum_(self.adapters.main_grad, self.context)
        if self.ranks.dp > 1:
            collectives.all_reduce_mean_(self.adapters.main_grad, self.data)

    def note(self, index: int):
        """Loss and gradient norm of step `index`, on the device. A run beyond num_losses overwrites the last place."""
        place = min(index, self.num_losses - 1)
        self.losses[place].copy_(self.stack.loss)
        # Each rank has the part of its tokens.
        collectives.all_reduce_sum_(self.losses[place], self.context)
        self.grad_norms[place].copy_(self.adam.grad_norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of a token over HELD_OUT_WINDOWS windows that no rank trains on, without dropout. Eager.

        Raises Unsupported where the text is too short to hold any out.
        """
        if not self.windows.num_held_out:
            raise Unsupported(f"{self.windows.name} is too short to hold windows out")
        loss = 0.0
        for index in range(self.windows.num_held_out):
            self._load(self._host_batch(self.windows.held_out(index)))
            self.stack.evaluate()
            part = self.stack.loss.clone()
            collectives.all_reduce_sum_(part, self.context)
            loss += float(part)
        return loss / self.windows.num_held_out

    def finish(self, variant, record):
        """After the window: the plan for the record, and the adapter that the window's steps have trained."""
        if self.config.save_adapter and self.rank == 0:
            moments, step = dict(self._trained()), int(self.adam.step_count)
            masters = {name.removeprefix("masters."): moments.pop(name) for name in list(moments) if "masters" in name}
            adapters.save(self.config.save_adapter, masters, self.config, moments, step)
            record["extra"]["notes"].append(f"adapter after {step} steps saved in {self.config.save_adapter}")
        if self.start and not self.first_step:
            record["extra"]["notes"].append(f"{self.config.adapter} has no training state: AdamW began anew")
        if self.plan and self.device.type == "cuda":
            record["extra"]["memory_plan"] = self.plan.as_dict()
            record["extra"]["report"] = {"planned GiB": round(self.plan.bytes / GIB, 2)}

    def named_state(self):
        """Masters and moments by adapter, the count of steps, and the scales."""
        yield from self._trained()
        yield "optimizer.step", self.adam.step_count
        yield from self.stack.named_state()

    def _trained(self):
        """(masters.<adapter> or exp_avg.<adapter> or exp_avg_sq.<adapter>, FP32 view) of all adapters."""
        for kind in ("masters", "exp_avg", "exp_avg_sq"):
            for name, view in self.adapters.named(getattr(self.adam, kind)[0]):
                yield f"{kind}.{name}", view

    def read_losses(self, count: int) -> list[float]:
        return self.losses[: min(count, self.num_losses)].tolist()

    def read_grad_norms(self, count: int) -> list[float]:
        return self.grad_norms[: min(count, self.num_losses)].tolist()

    def batch_class(self, index: int) -> int:
        """All windows have one shape."""
        return 0


def _start_of(config):
    """({name as in State._trained: FP32 on the host}, steps done) of --adapter; ({}, 0) without.

    Where others have saved the adapter there is no training state, and AdamW starts with moments of zero.
    """
    if not config.adapter:
        return {}, 0
    masters = adapters.load(config.adapter, config)
    moments, step = adapters.load_state(config.adapter)
    return {**{f"masters.{name}": master for name, master in masters.items()}, **moments}, step


def hyperparameters(config: Config, data_ranks: int) -> dict:
    """What the MLPerf log says of this training."""
    return {
        "seed": SEED,
        "global_batch_size": data_ranks,
        "gradient_accumulation_steps": 1,
        "max_sequence_length": config.sequence,
        "train_samples": data_ranks * config.batches,
        "eval_samples": HELD_OUT_WINDOWS,
        "opt_name": "adamw",
        "opt_base_learning_rate": config.learning_rate,
        "opt_learning_rate_decay_schedule": "constant",
        "opt_adamw_beta_1": ADAM["betas"][0],
        "opt_adamw_beta_2": ADAM["betas"][1],
        "opt_adamw_epsilon": ADAM["eps"],
        "opt_adamw_weight_decay": ADAM["weight_decay"],
        "opt_gradient_clip_norm": ADAM["clip"],
        "lora_rank": config.rank,
        "lora_alpha": config.alpha,
    }
