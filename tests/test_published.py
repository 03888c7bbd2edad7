"""NVIDIA's published figures: complete, sourced, and numbers that stand in the words."""

import importlib
import re

from benchmarks import ROOT
from benchmarks.published import PUBLISHED, of_model


def test_the_five_models_once_each():
    assert [each.model for each in PUBLISHED] == ["gpt3", "llama2_lora", "llama31", "rnnt", "stable_diffusion"]
    assert of_model("rnnt").title == "RNN-T" and of_model("other") is None


def test_the_variant_of_nvidias_mechanism_is_one_of_the_models():
    for each in PUBLISHED:
        if (ROOT / each.model / "config.py").is_file():
            assert each.variant in importlib.import_module(f"{each.model}.config").VARIANTS, each.model
    assert of_model("gpt3").variant == "graph_te"


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


def test_what_was_measured_here_is_nowhere_called_the_same_configuration():
    """Each submission ran on tens of GPUs or more."""
    assert all(each.same.startswith("no: ") for each in PUBLISHED)
