"""The state that Llama 3.1's training reads and writes: built once, reset in place, the same for every variant."""

import contextlib

import torch

from common.data import token_files
from common.history import History
from common.optimizers.adam import Adam
from common.optimizers.hyperparameters import Hyperparameters
from common.optimizers.no_adam import NoAdam
from common.parallel.buckets import GradientBuckets, reduce_norm_
from common.parallel.groups import Place, make_groups
from graph_worth import StaticInputs, Unsupported, mark, section
from graph_worth.parallel import collectives
from llama31.config import Config, layers_of_stages
from llama31.device import open_checkpoint, recipe_of, require_precision
from llama31.memory.plan import make_plan
from llama31.model import (
    Embedding,
    Head,
    Part,
    PlainLayer,
    TransformerEngineLayer,
    attach_main_grad,
    checkpoint_part,
    fill_at_random_,
    positions_of,
    rope_angles,
)

SEED = 1234
# MLPerf Training v5.1, llama31_405b.
ADAM = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "clip": 1.0}
BUCKET_BYTES = 256 * 2**20
MARK_EVERY = 8
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class State(History):
    """This rank's layers, ends, optimizer, rotating batches and the losses seen.

    config must be resolved (llama31/device.py): layer is "te" or "torch". dtype: of activations and of weights that
    are not FP8.
    """

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1, dtype=torch.bfloat16):
        # What cannot run, or does not fit, is said before weights are read or made.
        require_precision(config, device)
        self.ranks = config.ranks(world_size)
        self.plan = make_plan(config)
        self.config, self.device, self.dtype = config, device, dtype
        self.place = self.ranks.place(rank)
        self.checkpoint = open_checkpoint(config) if config.checkpoint else None
        self.notes = self.checkpoint.notes if self.checkpoint else []
        self.groups = make_groups(self.ranks, device.type)
        # Numbers of the layers of this stage.
        self.numbers = layers_of_stages(config.layers, config.pp)[self.place.stage]
        self.recipe = recipe_of(config)
        self._make_modules(dtype)
        self.loss = torch.zeros((), device=device)
        self.validation_loss = torch.zeros((), device=device)
        super().__init__(device)
        self.microbatch_losses, self.validation_losses = (
            torch.zeros(config.microbatches, device=device) for _ in range(2)
        )
        # What a microbatch's mean loss counts for in the step's: on the device, since the number of them may change.
        self.share = torch.ones((), device=device)
        source = token_files.open_tokens(config.data)
        self.batches = training_batches(config, device, self.place, source)
        self.held_out = self._held_out(source) if config.validate_every else None
        self.inputs = StaticInputs({name: rows.to(device, copy=True) for name, rows in self.batches[0].items()})
        self.adam = self._make_adam()
        self.reset()

    def _make_modules(self, dtype):
        c, parts = self.config, (self.config, self.groups, self.place)
        angles = rope_angles(c)
        if c.layer == "te":
            rope, make, more = angles, TransformerEngineLayer, (self.recipe,)
        else:
            local_angles = angles[positions_of(c, self.place.context_rank)][:, None, None].to(self.device)
            rope, make, more = (local_angles.cos(), local_angles.sin()), PlainLayer, ()
        self.layers = torch.nn.ModuleList(make(*parts, rope, dtype, self.device, *more) for _ in self.numbers)
        # The plan is of the widest stage. Its last layers keep most, which all stages have.
        self.calls = [
            layer if kept == self.plan.items.keys() else layer.keep(kept, self.scaling)
            for layer, kept in zip(self.layers, self.plan.layers[-len(self.layers) :], strict=True)
        ]
        first, last = self.place.stage == 0, self.place.stage == c.pp - 1
        self.embedding = Embedding(c, self.groups, dtype, self.device) if first else None
        self.head = Head(c, self.groups, dtype, self.device) if last else None
        # (name, number of the layer or None, part) of all parameters of this rank.
        self.parts: list[tuple[str, int | None, Part]] = []
        if first:
            self.parts.append(("embedding", None, Part(self.embedding.weight)))
        for number, layer in zip(self.numbers, self.layers, strict=True):
            self.parts += [(name, number, part) for name, part in layer.parts().items()]
        if last:
            self.parts += [("final_norm", None, Part(self.head.norm)), ("head", None, Part(self.head.weight))]
        for _, _, part in self.parts:
            attach_main_grad(part, DTYPES[c.main_grad])

    def _make_adam(self):
        c = self.config
        numbers = Hyperparameters(lr=c.lr, **ADAM)
        parameters = [part.parameter for _, _, part in self.parts]
        self.main_grads = [parameter.main_grad for parameter in parameters]
        # Each tensor rank has the norms' gradients of its own tokens.
        norms = [part.parameter.main_grad for name, _, part in self.parts if "norm" in name]
        self.norm_grads = norms if c.tp > 1 else []
        uncounted = norms if self.place.tensor_rank > 0 else []
        self.buckets = GradientBuckets(self.main_grads, BUCKET_BYTES, self.groups.replicas)
        if c.optimizer == "none":
            return NoAdam(parameters)
        return Adam(
            parameters,
            numbers,
            self.main_grads,
            writes=[part.write for _, _, part in self.parts],
            moments=DTYPES[c.moments],
            reduce_norm=lambda norm: reduce_norm_(norm, self.groups.shards, uncounted),
            clip_on_host=c.clip == "host",
        )

    # ------------------------------------------------------------------------------------------------
    # What a step is made of

    @property
    def period(self) -> int:
        """Steps after which the numbers of microbatches come again."""
        return len(self.config.counts)

    def num_microbatches(self, index: int) -> int:
        """Microbatches that step `index` takes."""
        return self.config.counts[index % len(self.config.counts)]

    def begin_step(self, index: int) -> int:
        """Copy all microbatches of step `index` into the static buffers, zero main_grad; returns how many they are."""
        count = self.num_microbatches(index)
        with section("data"):
            self.inputs.load(self.batches[index % len(self.batches)])
        with section("zero gradients"):
            self.zero_grads()
            self.microbatch_losses.zero_()
            self.share.fill_(1.0 / count)
        return count

    @property
    def static(self) -> tuple[torch.Tensor, ...]:
        """Return the buffers that a replay reads and the host overwrites before it."""
        return tuple(self.inputs.buffers.values())

    def empty_hidden(self) -> torch.Tensor:
        """[s / tp, b, hidden], not initialised: what a layer reads and writes."""
        c = self.config
        return torch.empty(c.local_sequence // c.tp, c.microbatch, c.hidden, dtype=self.dtype, device=self.device)

    def zero_grads(self) -> None:
        torch._foreach_zero_(self.buckets.flats)

    def scaling(self):
        """The context that Transformer Engine's layers are called in; current scales are computed within the layers."""
        if self.config.layer != "te" or self.recipe is None:
            return contextlib.nullcontext()
        from common.precision.transformer_engine import transformer_engine

        return transformer_engine().autocast(enabled=True, recipe=self.recipe)

    def run_layers(self, hidden, first: bool | None):
        """All layers of this rank. first: their weights are new since their last cast, as in a step's microbatch 0."""
        if self.config.layer == "te" and not torch.is_grad_enabled():
            # A fresh cast: the one that Transformer Engine keeps belongs to the training, whose graph reads it.
            first = None
        with self.scaling():
            for index in range(len(self.layers)):
                hidden = self.run_layer(index, hidden, first)
                if (index + 1) % MARK_EVERY == 0:
                    mark(hidden)
        return hidden

    def run_layer(self, index: int, hidden, first: bool | None):
        """One layer, which keeps for its backward what the plan says."""
        return self.calls[index](hidden, is_first_microbatch=first)

    def microbatch_loss(self, hidden, microbatch: int):
        """This microbatch's part of the step's mean loss, differentiable; its value is kept."""
        loss = self.head(hidden, self.inputs["targets"][microbatch]) * self.share
        self.microbatch_losses[microbatch].copy_(loss.detach())
        if self.config.nan_checks:
            _require_number("loss", loss)
        return loss

    def keep_validation_loss(self, hidden, microbatch: int) -> None:
        """This microbatch's part of the held-out batch's mean loss."""
        loss = self.head(hidden, self.inputs["targets"][microbatch])
        self.validation_losses[microbatch].copy_(loss / self.config.microbatches)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """After the last microbatch: sums over tensor ranks, means over data and context ranks. Can be captured."""
        with section("reduction"):
            if self.norm_grads:
                collectives.all_reduce_sum_(self.norm_grads, self.groups.tensor)
            self.buckets.all_reduce_mean()

    @torch.no_grad()
    def update(self) -> None:
        """Clipping, Adam, and the weights in their format. Can be captured, unless --clip host."""
        with section("optimizer"):
            self.adam.step()

    @torch.no_grad()
    def end_step(self, index: int) -> None:
        """Keep the step's loss and gradient norm."""
        if self.config.nan_checks:
            _require_number("gradient norm", self.adam.grad_norm)
        with section("losses"):
            self.mean_loss(self.microbatch_losses, self.loss)
        slot = self.slot(index)
        self.losses[slot].copy_(self.loss)
        self.grad_norms[slot].copy_(self.adam.grad_norm)

    def mean_loss(self, losses, out) -> None:
        """The sum of microbatches' losses into `out`, from the last stage, averaged over data and context ranks."""
        torch.sum(losses, 0, out=out)
        collectives.all_reduce_sum_(out, self.groups.pipeline)
        collectives.all_reduce_mean_(out, self.groups.replicas)

    def begin_validation(self) -> None:
        """Copy the held-out batch into the static buffers."""
        self.inputs.load(self.held_out)

    def validates(self, index: int) -> bool:
        """Return whether a validation belongs to step `index`."""
        every = self.config.validate_every
        return every > 0 and (index + 1) % every == 0

    # ------------------------------------------------------------------------------------------------
    # What a run asks of any state

    def reset(self):
        torch.manual_seed(SEED)
        self._initialise()
        self.adam.reset()
        self.zero_grads()
        torch._foreach_zero_([self.losses, self.grad_norms, self.loss, self.validation_loss, self.microbatch_losses])

    @torch.no_grad()
    def _initialise(self) -> None:
        """Masters, or parameters without any, become seeded values or the checkpoint's, in place."""
        has_masters = self.config.optimizer == "adam"
        targets = self.adam.masters if has_masters else [part.parameter for _, _, part in self.parts]
        for (name, number, _), target in zip(self.parts, targets, strict=True):
            if self.checkpoint is None:
                fill_at_random_(target, self.config, self.place, name, number, SEED)
            else:
                target.copy_(checkpoint_part(self.config, self.place, name, self.checkpoint.read(name, number)))

    def named_state(self):
        for name, number, part in self.parts:
            # Transformer Engine's FP8 weights are no plain tensors; their masters tell.
            if part.write is None or self.config.layer == "torch":
                yield name if number is None else f"layers.{number}.{name}", part.parameter
        yield from self.adam.named_state()
        if self.config.validate_every:
            yield "validation_loss", self.validation_loss

    def batch_class(self, index: int) -> int:
        """Steps of as many microbatches, with or without a validation."""
        return 2 * self.num_microbatches(index) + self.validates(index)

    # ------------------------------------------------------------------------------------------------
    # Data

    def _held_out(self, source):
        c, count = self.config, self.config.microbatches * self.config.microbatch
        try:
            rows = source.held_out(count, c.sequence // c.share_cp, c.batches * self.ranks.dp, count)
        except LookupError:
            raise Unsupported(f"{source.name} is too short to hold a batch out") from None
        return _batch(c, self.device, self.place, rows)


def training_batches(config: Config, device: torch.device, place: Place, source) -> list:
    """Rotating batches of real text in host memory, pinned for an asynchronous copy."""
    first, count = place.data_rank * config.batches, config.microbatches * config.microbatch
    length = config.sequence // config.share_cp
    rows = (source.batch(first + index, count, length) for index in range(config.batches))
    return [_batch(config, device, place, sequences) for sequences in rows]


def _batch(config, device, place, rows):
    """int64 [sequences, s + 1] -> a context rank's tokens and targets [m, s / cp, b], within the vocabulary."""
    c, positions = config, positions_of(config, place.context_rank)
    rows = (torch.from_numpy(rows) % (c.vocab // c.share)).view(c.microbatches, c.microbatch, -1).transpose(1, 2)
    batch = {"tokens": rows[:, positions].contiguous(), "targets": rows[:, positions + 1].contiguous()}
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return batch


def _require_number(what, value):
    if not torch.isfinite(value):
        raise FloatingPointError(f"{what} is {float(value.detach())}: lower --lr, or see the data of this step")
