"""Steps of libraries before and after the argument that a finding names: the finding goes."""

import pytest
import torch

from graph_worth.your_step.doctor import WHOLE, diagnose
from graph_worth.your_step.libraries import ARGUMENTS, argument_for, library_of, with_library
from graph_worth.your_step.place import Place
from graph_worth.your_step.step_watch import reads_noted
from graph_worth.your_step.trial import EQUAL

pytestmark = pytest.mark.slow

CHECKPOINT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def build(device):
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                         num_key_value_heads=2, vocab_size=64, use_cache=False)
    model = LlamaForCausalLM(config).to(device).train()
    model.gradient_checkpointing_enable(ARGUMENT)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=device.type == "cuda")
    def step(batch):
        batch = batch.to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step, [torch.randint(0, 64, (2, 8)) for _ in range(4)], [model, optimizer]
"""
GRAPHS = """
import torch
from torch_geometric.nn import GATConv, GCNConv, global_mean_pool

def build(device):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([GCNConv(8, 8LOOPS), GATConv(8, 8LOOPS)]).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), fused=True, capturable=device.type == "cuda")
    batches = [(torch.randn(12, 8), torch.randint(0, 12, (2, 30))) for _ in range(4)]
    graph = torch.arange(12, device=device) // 4
    def step(batch):
        x, edges = (part.to(device) for part in batch)
        optimizer.zero_grad()
        for layer in layers:
            x = layer(x, edges).relu()
        loss = global_mean_pool(x, graphSIZE).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    return step, batches, [layers, optimizer]
"""
AVERAGE = """
import torch
from diffusers.training_utils import EMAModel

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(device)
    average = EMAModel(model.parameters(), use_ema_warmup=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=device.type == "cuda")
    def step(batch):
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        STEP
        return loss
    return step, [torch.randn(4, 8) for _ in range(4)], [model, optimizer, average]
"""
METRIC = """
import torch
import torchmetrics

def build(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=device.type == "cuda")
    def step(batch):
        x, y = (part.to(device) for part in batch)
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        UPDATE
        return loss
    batches = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(4)]
    return step, batches, [model, optimizer, accuracy]
"""
PPO = """
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss

def build(device):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 2), NormalParamExtractor())
    low, high = torch.tensor([-1.0, 1.0], device=device)
    actor = ProbabilisticActor(TensorDictModule(net, ["observation"], ["loc", "scale"]), in_keys=["loc", "scale"],
                               distribution_class=TanhNormal, BOUNDS return_log_prob=True)
    critic = ValueOperator(torch.nn.Linear(4, 1), in_keys=["observation"])
    module = ClipPPOLoss(actor, critic).to(device)
    optimizer = torch.optim.Adam(module.parameters(), fused=True, capturable=device.type == "cuda")
    def rows():
        return {"observation": torch.randn(16, 4), "action": torch.rand(16, 1) - 0.5, "advantage": torch.randn(16, 1),
                "action_log_prob": torch.randn(16), "value_target": torch.randn(16, 1)}
    def step(batch):
        losses = module(batch.to(device))
        loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step, [TensorDict(rows(), [16]) for _ in range(4)], [module, optimizer]
"""
PADDED = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel

def build(device):
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=64, use_cache=False)
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, capturable=device.type == "cuda")
    def collate(length, pad_to_multiple_of=1):
        padded = -(-length // pad_to_multiple_of) * pad_to_multiple_of
        return torch.nn.functional.pad(torch.randint(1, 64, (2, length)), (0, padded - length))
    def step(batch):
        batch = batch.to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    return step, [collate(lengthMULTIPLE) for length in (9, 11, 14, 17, 20, 23)], [model, optimizer]
"""
KWARGS = "gradient_checkpointing_kwargs={'use_reentrant': False, 'preserve_rng_state': False}"
STEPS = {
    "transformers: gradient_checkpointing_kwargs": (CHECKPOINT, {"ARGUMENT": ("", KWARGS)}),
    "torch_geometric: add_self_loops and size": (
        GRAPHS,
        {"LOOPS": ("", ", add_self_loops=False"), "SIZE": ("", ", size=3")},
    ),
    "diffusers: the average after the step": (AVERAGE, {"STEP": ("average.step(model.parameters())", "pass")}),
    "torchrl: the bounds as tensors": (PPO, {"BOUNDS": ("", "distribution_kwargs={'low': low, 'high': high},")}),
    "torchmetrics: the metric outside": (METRIC, {"UPDATE": ("accuracy.update(out.detach(), y)", "pass")}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_finding_goes_with_the_argument_that_its_remedy_names(tmp_path, name):
    library = name.partition(":")[0]
    pytest.importorskip(library)
    text, replaced = STEPS[name]
    texts = [text, text]
    for word, values in replaced.items():
        texts = [text.replace(word, value) for text, value in zip(texts, values, strict=True)]
    path = tmp_path / "my_step.py"

    path.write_text(texts[0])
    before = diagnose(f"{path}:build", torch.device("cpu"))
    path.write_text(texts[1])
    after = diagnose(f"{path}:build", torch.device("cpu"))

    arguments = {argument for (owner, *_), argument in ARGUMENTS.items() if owner == library}
    named = {finding.remedy for finding in before.findings} & arguments
    assert before.status in (5, 6) and named, before.text()
    assert not {finding.remedy for finding in after.findings} & arguments and after.status == 0, after.text()


@pytest.mark.parametrize(("multiple", "is_told"), [("", True), (", pad_to_multiple_of=32", False)])
def test_shapes_of_batches_go_with_pad_to_multiple_of(tmp_path, multiple, is_told):
    pytest.importorskip("transformers")
    path = tmp_path / "my_step.py"
    path.write_text(PADDED.replace("MULTIPLE", multiple))
    found = diagnose(f"{path}:build", torch.device("cpu"))
    assert ("pad_to_multiple_of" in found.text()) == is_told and found.status == 0, found.text()


TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=2, vocab_size=64)
rows = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones(8)} for ids in torch.randint(3, 64, (80, 8))]
args = TrainingArguments("out", report_to=[], num_train_epochs=1, use_cpu=True, save_strategy="no", logging_steps=50,
                         per_device_train_batch_size=2ARGUMENT)
