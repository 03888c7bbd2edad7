"""Steps of libraries before and after the argument that a finding names: the finding goes."""

import pytest
import torch

from graph_worth.your_step.doctor import diagnose
from graph_worth.your_step.libraries import ARGUMENTS, argument_for, library_of, with_library
from graph_worth.your_step.place import Place

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
KWARGS = "gradient_checkpointing_kwargs={'use_reentrant': False, 'preserve_rng_state': False}"
STEPS = {
    "transformers: gradient_checkpointing_kwargs": (CHECKPOINT, {"ARGUMENT": ("", KWARGS)}),
    "torch_geometric: add_self_loops and size": (
        GRAPHS,
        {"LOOPS": ("", ", add_self_loops=False"), "SIZE": ("", ", size=3")},
    ),
    "diffusers: the average after the step": (AVERAGE, {"STEP": ("average.step(model.parameters())", "pass")}),
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


def test_another_version_of_a_library_has_no_entry():
    place = Place("/venv/lib/site-packages/transformers/modeling_layers.py:9", "my_step.py:3", function="__call__")
    assert library_of(place.line) == "transformers" and "kwargs" in argument_for(place)
    for line in ("/venv/lib/site-packages/transformers/layers.py:9", "/home/transformers/modeling_layers.py:9"):
        assert not argument_for(Place(line, "my_step.py:3", function="__call__"))
    assert not argument_for(Place(place.line, "my_step.py:3", function="forward"))
    assert with_library(place) == f"my_step.py:3 (in transformers, at {place.line})"
    assert with_library(Place("my_step.py:3", "my_step.py:3")) == "my_step.py:3"
