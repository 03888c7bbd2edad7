"""Transformers' Trainer whose updates are graphs: equal to Trainer, refused by name, no reads between logs."""

import pytest
import torch

pytest.importorskip("transformers", reason="an extra: ./setup.sh peft")
pytest.importorskip("accelerate", reason="Trainer needs it")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from graph_worth.capture.pool import CaptureError
from graph_worth.transformers import GraphedTrainer
from tests.helpers.loops import seen_loops
from tests.helpers.reads import Reads

pytestmark = pytest.mark.slow
HOST = {"cpu": "host_graph"}
WARM = 3


def rows(count=74):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (count, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def make(kind, folder, optimizer=False, device="cpu", callbacks=(), options=None, **settings):
    """A trainer over a small GPT-2 with dropout, whose optimizer has its learning rate in a tensor if asked for."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=8))
    settings = {"max_steps": 20, "logging_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no"} | settings
    settings |= {"report_to": [], "disable_tqdm": True, "use_cpu": device == "cpu", "warmup_steps": 5}
    args = TrainingArguments(str(folder), learning_rate=1e-3, **settings)
    if optimizer:
        lr = torch.tensor(1e-3, device=device)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
    more = {"graph_options": HOST | (options or {})} if issubclass(kind, GraphedTrainer) else {}
    optimizers = (optimizer or None, None)
    data = rows()
    return kind(
        model, args, train_dataset=data, eval_dataset=data[:4], optimizers=optimizers, callbacks=list(callbacks), **more
    )


def trained(*args, resume=None, **settings):
    """The trainer after train()."""
    trainer = make(*args, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logs(trainer):
    """What was logged, but for seconds."""
    names = "step", "loss", "grad_norm", "learning_rate", "eval_loss"
    return [{name: row[name] for name in names if name in row} for row in trainer.state.log_history]


def first_difference(trainer, reference):
    """The first row of logs or the first weight that differs, or None."""
    for row, expected in zip(logs(trainer), logs(reference), strict=True):
        if row != expected:
            return row, expected
    weights, others = trainer.model.state_dict(), reference.model.state_dict()
    return next((name for name, tensor in weights.items() if not torch.equal(tensor, others[name])), None)


def test_watch_tells_the_loop_of_trainer(tmp_path):
    with seen_loops() as loops:
        trained(Trainer, tmp_path, max_steps=1)
    assert loops == {"transformers"}


# ------------------------------------------------------------------------------------------------
# Equal to Trainer


def test_200_updates_are_those_of_trainer_bit_for_bit(tmp_path):
    graphed = trained(GraphedTrainer, tmp_path, optimizer=True, max_steps=200)
    assert first_difference(graphed, trained(Trainer, tmp_path, optimizer=True, max_steps=200)) is None
    assert graphed.num_replays == 200 - WARM
    losses = [row["loss"] for row in logs(graphed) if "loss" in row]
    assert len(losses) == 200 and len(set(losses)) > 190 and sum(losses[-20:]) < sum(losses[:20])
    # Trainer's own optimizer has its learning rate in FP64.
    ours, stock = (logs(trained(kind, tmp_path, max_steps=200)) for kind in (GraphedTrainer, Trainer))
    for row, expected in zip(ours, stock, strict=True):
        assert row.keys() == expected.keys()
        assert all(
            row[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6) for name in row if name != "grad_norm"
        )


@pytest.mark.parametrize(
    "settings, remainders",
    [
        # 37 batches: the last update of an epoch has one.
        ({"gradient_accumulation_steps": 4, "max_steps": 50}, 5),
        ({"gradient_accumulation_steps": 2, "bf16": True}, 1),
        ({"max_grad_norm": 0.0}, 0),
        ({"max_grad_norm": 0.05, "label_smoothing_factor": 0.1}, 0),
        ({"lr_scheduler_type": "cosine", "options": {"check": "always"}}, 0),
    ],
    ids=str,
)
def test_settings_of_trainer(tmp_path, settings, remainders):
    graphed = trained(GraphedTrainer, tmp_path, optimizer=True, **settings)
    assert first_difference(graphed, trained(Trainer, tmp_path, optimizer=True, **settings)) is None
    assert graphed.num_replays == graphed.state.global_step - WARM - min(WARM, remainders)


def test_evaluation_checkpoints_and_a_resumed_run(tmp_path):
    settings = {"optimizer": True, "eval_strategy": "steps", "eval_steps": 6, "logging_steps": 6, "max_steps": 24}
    settings |= {"save_strategy": "steps", "save_steps": 12}
    whole = trained(Trainer, tmp_path / "eager", **settings)
    graphed = trained(GraphedTrainer, tmp_path / "graphed", **settings)
    assert first_difference(graphed, whole) is None and sum("eval_loss" in row for row in logs(whole)) == 4
    # A checkpoint of either goes on in either.
    for folder in "eager", "graphed":
        resumed = trained(
            GraphedTrainer, tmp_path / "again", resume=str(tmp_path / folder / "checkpoint-12"), **settings
        )
        assert first_difference(resumed, whole) is None and resumed.num_replays == 12 - WARM


def test_a_second_train_goes_on(tmp_path):
    trainers = [trained(kind, tmp_path, optimizer=True, max_steps=8) for kind in (GraphedTrainer, Trainer)]
    for trainer in trainers:
        torch.manual_seed(1)
        trainer.train()
    assert first_difference(*trainers) is None and trainers[0].num_replays == 2 * (8 - WARM)
    assert all(parameter.grad is None for parameter in trainers[0].model.parameters())


def test_losses_that_are_not_finite_are_filtered_as_by_trainer(tmp_path):
    def loss_of(outputs, labels, num_items_in_batch=None):
        return outputs.logits.logsumexp(-1).mean() + torch.where((labels == 7).sum() > 1, torch.inf, 0.0)

    def filtered(kind, **settings):
        trainer = make(kind, tmp_path, optimizer=True, logging_steps=4, **settings)
        trainer.compute_loss_func = loss_of
        trainer.train()
        return trainer

    graphed = filtered(GraphedTrainer)
    assert first_difference(graphed, filtered(Trainer)) is None and graphed.args.logging_nan_inf_filter
    plain = filtered(GraphedTrainer, logging_nan_inf_filter=False)
    assert torch.inf in [row.get("loss") for row in logs(plain)], "there was something to filter"


# ------------------------------------------------------------------------------------------------
# Reads on the host


class CountReads(TrainerCallback):
    """Counts the reads from the end of a log to the beginning of the next one."""

    def __init__(self):
        self.counts, self.reads = [], None

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= 10 and state.global_step % args.logging_steps == 0:
            self.reads = Reads()
            self.reads.__enter__()

    def on_step_end(self, args, state, control, **kwargs):
        if self.reads is not None and state.global_step % args.logging_steps == args.logging_steps - 1:
            self.reads.__exit__(None, None, None)
            self.counts.append(self.reads.count)
            self.reads = None


def test_nothing_is_read_on_the_host_between_two_logs(tmp_path):
    counts = {}
    for kind in GraphedTrainer, Trainer:
        callback = CountReads()
        trained(kind, tmp_path, optimizer=True, callbacks=[callback], logging_steps=5)
        counts[kind] = callback.counts
    assert counts[GraphedTrainer] == [0, 0], "updates 11 to 14, 16 to 19"
    # Two a loss for its filter, the learning rate, and on a CPU once more in the fused optimizer.
    assert counts[Trainer] == [4 * 4, 4 * 4]


# ------------------------------------------------------------------------------------------------
# Refusals


class Inside(TrainerCallback):
    def on_optimizer_step(self, args, state, control, **kwargs):
        pass


class Between(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        pass


def test_what_cannot_be_captured_is_one_list(tmp_path, monkeypatch):
    settings = {"lr_scheduler_type": "reduce_lr_on_plateau", "optim": "adafactor", "torch_empty_cache_steps": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 5, "gradient_checkpointing": True}
    trainer = make(GraphedTrainer, tmp_path, callbacks=[Inside(), Between()], **settings)
    trainer.is_model_parallel = True
    trainer.args.fp16 = True
    monkeypatch.setattr("transformers.__version__", "5.25.1")
    monkeypatch.setattr(type(trainer.args), "n_gpu", 4)
    with pytest.raises(ValueError) as refusal:
        trainer.train()
    words = (
        "cannot capture this training",
        "transformers 5.25.1: it knows 5.17 to 5.24",
        "fp16",
        "4 GPUs or torchrun: start it by python with CUDA_VISIBLE_DEVICES=0",
        "several devices",
        "scheduler that reads losses",
        "Adafactor, which is neither capturable nor fused",
        "gradient_checkpointing that saves random states",
        "torch_empty_cache_steps",
        "Inside.on_optimizer_step",
        "Between.on_substep_end",
    )
    lines = str(refusal.value).splitlines()
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True)), lines
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("flag, words", [("is_deepspeed_enabled", "deepspeed or fsdp"), ("is_fsdp_enabled", "fsdp")])
def test_engines_are_refused(tmp_path, flag, words):
    trainer = make(GraphedTrainer, tmp_path)
    setattr(trainer, flag, True)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    lomo = make(GraphedTrainer, tmp_path, optim="lomo")
    with pytest.raises(ValueError, match="LOMO, which steps in the backward pass"):
        lomo.train()


def test_a_step_that_a_graph_cannot_hold_is_refused_or_stays_eager(tmp_path):
    class Reading(GraphedTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * 2 if loss.item() > 0 else loss

    with pytest.raises(CaptureError, match=r"item at .*test_transformers.py:\d+"):
        trained(Reading, tmp_path)
    with pytest.warns(UserWarning, match="from now on the step runs eagerly"):
        trainer = trained(Reading, tmp_path, options={"on_refusal": "eager"}, optimizer=True)
    assert trainer.num_replays == 0 and trainer.state.global_step == 20

    class Looking(GraphedTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * (2 if self.state.global_step > 100 else 1)

    with pytest.raises(CaptureError, match=r"self.state.global_step goes from .*test_transformers.py:\d+"):
        trained(Looking, tmp_path)

    class Counting(GraphedTrainer):
        num_calls = 0

        def compute_loss(self, *args, **kwargs):
            self.num_calls += 1
            return super().compute_loss(*args, **kwargs) * (1 + self.num_calls % 3)

    with pytest.raises(CaptureError):
        trained(Counting, tmp_path)


# ------------------------------------------------------------------------------------------------
# On a GPU


class NoWaits(TrainerCallback):
    """What waits for the GPU between two logs is an error."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= 10 and state.global_step % args.logging_steps == 0:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % args.logging_steps == args.logging_steps - 1:
            torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def gpu(monkeypatch):
    """One GPU, with kernels that give the same bits each time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)
    torch.use_deterministic_algorithms(True)
    yield {"device": "cuda", "optimizer": True}
    torch.cuda.set_sync_debug_mode("default")
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:graphed. this program works on the default stream")
@pytest.mark.parametrize("settings", [{"max_steps": 200}, {"gradient_accumulation_steps": 4}], ids=str)
def test_updates_on_a_gpu_are_those_of_trainer_bit_for_bit(tmp_path, gpu, settings):
    graphed = trained(GraphedTrainer, tmp_path, **gpu, **settings)
    assert first_difference(graphed, trained(Trainer, tmp_path, **gpu, **settings)) is None
    # A remainder of accumulation is a shape of its own.
    assert graphed.num_replays == graphed.state.global_step - WARM - 2 * ("gradient_accumulation_steps" in settings)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:graphed. this program works on the default stream")
def test_in_bf16_a_capture_takes_another_attention_which_is_said_and_trains_alike(tmp_path, gpu):
    settings = {"gradient_accumulation_steps": 4, "bf16": True, "max_steps": 40}
    with pytest.warns(UserWarning, match="does something else while a stream captures"):
        graphed = trained(GraphedTrainer, tmp_path, **gpu, **settings)
    pairs = zip(logs(graphed), logs(trained(Trainer, tmp_path, **gpu, **settings)), strict=True)
    assert all(row["loss"] == pytest.approx(other["loss"], rel=1e-2) for row, other in pairs if "loss" in row)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:graphed. this program works on the default stream")
def test_nothing_waits_for_a_gpu_between_two_logs(tmp_path, gpu):
    trained(GraphedTrainer, tmp_path, logging_steps=5, callbacks=[NoWaits()], **gpu)
    with pytest.raises(RuntimeError, match="synchroniz"):
        trained(Trainer, tmp_path, logging_steps=5, callbacks=[NoWaits()], **gpu)
