"""What GPT-3's training reads and writes: built once, reset in place, the same for every variant."""

from pathlib import Path

import torch

from common import collectives, precision, text
from common.capture import StaticInputs
from common.measure import Unsupported, section
from common.optimizers import MasterAdam
from gpt3.config import Config
from gpt3.model import Embedding, PlainLayer, attach_main_grads, initialise, te_layer

SEED = 1234
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}
HELD_OUT_BATCHES = 4
BUCKET_BYTES = 256 * 2**20
CACHE = Path(__file__).resolve().parent.parent / "runs" / ".cache"


class State:
    """Layers, embedding, FP8 scaling, optimizer, rotating batches, and the losses seen.

    config must be resolved (`resolve`): layer is "te" or "torch".
    """

    num_losses = 4096

    def __init__(self, config: Config, device: torch.device, rank: int = 0, world_size: int = 1):
        self.config, self.device, self.world_size = config, device, world_size
        dtype = torch.bfloat16
        make_layer = te_layer if config.layer == "te" else PlainLayer
        self.layers = torch.nn.ModuleList(make_layer(config, dtype, device) for _ in range(config.layers))
        self.embedding = Embedding(config, dtype, device)
        modules = [*self.layers, self.embedding]
        self.parameters = [parameter for module in modules for parameter in module.parameters()]
        self.overwritten = attach_main_grads(modules)
        main_grads = [parameter.main_grad for parameter in self.parameters]
        self.buckets = collectives.GradientBuckets(main_grads, BUCKET_BYTES) if world_size > 1 else None
        self.fp8 = _scaling(config, self.layers)
        initialise(self._named_parameters(), SEED)
        self.adam = MasterAdam(self.parameters, main_grads, lr=config.lr, **ADAM)
        self.loss = torch.zeros((), device=device)
        self.losses = torch.zeros(self.num_losses, device=device)
        self.grad_norms = torch.zeros(self.num_losses, device=device)
        self.batches = _batches(config, device, rank)
        shape = (config.microbatches, config.sequence, config.microbatch)
        self.inputs = StaticInputs(
            {name: torch.zeros(shape, dtype=torch.int64, device=device) for name in ("tokens", "targets")}
        )

    def reset(self):
        torch.manual_seed(SEED)
        initialise(self._named_parameters(), SEED)
        torch._foreach_zero_([parameter.main_grad for parameter in self.parameters])
        self.adam.reset()
        self.fp8.reset()
        self.losses.zero_()
        self.grad_norms.zero_()

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

    def end_step(self, index: int, update=None):
        """Average the gradients over the ranks, clip and apply them, keep the step's loss and gradient norm.

        update: what clips and applies them, called without arguments; the optimizer's own step where none is given.
        """
        with section("optimizer"):
            if self.buckets:
                self.buckets.all_reduce_mean()
            (update or self.adam.step)()
        # The first steps are what runs are compared by; a longer run keeps overwriting the last place.
        place = min(index, self.num_losses - 1)
        self.losses[place].copy_(self.loss)
        self.grad_norms[place].copy_(self.adam.grad_norm)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over HELD_OUT_BATCHES batches that no rank trains on: the log perplexity of a token.

        Eager. FP8 rounds with the scales of training, which are put back with their history. Raises
        Unsupported where the text is too short to hold any out.
        """
        state = [tensor for _, tensor in self.fp8.named_state()]
        saved = [tensor.clone() for tensor in state]
        # te: a fresh FP8 cast of the weights, for the cached one belongs to the graphs.
        first = None if self.config.layer == "te" else True
        loss = torch.zeros((), device=self.device)
        batches = _held_out_batches(self.config, self.world_size)
        with self.fp8.forward():
            for batch in batches:
                for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True):
                    hidden = self.embedding(tokens.to(self.device))
                    for layer in self.layers:
                        hidden = layer(hidden, is_first_microbatch=first)
                    loss += self.embedding.loss(hidden, targets.to(self.device))
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        return float(loss) / (len(batches) * self.config.microbatches)

    def named_state(self):
        yield from self._named_parameters()
        yield from self.adam.named_state()
        yield from self.fp8.named_state()

    def read_losses(self, count: int) -> list[float]:
        return self.losses[: min(count, self.num_losses)].tolist()

    def read_grad_norms(self, count: int) -> list[float]:
        return self.grad_norms[: min(count, self.num_losses)].tolist()

    def batch_class(self, index: int) -> int:
        """All batches have one shape."""
        return 0

    def _named_parameters(self):
        for index, layer in enumerate(self.layers):
            for name, parameter in layer.named_parameters():
                yield f"layers.{index}.{name}", parameter
        yield from self.embedding.named_parameters(prefix="embedding")


def _scaling(config, layers):
    if config.precision == "bf16":
        return precision.NoScaling()
    kind = precision.TransformerEngineScaling if config.layer == "te" else precision.EmulatedScaling
    return kind(layers, config.amax_history)


def _batches(config, device, rank):
    """Rotating batches of real text in host memory, pinned for an asynchronous copy."""
    source, count = text.open_tokens(config.data, CACHE), config.microbatches * config.microbatch
    batches = []
    for index in range(config.batches):
        batch = _batch(config, source.batch(index + rank * config.batches, count, config.sequence))
        batches.append({name: rows.pin_memory() if device.type == "cuda" else rows for name, rows in batch.items()})
    return batches


def _held_out_batches(config, world_size):
    """Batches of the same shape from text that none of `_batches` contains, the same on every rank."""
    source, count = text.open_tokens(config.data, CACHE), config.microbatches * config.microbatch
    try:
        rows = source.held_out(HELD_OUT_BATCHES * count, config.sequence, config.batches * world_size, count)
    except LookupError as error:
        raise Unsupported(str(error)) from None
    return [_batch(config, part) for part in rows.reshape(HELD_OUT_BATCHES, count, -1)]


def _batch(config, rows):
    """int64 [sequences, sequence + 1] as microbatches [m, s, b], tokens folded into the vocabulary's rows."""
    rows = (torch.from_numpy(rows) % config.vocab).view(config.microbatches, config.microbatch, -1).transpose(1, 2)
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def hyperparameters(config: Config, world_size: int) -> dict:
    """What the MLPerf log says of this training."""
    samples = config.microbatches * config.microbatch * world_size
    return {
        "seed": SEED,
        "global_batch_size": samples,
        "gradient_accumulation_steps": config.microbatches,
        "max_sequence_length": config.sequence,
        "train_samples": samples * config.batches,
        "eval_samples": HELD_OUT_BATCHES * config.microbatches * config.microbatch,
        "opt_name": "adamw",
        "opt_base_learning_rate": config.lr,
        "opt_learning_rate_decay_schedule": "constant",
        "opt_adamw_beta_1": ADAM["betas"][0],
        "opt_adamw_beta_2": ADAM["betas"][1],
        "opt_adamw_epsilon": ADAM["eps"],
        "opt_adamw_weight_decay": ADAM["weight_decay"],
        "opt_gradient_clip_norm": ADAM["clip"],
    }
