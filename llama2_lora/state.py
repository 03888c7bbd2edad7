"""Everything that a step of Llama 2 LoRA reads and writes: built once, reset in place, the same for every variant."""

from dataclasses import replace
from functools import partial

import torch

from common.fit import fewer_layers
from common.history import History
from common.memory_plan import GIB, budget_bytes
from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.parallel.buckets import reduce_norm_
from common.parallel.groups import make_groups
from common.precision import nvfp4
from graph_worth import StaticInputs, Unsupported, section
from graph_worth.machine import host_state
from graph_worth.parallel import collectives
from graph_worth.parallel.host_messages import of_all_ranks
from llama2_lora import plan
from llama2_lora.config import Config
from llama2_lora.data.windows import open_windows
from llama2_lora.kernels.attention import attention_for
from llama2_lora.kernels.scaling import Formats
from llama2_lora.kernels.torch_operators import Operators, TorchOperators
from llama2_lora.layers.context import AcrossRanks, own_part
from llama2_lora.layers.handwritten import HandwrittenStack
from llama2_lora.layers.tensor import TensorRanks
from llama2_lora.weights import adapters
from llama2_lora.weights.adapters import Adapters
from llama2_lora.weights.frozen import FrozenWeights

SEED = 1234
# MLPerf Training v5.0, llama2_70b_lora: NVIDIA's configs.
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4, "clip": 0.3}
# Each rank counts its steps, which select the masks of dropout, from a number this far from the next rank's.
RANK_STEPS = 1_000_003


