"""The state that the training reads and writes: built once, reset in place, the same for every variant."""

import contextlib
from functools import partial

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.data import token_files
from common.fit import fewer_layers, require
from common.history import History
from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.parallel.buckets import GradientBuckets, reduce_norm_
from common.parallel.groups import fill_
from graph_worth import StaticInputs, section
from graph_worth.machine import host_state
from graph_worth.parallel import collectives
from graph_worth.parallel.host_messages import of_all_ranks
from moe.attention import Sequences
from moe.config import CONTEXT_BYTES, GIB, PRESETS, Config, fit, host_bytes, needed_bytes, trained_parameters
from moe.exchange import Exchange
from moe.model import ADAPTERS, YARN, Accumulation, Ends, Inputs, Layer, rope_table

SEED = 1234
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
INIT_STD = 0.02
# Kernels of attention without windows and sinks, the fastest first; each is taken where it can run.
ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Parameters of this rank's experts; all others are equal on all ranks.
OF_EXPERTS = ("w1", "w2", "bias1")
BUCKET_BYTES = 256 * 2**20
# Parameters whose backward writes main_grad itself. Hooks copy the gradients of all others.
IN_PLACE = ("qkv", "proj", "router", "w1", "w2", "head", *ADAPTERS)


class State(History):
    """Layers, ends, optimizer, rotating batches and the losses seen.

    dtype: of parameters, gradients and activations.
    """

    def __init__(self, config: Config, device: torch.device, dtype=torch.bfloat16):
        self.config, self.device, self.dtype = config, device, dtype
        # Opened before any weight is made, so that a wrong path is an error at once.
        self.checkpoint = opened(config) if config.checkpoint else None
        self.notes = self.checkpoint.notes if self.checkpoint else []
        self.source = token_files.open_tokens(config.data)
        self.opened = contextlib.ExitStack()  # until close()
        self.opened.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
        self.is_filled = False  # weights have values: frozen ones keep them
        self.accumulation = Accumulation()
        self.rank = collectives.group_rank()
        self.exchange = Exchange(config, device)
        self._make_modules()
        self.microbatch_losses = torch.zeros(config.microbatches, device=device)
        super().__init__(device)
        self.rope_table = tuple(table.to(device) for table in rope_table(config))
        self.batches = [self._batch(index, self.source.batch(index, *self._sizes)) for index in range(config.batches)]
        bounds = [batch["bounds"] for batch in self.batches] if config.documents else []
        # Of all packed documents.
        self.lengths = [length for ends in bounds for length in ends.diff().flatten().tolist() if length]
        self.inputs = StaticInputs({name: rows.to(device, copy=True) for name, rows in self.batches[0].items()})
        # Without packed documents all microbatches have the same positions.
        self.rope = tuple(table.repeat(config.microbatch, 1) for table in self.rope_table)
        self.adam = self._make_adam() if config.update else None
        self.reset()

    # ------------------------------------------------------------------------------------------------
    # A step: begin_step, for each microbatch embed, the layers on inputs_of, loss; reduce_gradients, update, end_step

    def begin_step(self, index: int) -> None:
        """Copy batch `index` from pinned host memory into the static inputs."""
        with section("data"):
            self.inputs.load(self.batches[index % len(self.batches)])

    @property
    def static(self) -> tuple[torch.Tensor, ...]:
        """Return the buffers that a replay reads and the host overwrites before it."""
        return tuple(self.inputs.buffers.values())

    def inputs_of(self, microbatch: int) -> Inputs:
        """Return what layers read of a microbatch. Packed documents: positions and bounds are read on the device."""
        c = self.config
        if not c.documents:
            return Inputs(self.rope, Sequences(c.sequence))
        places = self.inputs["positions"][microbatch]
        rope = tuple(table.index_select(0, places) for table in self.rope_table)
        return Inputs(rope, Sequences(c.sequence, self.inputs["bounds"][microbatch]))

    def embed(self, microbatch: int):
        return self.ends.embed(self.inputs["tokens"][microbatch])

    def loss(self, hidden, microbatch: int):
        """This microbatch's part of the step's mean loss over all ranks; its value is kept."""
        share = 1.0 / (self.config.microbatches * self.config.ep)
        loss = self.ends.loss(hidden, self.inputs["targets"][microbatch], share)
        self.microbatch_losses[microbatch].copy_(loss.detach())
        return loss

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """After the last microbatch: sum the dense gradients over the ranks. Can be captured."""
        if self.config.ep > 1:
            with section("reduce"):
                collectives.all_reduce_sum_(self.buckets.flats)

    @torch.no_grad()
    def update(self) -> None:
        """Clip, Adam, new weights. Can be captured."""
        if self.adam:
            self.adam.step()

    @torch.no_grad()
    def end_step(self, index: int) -> None:
        """Keep the step's loss and gradient norm, at a place that depends on its number."""
        with section("losses"):
            slot = self.slot(index)
            torch.sum(self.microbatch_losses, 0, out=self.losses[slot])
            if self.config.ep > 1:
                collectives.all_reduce_sum_(self.losses[slot])
            if self.adam:
                self.grad_norms[slot].copy_(self.adam.grad_norm)

    # ------------------------------------------------------------------------------------------------
    # How it is made and reset

    def _make_modules(self):
        c, options = self.config, (self.accumulation, self.exchange, self.dtype, self.device)
        self.layers = torch.nn.ModuleList(Layer(c, number, *options) for number in range(c.layers))
        self.ends = Ends(c, self.accumulation, self.dtype, self.device)
        self.parts = [(name, None, parameter) for name, parameter in self.ends.named_parameters()]
        self.parts += [
            (name, i, parameter) for i, layer in enumerate(self.layers) for name, parameter in layer.named_parameters()
        ]
        self.trained = [part for part in self.parts if part[2].requires_grad]
        for name, _, parameter in self.trained:
            parameter.main_grad = torch.zeros_like(parameter)
            if name not in IN_PLACE:
                parameter.register_post_accumulate_grad_hook(partial(_keep_gradient, self.accumulation))
        self.dense_grads = [parameter.main_grad for name, _, parameter in self.trained if name not in OF_EXPERTS]
        if c.ep > 1:
            self.buckets = GradientBuckets(self.dense_grads, BUCKET_BYTES)

    def _make_adam(self):
        parameters = [parameter for _, _, parameter in self.trained]
        grads = [parameter.main_grad for parameter in parameters]
        numbers = Hyperparameters(lr=self.config.lr, **ADAM)
        reduce_norm = self._reduce_norm if self.config.ep > 1 else None
        options = {"moments": DTYPES[self.config.moments], "reduce_norm": reduce_norm}
        # The masters, which the state fills, are more than bf16 weights hold.
        return Adam(parameters, numbers, grads, writes=[None] * len(parameters), **options)

    def _reduce_norm(self, norm):
        """Dense gradients, which all ranks have after their reduction, count on the first one."""
        reduce_norm_(norm, uncounted=self.dense_grads if self.rank else ())

    def reset(self):
        torch.manual_seed(SEED)
        self._initialise()
        if self.adam:
            self.adam.reset()
        torch._foreach_zero_([parameter.main_grad for _, _, parameter in self.trained])
        torch._foreach_zero_([self.losses, self.grad_norms, self.microbatch_losses])

    @torch.no_grad()
    def _initialise(self):
        """Masters, and weights without one, become seeded values or the checkpoint's, in place. Frozen ones do once."""
        targets = dict(
            zip((id(part[2]) for part in self.trained), self.adam.masters if self.adam else (), strict=False)
        )
        for name, layer, parameter in self.trained if self.is_filled else self.parts:
            target = targets.get(id(parameter), parameter)
            if name in ("qkv_b", "proj_b"):
                target.zero_()
            elif self.checkpoint and name not in ADAPTERS:
                self.checkpoint.read_into(name, layer, target)
            elif "norm" in name:
                target.fill_(1.0)
            elif name.startswith("bias") or name.endswith("_bias"):
                target.zero_()
            else:
                full = name if layer is None else f"layers.{layer}.{name}"
                shape, parts = list(target.shape), [slice(None)] * target.dim()
                if name in OF_EXPERTS:
                    shape[0], parts[0] = self.config.local_experts, self._part(self.config.rank_experts)
                fill_(target, full, SEED, shape, parts, INIT_STD)
        self.is_filled = True

    def named_state(self):
        for name, layer, parameter in self.trained:
            full = name if layer is None else f"layers.{layer}.{name}"
            yield (full, parameter) if self.adam else (f"{full}.main_grad", parameter.main_grad)
        if self.adam:
            yield from self.adam.named_state()

    def close(self):
        self.opened.close()

    # ------------------------------------------------------------------------------------------------
    # Data

    @property
    def _sizes(self):
        """(Sequences of a step of all ranks, tokens of a sequence.)"""
        return self.config.microbatches * self.config.microbatch * self.config.ep, self.config.sequence

    def _part(self, count):
        """This rank's slice of a dimension in which each rank has `count`."""
        return slice(self.rank * count, (self.rank + 1) * count)

    def _batch(self, index, rows):
        """Tokens and targets [microbatches, t] of this rank's rows, and positions and bounds of packed documents.

        rows: of all ranks. index: what the packing depends on.
        """
        c, count = self.config, len(rows) // self.config.ep
        rows, index = rows[self._part(count)], index * c.ep + self.rank
        rows = torch.from_numpy(rows % c.local_vocab)
        batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}
        if c.documents:
            bounds = np.stack([packing(c, index * count + row) for row in range(count)])
            batch["positions"] = torch.from_numpy(np.stack([positions(row) for row in bounds]))
            # Bounds of all sequences of a microbatch, which lie one behind the other.
            starts = bounds[:, :-1].reshape(c.microbatches, c.microbatch, -1)
            starts = starts + np.arange(c.microbatch)[:, None] * c.sequence
            ends = np.full((c.microbatches, 1), c.tokens)
            joined = np.concatenate((starts.reshape(c.microbatches, -1), ends), 1)
            batch["bounds"] = torch.from_numpy(joined.astype(np.int32))
        batch = {name: rows.reshape(c.microbatches, -1).contiguous() for name, rows in batch.items()}
        return {name: rows.pin_memory() for name, rows in batch.items()} if self.device.type == "cuda" else batch


