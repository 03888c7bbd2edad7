"""Megatron-Core's builds: refusals, the order of q, k and v, and on a GPU captures beside its eager step."""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gpt3.config
import gpt3.megatron
import gpt3.state
import llama31.config
import llama31.megatron
import llama31.model
import llama31.state
from common import megatron
from graph_worth import Unsupported
from llama31.train import train_microbatch

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("gpt3", "llama31")
OURS = {"gpt3": gpt3.megatron, "llama31": llama31.megatron}
TINY = {"gpt3": gpt3.config.PRESETS["tiny"], "llama31": llama31.config.PRESETS["tiny"]}
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="no megatron-core")


@pytest.mark.parametrize(
    "version, installed, pattern",
    [
        ((3, 11, 9), "0.19.2", r"0\.19\.2 needs Python 3\.12, this is \d"),
        ((3, 12, 3), None, r"none is installed: pip install .*megatron-core==0\.19\.2"),
        ((3, 12, 3), "0.18.0", r"0\.18\.0 is installed: pip install .*megatron-core==0\.19\.2"),
    ],
)
def test_another_version_or_python_is_refused_with_the_line_that_installs_it(monkeypatch, version, installed, pattern):
    def version_of(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version_of)
    monkeypatch.setattr(sys, "version_info", version)
    fault = megatron.fault_of("fp8")
    assert re.search(pattern, fault) and "\n" not in fault


