"""The state that GPT-3's training reads and writes: built once, reset in place, the same for every variant."""

from dataclasses import replace
from functools import cached_property

import torch

from common.data import token_files
from common.history import History
from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.parallel.groups import Ranks, make_groups
from common.precision.fp8 import NoScaling
from gpt3.config import Config, fit, require
from gpt3.emulated_fp8 import EmulatedScaling
from gpt3.model import Embedding, PlainLayer, attach_main_grads, initialise, split_dimension, te_layer
from graph_worth import StaticInputs, section
from graph_worth.machine import host_state
from graph_worth.parallel import collectives
from graph_worth.parallel.host_messages import of_all_ranks

SEED = 1234
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
BUCKET_BYTES = 256 * 2**20


class State(History):
    """Layers, embedding, FP8 scaling, optimizer, rotating batches, and the losses seen.

    config must be resolved (`resolve`): layer is "te" or "torch". rank: the world rank. Of a pipeline `chunks`
    are the layers of this rank's stage, `steps` its passes in their order (common/schedule.py) and `transfers`
    what is exchanged before each of them and after the last. embedding is None between the first and the last stage.
    """

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1):
        self.config, self.device = config, device
        self.ranks = config.ranks(world_size)
        self.place = self.ranks.place(rank)
        self.groups = make_groups(self.ranks, device.type)
        self.stage = config.pp_rank if config.alone else self.place.stage
        self.is_first, self.is_last = self.stage == 0, self.stage == config.pp - 1
        self.dtype = torch.float32 if config.precision == "fp32" else torch.bfloat16
        self._make_modules()
        self._make_optimizer()
        self.edges = None
        if config.alone:
            from gpt3.pipeline.edges import Edges

            self.edges = Edges(self.empty_hidden(), config.microbatches)
        self.loss = torch.zeros((), device=device)
        super().__init__(device)
        self.batches = training_batches(config, device, self.place.data_rank)
        shape = (config.microbatches, config.sequence, config.microbatch)
        self.inputs = StaticInputs(
            {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("tokens", "targets")}
        )

    def _make_modules(self):
        config, tensor = self.config, self.groups.tensor
        make_layer = te_layer if config.layer == "te" else PlainLayer
        numbers = Ranks(1, pp=config.pp).layers(config.layers, self.stage, config.chunks)
        self.numbers = [number for chunk in numbers for number in chunk]
        self.layers = torch.nn.ModuleList(make_layer(config, self.dtype, self.device, tensor) for _ in self.numbers)
        size = len(numbers[0])
        self.chunks = [list(self.layers[start : start + size]) for start in range(0, len(self.layers), size)]
        self.embedding, modules = None, [*self.layers]
        if self.is_first or self.is_last:
            self.embedding = Embedding(config, self.dtype, self.device, tensor, self.is_first, self.is_last)
            modules.append(self.embedding)
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        self.overwritten = attach_main_grads(modules)
        self.fp8 = _scaling(config, self.layers, tensor)
        self._initialise()

    def _initialise(self):
        initialise(self.named_parameters(), SEED, self.place.tensor_rank, self.config.tp)

    def _make_optimizer(self):
        config, groups = self.config, self.groups
        main_grads = [parameter.main_grad for parameter in self.parameters]
        # What all tensor ranks have alike: each has the gradient of its part of the sequence.
        alike = [parameter for name, parameter in self.named_parameters() if split_dimension(name) is None]
        self.partial_grads = [parameter.main_grad for parameter in alike] if config.tp > 1 else []
        # What another rank with other shards counts in the gradients' norm.
        uncounted = alike if self.place.tensor_rank > 0 else []
        self.shared_rows = self.embedding.tokens.main_grad if self.ranks.pp > 1 and self.embedding else None
        if self.shared_rows is not None and self.is_last:
            uncounted = [*uncounted, self.embedding.tokens]
        self.buckets, numbers = None, Hyperparameters(lr=config.lr, **ADAM)
        # What several ranks and a stage alone need is imported where they are.
        if config.alone:
            from common.optimizers.no_adam import NoAdam

            self.adam = NoAdam(self.parameters)
        elif config.zero1 and self.ranks.dp > 1:
            from gpt3.zero import ZeroAdam

            self.adam = ZeroAdam(self.parameters, main_grads, numbers, groups.replicas, uncounted)
        else:
            if self.ranks.dp > 1:
                from common.parallel.buckets import GradientBuckets

                self.buckets = GradientBuckets(main_grads, BUCKET_BYTES, groups.replicas)
            reduce_norm = None
            if config.tp * config.pp > 1:
                from common.parallel.buckets import reduce_norm_

                counted_elsewhere = [parameter.main_grad for parameter in uncounted]

                def reduce_norm(norm):
                    reduce_norm_(norm, groups.shards, counted_elsewhere)

            self.adam = Adam(self.parameters, numbers, main_grads, reduce_norm=reduce_norm)

    def reset(self):
        torch.manual_seed(SEED)
        self._initialise()
        torch._foreach_zero_([parameter.main_grad for parameter in self.parameters])
        self.adam.reset()
        self.fp8.reset()
        self.losses.zero_()
        self.grad_norms.zero_()

    @cached_property
    def steps(self) -> list[tuple[int, int]]:
        from common import schedule

        return schedule.numbered(schedule.order(*self._schedule_shape()))

    @cached_property
    def transfers(self) -> list:
        from common import schedule

        return schedule.communications(*self._schedule_shape())

    def _schedule_shape(self):
        return self.config.pp, self.stage, self.config.chunks, self.config.microbatches

    def empty_hidden(self) -> torch.Tensor:
        """[s / tp, b, hidden], not initialised: what layers read and write."""
        c = self.config
        return torch.empty(c.sequence // c.tp, c.microbatch, c.hidden, dtype=self.dtype, device=self.device)

    def begin_step(self, index: int, accumulate_all: bool = False):
        """Copy batch `index` in and zero the gradients that are added to.

        The first microbatch overwrites the main_grad of the layers' weights, unless `accumulate_all`.
        """
        with section("data"):
            self.inputs.load(self.batches[index % len(self.batches)])
        skip = () if accumulate_all else {id(parameter) for parameter in self.overwritten}
        with section("zero gradients"):
            torch._foreach_zero_([p.main_grad for p in self.parameters if id(p) not in skip])
            self.loss.zero_()

    def microbatch_loss(self, hidden, microbatch: int):
        """This microbatch's share of the step's mean loss; adds it to the step's."""
        with section("loss"):
            loss = self.embedding.loss(hidden, self.inputs["targets"][microbatch]) / self.config.microbatches
            self.loss.add_(loss.detach())
        return loss

    @torch.no_grad()
    def reduce_gradients(self):
        """Sums over the tensor ranks and over both ends of the pipeline, means over the data ranks (not with ZeRO-1,
        whose step does so)."""
        if self.partial_grads:
            flat = torch.cat([grad.flatten() for grad in self.partial_grads])
            collectives.all_reduce_sum_(flat, self.groups.tensor)
            torch._foreach_copy_(self.partial_grads, flat.split([grad.numel() for grad in self.partial_grads]))
        if self.shared_rows is not None:
            collectives.all_reduce_sum_(self.shared_rows, self.groups.ends)
        if self.buckets:
            self.buckets.all_reduce_mean()

    def keep_results(self, index: int):
        """Keep loss and gradient norm of step `index`, over all ranks."""
        if self.ranks.pp > 1:
            # The other stages have added nothing.
            collectives.all_reduce_sum_(self.loss, self.groups.pipeline)
        if self.ranks.dp > 1:
            collectives.all_reduce_mean_(self.loss, self.groups.replicas)
        # The first steps are what runs are compared by; a longer run keeps overwriting the last place.
        slot = self.slot(index)
        self.losses[slot].copy_(self.loss)
        self.grad_norms[slot].copy_(self.adam.grad_norm)

    def named_state(self):
        yield from self.named_parameters()
        yield from self.adam.named_state()
        yield from self.fp8.named_state()

    def named_parameters(self):
        """(name in the whole model, this rank's part) of each parameter."""
        for number, layer in zip(self.numbers, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                yield f"layers.{number}.{name}", parameter
        if self.embedding is not None:
            yield from self.embedding.named_parameters(prefix="embedding")


def _scaling(config, layers, group):
    if config.precision != "fp8":
        return NoScaling()
    if config.layer == "te":
        from common.precision.transformer_engine import TransformerEngineScaling

        return TransformerEngineScaling(layers, config.amax_history, group)
    return EmulatedScaling(layers, config.amax_history, group)


def training_batches(config, device, data_rank):
    """Rotating batches of real text in host memory, pinned for an asynchronous copy."""
    source, count = token_files.open_tokens(config.data), config.microbatches * config.microbatch
    batches = []
    for index in range(config.batches):
        batch = _batch(config, source.batch(index + data_rank * config.batches, count, config.sequence))
        batches.append({name: rows.pin_memory() if device.type == "cuda" else rows for name, rows in batch.items()})
    return batches


def _batch(config, rows):
    """int64 [sequences, sequence + 1] as microbatches [m, s, b], tokens folded into the vocabulary's rows."""
    rows = torch.from_numpy(rows) % (config.vocab * config.tp)
    rows = rows.view(config.microbatches, config.microbatch, -1).transpose(1, 2)
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def resolve(config: Config, device: torch.device, data_ranks: int = 1) -> tuple[Config, list[str]]:
    """(config with layer, precision and number of layers as they can run on `device`, notes on what changed)."""
    notes = []
    if config.precision == "fp32":
        config = replace(config, layer="torch")
    if config.layer == "auto":
        fault = None if device.type == "cpu" else _te_fault(config)
        on_te = device.type == "cuda" and fault is None
        config = replace(config, layer="te" if on_te else "torch")
        if fault and config.precision == "fp8":
            config = replace(config, precision="bf16")
        if fault:
            notes.append(f"plain-PyTorch layer in {config.precision}: {fault}")
    if config.layer == "megatron":
        from common import megatron

        if fault := megatron.fault_of(config.precision):
            raise ValueError(f"--layer megatron: {fault}")
    if config.layer == "te" and device.type == "cpu":
        raise ValueError("--layer te needs a GPU; take --layer torch")
    if config.layer == "torch" and config.precision == "fp8":
        notes.append("FP8 emulated: operands rounded to FP8, GEMMs in bf16")
    if config.alone:
        notes.append(
            f"stage {config.pp_rank} of {config.pp} by itself: no tensor-parallel and no pipeline communication, edges "
            "fed with fixed tensors, no optimizer"
        )
    if device.type == "cpu":
        require(config, host_state.available_host_bytes())
        return config, notes
    # The same on all ranks.
    free = min(of_all_ranks(torch.cuda.mem_get_info(device)[0]))
    smaller = fit(config, free, data_ranks)
    if smaller.layers < config.layers:
        from common.fit import fewer_layers

        notes.append(fewer_layers(smaller, config, free / 2**30))
    return smaller, notes


def _te_fault(config):
    from common.precision.transformer_engine import te_fault

    return te_fault(fp8=config.precision == "fp8")
