"""common/variant_table and each model's table: constructors that exist, old names, mistakes, no torch."""

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from common import config
from common.variant_table import Declared, construct, resolved, table

ROOT = Path(__file__).resolve().parents[2]


def declared(model):
    """A model's table; empty where its variants are declared in another way."""
    try:
        variants = getattr(importlib.import_module(f"{model}.variants"), "VARIANTS", {})
    except ModuleNotFoundError:
        return {}
    return {name: each for name, each in variants.items() if isinstance(each, Declared)}


TABLES = {path.parent.name: declared(path.parent.name) for path in sorted(ROOT.glob("*/train.py"))}
TABLES = {model: variants for model, variants in TABLES.items() if variants}
EACH = [(model, name) for model, variants in TABLES.items() for name in variants]
RENAMED = [(model, each) for model, variants in TABLES.items() for each in variants.values() if each.formerly]


def answer(model, *arguments):
    command = [sys.executable, "-m", f"{model}.train", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("model, name", EACH)
def test_constructors_exist_and_take_their_options(model, name):
    variant = TABLES[model][name]
    make = resolved(variant.make)
    assert callable(make) and variant.help and "\n" not in variant.help
    inspect.signature(make).bind("state", **variant.options)
    for value in variant.options.values():
        if isinstance(value, str) and ":" in value:
            assert resolved(value) is not None


@pytest.mark.parametrize("model", TABLES)
def test_a_table_is_in_the_words_of_the_harness(model):
    variants = TABLES[model]
    assert "eager" in variants and variants["eager"].headline
    for name, each in variants.items():
        assert name == each.name and set(each.traits) <= set(config.TRAITS)
        assert each.parity in (None, "bitwise") or isinstance(each.parity, float)
    former = [each.formerly for each in variants.values() if each.formerly]
    assert len(set(former)) == len(former) and not set(former) & set(variants)


@pytest.mark.parametrize("model", {model: None for model, _ in RENAMED})
def test_an_old_name_is_answered_with_the_new_one(model):
    for each in [each for own, each in RENAMED if own == model]:
        with pytest.raises(ValueError, match=f"^variant '{each.formerly}' is now '{each.name}'$"):
            config.require_known("variant", each.formerly, TABLES[model])
    said = answer(model, "--variant", each.formerly)
    assert said.returncode == 2 and said.stdout == ""
    assert said.stderr == f"python -m {model}.train: variant {each.formerly!r} is now {each.name!r}\n"


@pytest.mark.parametrize("model", TABLES)
def test_describe_and_help_tell_of_the_table(model):
    variants, said = TABLES[model], json.loads(answer(model, "--describe").stdout)
    assert said["variants"] == {name: each.help for name, each in variants.items()}
    assert said["kinds"] == {name: each.kind for name, each in variants.items()}
    assert said["formerly"] == {each.formerly: name for name, each in variants.items() if each.formerly}
    assert said["headline"] == [name for name, each in variants.items() if each.headline]
    assert set(said["builds"]) >= {build for builds in said["variant_builds"].values() for build in builds} >= {""}
    text = answer(model, "--help").stdout
    assert all(f"{name} " in text and each.help in text for name, each in variants.items())


def test_two_variants_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two variants have the same name"):
        table(Declared("eager", "x", "eager", "a:b"), Declared("eager", "y", "eager", "a:c"))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"make": "stable_diffusion.train.eager"}, "variant eager: constructor 'stable_diffusion.train.eager' is not"),
        ({"kind": "fast"}, "variant eager: kind 'fast' is not one of eager, graph, compile"),
        ({"reference": "none"}, "variant eager: its reference 'none' is no variant"),
    ],
)
def test_mistakes_of_a_declaration_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        table(Declared(**({"name": "eager", "help": "x", "kind": "eager", "make": "a:b"} | changes)))


def test_options_with_a_colon_are_objects():
    variant = Declared("x", "x", "eager", "builtins:dict", options={"step": "math:floor", "mode": "plain", "count": 3})
    floor = resolved("math:floor")
    assert construct(variant, {"state": 1}) == {"state": 1, "step": floor, "mode": "plain", "count": 3}


def test_a_promise_may_depend_on_the_config():
    variant = Declared("x", "x", "graph", "a:b", graphs=lambda config: 2 * config, replays=None)
    assert variant.promised(3) == (6, None)