class State(History):
    """The stack of layers, adapters, optimizer, rotating windows, and the losses so far.

    config must come from `resolve`. kind: "handwritten", "te" or "torch", of the layers.
    """

    def __init__(self, config: Config, device: torch.device, kind: str, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.kind, self.rank, self.world_size = config, device, kind, rank, world_size
        self.ranks = config.ranks(world_size)
        self.place = self.ranks.place(rank)
        # Everything that can be refused comes before weights are read or made.
        require_kind(kind, config, device)
        self.plan = plan.make_plan(config) if kind == "handwritten" else None
        shard = self.place.tensor_rank, config.tp
        checkpoint = _opened(config, shard) if config.checkpoint else None
        self.notes = checkpoint.notes if checkpoint else []
        # Names of the groups of ranks that share a window, and of those that each have their own.
        groups = make_groups(self.ranks, device.type)
        self.context, self.data, self.tensor = groups.context, groups.data, TensorRanks(groups.tensor)
        self.windows = open_windows(config, self.place.data_rank, self.ranks.dp)
        self.batches = [self._host_batch(self.windows.batch(index)) for index in range(config.batches)]
        self.inputs = StaticInputs({name: tensor.to(device, copy=True) for name, tensor in self.batches[0].items()})
        formats = Formats.of(config)
        self.adapters = Adapters(config, formats.main, device, self.tensor.rank)
        weights = FrozenWeights(config, formats, device, checkpoint, self.tensor.rank, self.tensor.group)
        if device.type == "cuda":
            # Quantising the weights leaves memory in the cache.
            torch.cuda.empty_cache()
        self.stack = self._make_stack(formats, weights)
        numbers = Hyperparameters(lr=config.learning_rate, **ADAM)
        reduce_norm = self._reduce_norm if config.tp > 1 else None
        self.adam = Adam([self.adapters.values], numbers, [self.adapters.main_grad], reduce_norm=reduce_norm)
        super().__init__(device)
        self.reset()

    def _make_stack(self, formats, weights):
        config, inputs = self.config.shard, self.inputs.buffers
        if self.kind != "handwritten":
            from llama2_lora.layers.module_stack import ModuleStack

            return ModuleStack(self.kind, config, weights, self.adapters, inputs)
        attention = attention_for(config, self.device)
        if config.cp > 1:
            attention = partial(AcrossRanks, attention, group=self.context, rank=self.place.context_rank)
        parts = self.plan.layers, operators_for(self.device), attention, self.tensor
        return HandwrittenStack(config, formats, weights, self.adapters, inputs, *parts)

    def reset(self):
        torch.manual_seed(SEED + self.rank)
        self.adapters.initialise(SEED)
        self.adapters.grads.zero_()
        self.adapters.main_grad.zero_()
        self.adam.reset()
        # Tensor ranks have the same tokens, and the same masks for q k v's adapter.
        self.stack.reset(self.rank // self.config.tp * RANK_STEPS % 2**30)
        self.losses.zero_()
        self.grad_norms.zero_()

    def load_window(self, index: int):
        """Copy the window of step `index` into the static buffers."""
        with section("data"):
            self.inputs.load(self.batches[index % len(self.batches)])

    def _host_batch(self, window):
        """This rank's part of a window: name -> host tensor, pinned for an asynchronous copy.

        The loss is the mean over a window's unmasked tokens: `weights` is 1 / their number at each of these, else 0.
        """
        weights = window.loss_mask / window.loss_mask.sum().clamp(min=1.0)
        batch = own_part(window._replace(loss_mask=weights), self.config, self.place.context_rank)
        batch["weights"] = batch.pop("loss_mask")
        return {name: t.pin_memory() for name, t in batch.items()} if self.device.type == "cuda" else batch

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """The gradients' sum over the ranks that share a layer and a window, and their mean over windows."""
        if self.config.tp > 1:
            self.tensor.sum_(self.adapters.replicated(self.adapters.main_grad))
        if self.config.cp > 1:
            collectives.all_reduce_sum_(self.adapters.main_grad, self.context)
        if self.ranks.dp > 1:
            collectives.all_reduce_mean_(self.adapters.main_grad, self.data)

    def _reduce_norm(self, norm):
        """Make the norm that of all tensor ranks' gradients. Replicated ones count once."""
        uncounted = [self.adapters.replicated(self.adapters.main_grad)] if self.tensor.rank else []
        reduce_norm_(norm, self.tensor.group, uncounted)

    def keep_loss(self, index: int):
        """Copy loss and gradient norm of step `index` to their history, before a replay overwrites them."""
        slot = self.slot(index)
        self.losses[slot].copy_(self.stack.loss)
        if self.config.cp > 1:
            # Each rank has the part of its tokens.
            collectives.all_reduce_sum_(self.losses[slot], self.context)
        self.grad_norms[slot].copy_(self.adam.grad_norm)

    def finish(self) -> list[str]:
        """Save the trained adapter. Returns a line that says so."""
        folder, flat = self.config.save_adapter, self.adam.masters[0]
        if not folder:
            return []
        every = flat.new_empty(self.tensor.size * len(flat))
        collectives.all_gather_into_(every, flat, self.tensor.group)
        if self.rank:
            return []
        adapters.save(folder, dict(self.adapters.named_whole(every.chunk(self.tensor.size))), self.config)
        return [f"adapter after {int(self.adam.step_count)} steps saved in {folder}"]

    def named_state(self):
        """Masters and moments by adapter, the count of steps, and the scales."""
        for kind in ("masters", "exp_avg", "exp_avg_sq"):
            for name, view in self.adapters.named(getattr(self.adam, kind)[0]):
                yield f"{kind}.{name}", view
        yield "optimizer.step", self.adam.step_count
        yield from self.stack.named_state()


def resolve(config: Config, preset: str, kind: str, device: torch.device):
    """(config with precision, memory and number of layers as they can run on `device`, notes on what changed).

    ValueError if it cannot run. Nothing has been built then.
    """
    config, notes = _fit(config, preset, kind, device)
    config = replace(config, lr=config.learning_rate)  # a run file says at which rate it trained
    if config.save_adapter:
        adapters.require_place(config.save_adapter)
    return config, notes


def _fit(config, preset, kind, device):
    notes = []
    if device.type == "cpu":
        if config.layer == "te":
            raise ValueError("--layer te needs a GPU; take --layer handwritten or torch")
        plan.require(config, host_state.available_host_bytes())
        if config.precision == "fp8":
            notes.append("FP8 emulated: operands rounded to FP8, GEMMs in FP32")
        return config, notes
    if config.precision == "fp8" and torch.cuda.get_device_capability(device) < (8, 9):
        config = replace(config, precision="bf16")
        notes.append("bf16: no FP8 on this GPU, it needs compute capability 8.9")
    # The least of all ranks, so that all have as many layers, which keep the same.
    free, total = (min(of_all_ranks(size)) for size in torch.cuda.mem_get_info(device))
    budget = budget_bytes(free, plan.CONTEXT_BYTES)
    fitted = plan.fit(config, budget)
    if kind == "handwritten":
        fitted = replace(fitted, keep=plan.choose(fitted, preset, total, budget))
    if fitted.layers < config.layers:
        notes.append(fewer_layers(fitted, config, budget / GIB))
    return fitted, notes


def require_kind(kind: str, config: Config, device: torch.device) -> None:
    """Unsupported if this device does not compute the config with this kind of layer."""
    if kind != "handwritten" and config.cp * config.tp > 1:
        flags = f"--cp {config.cp}" if config.cp > 1 else f"--tp {config.tp}"
        raise Unsupported(f"{flags} needs handwritten layers, which alone share windows and matrices among ranks here")
    if config.precision == "nvfp4":
        nvfp4.require(device, "" if kind == "te" else "handwritten layers have no NVFP4 GEMM, take --layer te")
    if kind != "te":
        return
    if config.precision == "nvfp4_emulated":
        raise Unsupported("--precision nvfp4_emulated needs --layer handwritten")
    if device.type != "cuda":
        raise Unsupported("Transformer Engine's layers need a GPU")
    from common.precision.transformer_engine import require_fp8, usable_transformer_engine

    usable_transformer_engine()
    if config.documents != "whole":
        raise Unsupported("Transformer Engine's layers take --documents whole here")
    if config.precision == "fp8":
        require_fp8()


def _opened(config, shard):
    from common.data.checkpoint import open_checkpoint

    return open_checkpoint(config.checkpoint, config, shard=shard)


def operators_for(device) -> type[Operators]:
    """The class for a device: Triton's on a GPU."""
    if device.type != "cuda":
        return TorchOperators
    from llama2_lora.kernels.triton_operators import TritonOperators

    return TritonOperators