train = Trainer(LlamaForCausalLM(config), args, train_dataset=rows).train
"""
LIGHTNING = """
import lightning, torch
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Linear(4, 4)
    def training_step(self, batch, index):
        loss = self.model(batch).square().mean()
        self.log("loss", lossARGUMENT)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
data = torch.utils.data.DataLoader(torch.randn(80, 4), batch_size=2)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
train = lambda: trainer.fit(Module(), data)
"""
SCRIPTS = {
    "transformers": (TRAINER, ("", ", logging_nan_inf_filter=False"), "logging_nan_inf_filter=False"),
    "lightning": (LIGHTNING, (", prog_bar=True", ", prog_bar=False"), "prog_bar=False"),
}


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_read_that_watch_sees_in_a_trainer_goes_with_the_argument_that_it_names(tmp_path, monkeypatch, library):
    pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    text, values, argument = SCRIPTS[library]
    told = []
    for value in values:
        scope = {"__name__": "script"}
        exec(compile(text.replace("ARGUMENT", value), str(tmp_path / "train.py"), "exec"), scope)
        with reads_noted() as record:
            scope["train"]()
        told.append([call for call in record.refused if argument in argument_for(call.place)])
        skipped = {call.place.function for call in record.refused if call.why_not == "in a capture"}
        assert library != "transformers" or "_ignore_causal_mask_sdpa" in skipped
    assert told[0] and not told[1]


def test_a_mask_that_masks_nothing_has_its_note_and_no_mask_has_none(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "my_step.py"
    mask, texts = '"attention_mask": torch.ones_like(rows), ', []
    for removed in ("", mask):
        path.write_text(GPT2.replace(removed, ""))
        texts.append(diagnose(f"{path}:build", torch.device("cpu")).text())
    assert ["no attention_mask where nothing is padded" in text for text in texts] == [True, False], texts


GPT2 = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

def build(device):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=16))
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, 100)
    ids = [torch.randint(1, 64, (2, 8)) for _ in range(4)]
    batches = [{"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows.clone()} for rows in ids]
    def step(batch):
        loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return loss.item()
    return step, batches, [model, optimizer, schedule]
"""
# Words of a message -> what a user does who obeys it.
OBEYED = {
    "read it after the step: return it": ("loss.item()", "loss"),
    "AdamW(..., fused=True, capturable=True)": ("lr=5e-5", "lr=5e-5, fused=True, capturable=device.type == 'cuda'"),
    "lr=torch.tensor(1e-3, device=device)": ("lr=5e-5", "lr=torch.tensor(5e-5, device=device)"),
    "call schedule.step() outside of the step": ("        schedule.step()\n", ""),
}


def test_gpt2_mended_by_the_messages_alone_ends_in_a_graph_that_trains_as_eager_does(tmp_path):
    """Run, obey the message, and run again."""
    pytest.importorskip("transformers")
    path, text, statuses = tmp_path / "my_step.py", GPT2, []
    while len(statuses) < 5 and 0 not in statuses:
        path.write_text(text)
        found = diagnose(f"{path}:build", torch.device("cpu"))
        statuses.append(found.status)
        for words, (old, new) in OBEYED.items():
            text = text.replace(old, new) if words in found.text() else text
    assert statuses[0] == 6 and statuses[-1] == 0 and text.count("device=device") == 1, (statuses, found.text())
    assert found.outcomes[WHOLE.title] == EQUAL and found.text().startswith("Nothing stands against a graph.")


def test_another_version_of_a_library_has_no_entry():
    place = Place("/venv/lib/site-packages/transformers/modeling_layers.py:9", "my_step.py:3", function="__call__")
    assert library_of(place.line) == "transformers" and "kwargs" in argument_for(place)
    for line in ("/venv/lib/site-packages/transformers/layers.py:9", "/home/transformers/modeling_layers.py:9"):
        assert not argument_for(Place(line, "my_step.py:3", function="__call__"))
    assert not argument_for(Place(place.line, "my_step.py:3", function="forward"))
    assert with_library(place) == f"my_step.py:3 (in transformers, at {place.line})"
    assert with_library(Place("my_step.py:3", "my_step.py:3")) == "my_step.py:3"
