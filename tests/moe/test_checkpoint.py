"""Hugging Face checkpoints: a tiny one of transformers has the same logits here, and another model is refused."""

import json
from dataclasses import replace

import pytest
import torch

from moe.config import PRESETS
from moe.state import opened
from tests.helpers.moe_case import logits, make

transformers = pytest.importorskip("transformers")
PRESET = {"qwen3": "tiny", "gpt_oss": "tiny_gpt_oss"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """checkpoints(family): (folder, the model that was saved there)."""
    made = {}

    def make_one(family):
        if family in made:
            return made[family]
        c, folder = PRESETS[PRESET[family]], tmp_path_factory.mktemp(family)
        sizes = {"num_hidden_layers": c.layers, "hidden_size": c.hidden, "num_attention_heads": c.heads}
        sizes |= {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab}
        sizes |= {"num_experts_per_tok": c.top_k, "rms_norm_eps": c.norm_eps, "attn_implementation": "eager"}
        torch.manual_seed(0)
        if family == "qwen3":
            sizes |= {"num_experts": c.experts, "moe_intermediate_size": c.ffn, "norm_topk_prob": True}
            rope = {"rope_type": "default", "rope_theta": c.rope_theta}
            config = transformers.Qwen3MoeConfig(**sizes, rope_parameters=rope)
            model = transformers.Qwen3MoeForCausalLM(config)
        else:
            sizes |= {"num_local_experts": c.experts, "intermediate_size": c.ffn, "sliding_window": c.window}
            model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
        for parameter in model.parameters():  # biases and sinks too, which start at zero
            parameter.data.normal_(0, 0.2)
        model.save_pretrained(folder)
        made[family] = (folder, model)
        return made[family]

    return make_one


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_logits_are_those_of_transformers(checkpoints, family):
    folder, model = checkpoints(family)
    state = make(PRESET[family], dtype=torch.float32, checkpoint=str(folder))
    with torch.no_grad():
        expected = model(state.inputs["tokens"][:1]).logits[0]
    torch.testing.assert_close(logits(state), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        ("gpt_oss", {}, "model_type qwen3_moe"),
        ("qwen3", {"experts": 16}, "take --experts 8"),
        ("qwen3", {"layers": 3}, "take --layers 2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_in_one_line(checkpoints, family, changes, words):
    config = replace(PRESETS[PRESET[family]], checkpoint=str(checkpoints("qwen3")[0]), **changes)
    with pytest.raises(ValueError, match="--checkpoint") as error:
        opened(config)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "family, changes, words",
    [
        (
            "gpt_oss",
            {"layer_types": ["full_attention"] * 2},
            "layer_types in another order, only in turns",
        ),
        ("gpt_oss", {"layer_types": 5}, "layer_types in another order"),
        ("gpt_oss", {"rope_parameters": {"truncate": True}}, "truncate True, only False is built"),
        ("qwen3", {"hidden_size": 10**400}, "sizes that are no numbers"),
    ],
)
def test_a_config_of_another_architecture_is_refused_in_one_line(checkpoints, tmp_path, family, changes, words):
    described = json.loads((checkpoints(family)[0] / "config.json").read_text())
    for name, value in changes.items():
        described[name] = described[name] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="--checkpoint") as error:
        opened(replace(PRESETS[PRESET[family]], checkpoint=str(tmp_path)))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_quantised_weights_are_refused(tmp_path):
    described = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="quantization_config mxfp4"):
        opened(replace(PRESETS["tiny_gpt_oss"], checkpoint=str(tmp_path)))