def opened(config: Config):
    """The opened folder of --checkpoint. ValueError in one line where it does not fit the config."""
    from common.data.checkpoint import open_checkpoint

    # transformers rounds the bounds of YaRN's ramp unless the folder says otherwise.
    rope = {"rope_type": "yarn", "truncate": False, **YARN} if config.family == "gpt_oss" else None
    return open_checkpoint(config.checkpoint, config, config.family, rope)


def _keep_gradient(accumulation: Accumulation, parameter) -> None:
    """Move p.grad to main_grad. It is no method, because the parameter's hook would keep the state alive."""
    if accumulation.adds:
        parameter.main_grad.add_(parameter.grad)
    else:
        parameter.main_grad.copy_(parameter.grad)
    parameter.grad = None


def packing(config: Config, index: int) -> np.ndarray:
    """int64 [documents + 1]: the start of each document of sequence `index`, and the sequence's end.

    There are 1 to config.documents documents of random lengths; the end is repeated for those that are missing.
    """
    draw = np.random.default_rng([SEED, index])
    count = draw.integers(1, config.documents + 1)
    cuts = np.sort(draw.choice(np.arange(1, config.sequence), count - 1, replace=False))
    return np.concatenate(([0], cuts, np.full(config.documents + 1 - count, config.sequence)))