def test_without_transformer_engine_or_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: megatron.VERSION)
    monkeypatch.setattr(sys, "version_info", (3, 12, 3))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "need a GPU" in megatron.fault_of("fp8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron.transformer_engine, "te_fault", lambda fp8: "it is not usable: make te")
    assert "make te" in megatron.fault_of("fp8")


OF_LLAMA31 = [{"ramp": "1,2"}, {"weights": "fp8"}, {"moments": "bf16"}, {"validate_every": 2}, {"keep": "least"}]


@pytest.mark.parametrize(
    "model, field",
    [("gpt3", field) for field in ({"tp": 2}, {"chunks": 2}, {"zero1": True}, {"precision": "fp32"})]
    + [("llama31", field) for field in ({"tp": 2}, {"precision": "nvfp4"}, {"optimizer": "none"}, *OF_LLAMA31)],
)
def test_what_megatrons_build_does_not_have_is_refused(model, field):
    with pytest.raises(ValueError, match="--layer"):
        replace(TINY[model], layer="megatron", **field)


@pytest.mark.parametrize("model", MODELS)
def test_by_hand_a_refusal_is_one_line(model):
    command = [sys.executable, "-m", f"{model}.train", "--preset", "tiny", "--layer", "megatron"]
    answer = subprocess.run(
        [*command, "--variant", "megatron_full"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if torch.cuda.is_available() and importlib.util.find_spec("megatron"):
        pytest.skip("it runs here")
    assert answer.returncode == 2 and answer.stderr.count("\n") == 1 and "--layer megatron: " in answer.stderr


def test_names_are_those_of_the_te_build():
    """Of parameters with random numbers: the others start at zero."""
    layer, names = "decoder.layers.11.", ("self_attention.linear_qkv.weight", "mlp.linear_fc2.weight")
    assert {gpt3.megatron.our_name(layer + name) for name in names} == {
        "layers.11.self_attention.layernorm_qkv.weight",
        "layers.11.layernorm_mlp.fc2_weight",
    }
    assert gpt3.megatron.our_name("embedding.word_embeddings.weight") == "embedding.tokens"
    assert [llama31.megatron.our_name(layer + name) for name in names] == [("qkv", 11), ("fc2", 11)]
    assert llama31.megatron.our_name("output_layer.weight") == ("head", None)


@needs_megatron
@pytest.mark.parametrize("name", MODELS)
def test_equal_parameters_give_equal_losses_and_gradients_on_the_cpu(name, monkeypatch):
    """By Megatron's plain layers in FP32: q, k and v are interleaved alike, and so are loss and embedding."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "head_dim": 16, "ffn": 96, "vocab": 100, "sequence": 12}
    sizes |= {"precision": "bf16", "microbatch": 2, "microbatches": 1, "batches": 1}
    config = replace(TINY[name], layer="torch", **sizes)
    model = plain_model(name, config, monkeypatch)
    parameters, loss_of = {"gpt3": of_gpt3, "llama31": of_llama31}[name](config)
    pairs = {theirs: parameters[plain_name(name, theirs)] for theirs, _ in model.named_parameters()}
    assert len({id(parameter) for parameter in pairs.values()}) == len(parameters)
    with torch.no_grad():
        for theirs, parameter in model.named_parameters():
            # Biases and norms, too, which start at one value.
            pairs[theirs].normal_(0, 0.2, generator=torch.Generator().manual_seed(len(theirs)))
            zero_centred = name == "gpt3" and "layernorm" in theirs and theirs.endswith("weight")
            parameter.copy_(pairs[theirs].view_as(parameter) + zero_centred)
    inputs, loss = loss_of()
    tokens, targets = (inputs[kind][0].t() for kind in ("tokens", "targets"))
    hidden_tokens = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    logits = model(tokens, torch.arange(12).expand(2, -1), hidden_tokens)
    theirs = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    theirs.backward()
    assert theirs.item() == pytest.approx(loss.item(), rel=1e-6)
    for theirs, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, pairs[theirs].main_grad.view_as(parameter), rtol=1e-4, atol=1e-6)


@needs_megatron
def test_the_rotary_embedding_has_our_angles_on_the_cpu(monkeypatch):
    """Up to FP32's rounding of 4096 times a frequency, which the scaling changes by up to a factor of eight."""
    config = replace(TINY["llama31"], head_dim=128, sequence=4096, precision="bf16")
    theirs = plain_model("llama31", config, monkeypatch).rotary_pos_emb(4096)[:, 0, 0]
    torch.testing.assert_close(theirs, llama31.model.rope_angles(config).repeat(1, 2), rtol=1e-6, atol=1e-6)


def of_gpt3(config):
    """Our parameters by their names, and a function that returns the inputs and the loss after its backward pass."""
    ours = gpt3.state.State(replace(config, precision="fp32"), torch.device("cpu"))

    def loss_of():
        ours.begin_step(0, accumulate_all=True)
        hidden = ours.embedding(ours.inputs["tokens"][0])
        for layer in ours.layers:
            hidden = layer(hidden, is_first_microbatch=True)
        loss = ours.microbatch_loss(hidden, 0)
        loss.backward()
        return ours.inputs, loss

    return dict(ours.named_parameters()), loss_of


def of_llama31(config):
    ours = llama31.state.State(replace(config, main_grad="fp32"), torch.device("cpu"), dtype=torch.float32)

    def loss_of():
        ours.begin_step(0)
        train_microbatch(ours, 0)
        return ours.inputs, ours.microbatch_losses[0]

    return {(name, number): part.parameter for name, number, part in ours.parts}, loss_of


def plain_model(name, config, monkeypatch):
    megatron.start(torch.device("cpu"), config.microbatches)
    from megatron.core import utils
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig

    # On a GPU alone: scratch memory, random states of its own for a dropout, of which there is none, and angles.
    empty = staticmethod(lambda shape, dtype, *rest, **more: torch.empty(shape, dtype=dtype))
    monkeypatch.setattr(utils.GlobalMemoryBuffer, "get_tensor", empty)
    monkeypatch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    settings = OURS[name].settings(config)
    fields = {key: value for key, value in settings["options"].items() if "dtype" not in key and "fusion" not in key}
    fields |= {"bf16": False, "layernorm_zero_centered_gamma": False}
    fields |= {"use_cpu_initialization": True, "bias_dropout_fusion": False}
    if name == "gpt3":
        # tanh's approximation, as Megatron's fused bias and GELU and as Transformer Engine's.
        fields["activation_func"] = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=fields.get("normalization"))
    more = settings["model"] | {"max_sequence_length": config.sequence}
    return GPTModel(TransformerConfig(**fields), spec, parallel_output=True, **more)


def plain_name(model, name):
    """The name in our plain build of a parameter of Megatron's plain layers."""
    words = {
        "gpt3": {
            "self_attention.linear_qkv": "qkv",
            "self_attention.linear_proj": "proj",
            "mlp.linear_fc": "fc",
            "input_layernorm": "norm_1",
            "pre_mlp_layernorm": "norm_2",
            "decoder.final_layernorm": "embedding.final_norm",
        },
        "llama31": {"decoder.final_layernorm.weight": "final_norm"},
    }
    words["llama31"] |= {"input_layernorm.weight": "norm1", "pre_mlp_layernorm.weight": "norm2"}
    for theirs, mine in words[model].items():
        name = name.replace(theirs, mine)
    return OURS[model].our_name(name)


@needs_megatron
def test_megatrons_refusal_becomes_the_message(monkeypatch):
    state = object.__new__(megatron.MegatronState)
    options = gpt3.megatron.settings(replace(TINY["gpt3"], precision="bf16"))["options"]
    state._options = options | {"recompute_granularity": "full"}
    state._options |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    with pytest.raises(Unsupported, match="Megatron-Core refuses: full recompute is only supported with full iter"):
        state.configured("local")
    assert state.configured("full_iteration").cuda_graph_impl == "full_iteration"


@pytest.mark.gpu
@needs_megatron
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("name", ["megatron_local", "megatron_te", "megatron_full"])
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_a_capture_trains_as_megatrons_eager(tmp_path, model, name, precision):
    if fault := megatron.fault_of(precision):
        pytest.skip(fault)
    eager, graphs = (record(tmp_path, model, variant, "megatron", precision) for variant in ("megatron_eager", name))
    if name == "megatron_local":
        assert graphs["losses"] == pytest.approx(eager["losses"], rel=1e-2)
    else:
        assert len(set(eager["state_hashes"])) == 20 and graphs["state_hashes"] == eager["state_hashes"]


@pytest.mark.gpu
@needs_megatron
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu_the_first_loss_is_ours(tmp_path, model):
    if fault := megatron.fault_of("fp8"):
        pytest.skip(fault)
    ours = record(tmp_path, model, "eager", "te", "fp8")
    theirs = record(tmp_path, model, "megatron_eager", "megatron", "fp8")
    assert theirs["losses"][0] == pytest.approx(ours["losses"][0], rel=1e-3)


def record(folder, model, variant, layer, precision):
    path = folder / f"{variant}.json"
    flags = ("--preset", "tiny", "--layer", layer, "--precision", precision, "--parity", "--record", str(path))
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    command = [sys.executable, "-m", f"{model}.train", "--variant", variant, *flags]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout[-2000:] + answer.stderr[-2000:]
    return json.loads(path.read_text())
