"""NVIDIA's published figures: complete, sourced, and of variants and presets that the models here have."""

import importlib
import re

from benchmarks.pages.published import of_model, published, title_of
from graph_worth.harness import script
from graph_worth.harness.files.facts import stem


def test_the_models_once_each():
    assert [each.model for each in published()] == sorted(script.models())
    assert of_model("rnnt").title == "RNN-T" and of_model("other") is None
    assert title_of("other", "bench") == "other" and title_of("gpt3", "rank") == "GPT-3 175B"
    names = [title_of("moe", preset) for preset in ("bench", "gpt_oss_l8", "gpt_oss_120b_fwd_bwd")]
    assert names == ["Qwen3-30B-A3B", "GPT-OSS-20B", "GPT-OSS-120B"]


def test_variants_and_presets_are_those_of_the_models_and_each_says_what_differs():
    for each in published():
        config = importlib.import_module(f"{each.model}.config")
        assert each.variant in script.describe(each.model, [])["variants"], each.model
        assert set(each.presets) <= set(config.PRESETS) and "bench" in each.presets and all(each.presets.values())
        assert stem("bench-l6") == "bench" in each.presets
        assert not any(preset.startswith("tiny") for preset in each.presets)
    # Another model than the submission's.
    assert not any("full" in of_model(model).presets for model in ("llama31", "llama2_lora"))


def test_lines_of_the_front_page_are_presets_of_the_models():
    for each in published():
        config = importlib.import_module(f"{each.model}.config")
        assert set(each.headlines) <= set(config.PRESETS) and "bench" in each.headlines, each.model
        assert each.submitted is None or re.fullmatch(r"v\d\.\d", each.submitted)
    assert title_of("llama31", "full") == "Llama 3.1 8B"


def test_every_figure_has_a_source_and_is_plain_text():
    for each in published():
        assert re.fullmatch(
            r"https://(docs\.nvidia\.com/[a-zA-Z0-9/-]+\.html|github\.com/NVIDIA-NeMo/[a-zA-Z0-9/-]+\.md)", each.source
        )
        texts = [text for text in vars(each).values() if isinstance(text, str)]
        assert all(text and text.isascii() and "|" not in text and text == text.strip() for text in texts)