def positions(bounds: np.ndarray) -> np.ndarray:
    """int64 [sequence]: the place of each token in its document."""
    places = np.arange(bounds[-1])
    return places - bounds[np.searchsorted(bounds, places, side="right") - 1]


def resolve(config: Config, device: torch.device) -> tuple[Config, list[str]]:
    """(The config with as many layers as fit, notes.) ValueError where it cannot run: nothing is on the GPU then."""
    notes = []
    if device.type == "cpu":
        for need in (needed_bytes, host_bytes):
            require(config, PRESETS, need, host_state.available_host_bytes())
    else:
        # The same on all ranks: a rank with more layers would wait for an exchange that no other rank makes.
        budget = (min(of_all_ranks(torch.cuda.mem_get_info(device)[0])) - CONTEXT_BYTES) // GIB
        requested, config = config, fit(config, budget * GIB)
        if config.layers < requested.layers:
            notes.append(fewer_layers(config, requested, budget))
    if config.routing == "balanced":
        notes.append("balanced routing: every expert gets as many tokens, whatever the router says")
    adam = f", masters fp32, moments {config.moments}" if config.update else ""
    if not config.update:
        notes.append("forward and backward alone: no clipping, no Adam")
    notes.append(f"formats: weights bf16, main_grad bf16{adam}")
    if config.lora_rank:
        notes.append(
            f"LoRA: adapters of rank {config.lora_rank} on attention's projections, "
            f"{trained_parameters(config):,} parameters; all else is frozen"
        )
    return config, notes
