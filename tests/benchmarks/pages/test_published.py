"""NVIDIA's published figures: complete, sourced, and numbers that stand in the words."""

import importlib
import re

import pytest

from benchmarks import ROOT
from benchmarks.pages.published import PUBLISHED, RATES, of_model, rate_of, stem


def test_the_five_models_once_each():
    assert [each.model for each in PUBLISHED] == ["gpt3", "llama2_lora", "llama31", "rnnt", "stable_diffusion"]
    assert of_model("rnnt").title == "RNN-T" and of_model("other") is None


def test_the_variant_of_nvidias_mechanism_is_one_of_the_models():
    for each in PUBLISHED:
        if (ROOT / each.model / "config.py").is_file():
            variants = importlib.import_module(f"{each.model}.config").VARIANTS
            assert each.variant in variants, each.model
    assert of_model("gpt3").variant == "graph_layer_te"


def test_every_figure_has_a_source_and_is_plain_text():
    for each in PUBLISHED:
        assert re.fullmatch(r"https://docs\.nvidia\.com/dl-cuda-graph/latest/examples/[a-z0-9-]+\.html", each.source)
        for text in vars(each).values():
            if isinstance(text, str):
                assert text and text.isascii() and "|" not in text
                assert text == text.strip()


def test_numbers_are_those_of_the_words():
    for each in PUBLISHED:
        ratios = {float(number) for number in re.findall(r"([\d.]+)x", each.gain)}
        ratios |= {round(1 + float(number) / 100, 4) for number in re.findall(r"([\d.]+) %", each.gain)}
        assert {ratio for ratio, _ in each.speedups} == ratios, each.model
        ends = {float(number) for number in re.findall(r"([\d.]+)x", each.gain_range)}
        assert ends <= ratios, each.model
        if len(ends) == 2:
            assert (min(ends), max(ends)) == (min(ratios), max(ratios)), each.model
    assert of_model("rnnt").speedups == ()


def test_what_stands_beside_a_submission_are_presets_of_its_model_and_each_says_what_differs():
    for each in PUBLISHED:
        presets = importlib.import_module(f"{each.model}.config").PRESETS
        assert set(each.presets) <= set(presets) and "bench" in each.presets and all(each.presets.values())
        assert stem("bench-l6") == "bench" in each.presets
        assert not any(preset.startswith("tiny") for preset in each.presets)
    assert not any("full" in of_model(model).presets for model in ("llama31", "llama2_lora"))


def test_a_rate_names_where_it_was_reached_and_has_its_source():
    [rate] = RATES
    assert rate_of("llama2_lora") is rate and rate_of("gpt3") is None
    assert rate.source.startswith("https://github.com/mlcommons/training_results_v4.1/") and "8 H200" in rate.where
    samples, tflop = (
        float(number.replace(",", "")) for number in re.findall(r"([\d.,]+) (?:samples|TFLOP)", rate.remark)
    )
    assert round(samples * tflop / 8) == rate.tflops
    # The model here counts the same.
    config = importlib.import_module("llama2_lora.config")
    assert config.flops_per_step(config.PRESETS["full"]) / 1e12 == pytest.approx(tflop, rel=1e-4)
