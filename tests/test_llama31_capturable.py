"""llama31/capturable: the table of what cannot be captured, row by row, its page, and the flags that meet it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from llama31 import capturable
from llama31.capturable import RULES, Setting, refuse
from llama31.config import PRESETS, VARIANTS, require_capturable
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
# What a rule refuses -> (settings that it refuses, settings as near to them as can be that may be captured).
CASES = {
    "an unknown implementation": ([{"impl": "nope"}], [{"impl": "none"}, {"impl": "layer"}]),
    "an unknown scope": (
        [{"impl": "transformer_engine", "scope": "attention"}],
        [{"impl": "transformer_engine", "scope": "attn"}],
    ),
    "a NaN check with a graph over whole microbatches": (
        [{"nan_check": True, **more} for more in ({}, {"impl": "chunk"}, {"impl": "local", "scope": "full_iteration"})],
        [{"impl": "none", "nan_check": True}, {"impl": "layer", "nan_check": True}],
    ),
    "CPU offload with graphs of layers or microbatches": (
        [{"impl": impl, "cpu_offload": True} for impl in ("layer", "chunk", "local", "transformer_engine")],
        [{"cpu_offload": True}, {"impl": "none", "cpu_offload": True}],
    ),
    "sequences of changing length": (
        [{"impl": impl, "changing_lengths": True} for impl in ("layer", "chunk", "full_iteration", "local")],
        [{"impl": "none", "changing_lengths": True}],
    ),
    "a number of microbatches that changes, with a graph over all of them": (
        [{"changing_microbatches": True}],
        [{"impl": "chunk", "changing_microbatches": True}, {"impl": "layer", "changing_microbatches": True}],
    ),
    "clipping with a host read in a captured optimizer": (
        [{"optimizer": True, "clip_on_host": True}],
        [{"clip_on_host": True}, {"optimizer": True}],
    ),
    "expandable segments while NCCL registers buffers in captures": (
        [{"expandable_segments": True}, {"impl": "transformer_engine", "expandable_segments": True}],
        [{"expandable_segments": True, "nccl_graph_register": False}, {"impl": "none", "expandable_segments": True}],
    ),
    "dropout whose generator is not registered": (
        [{"dropout": 0.1, "registered_generator": False}],
        [{"dropout": 0.1}, {"registered_generator": False}],
    ),
    "scope full beside other scopes": (
        [{"impl": "transformer_engine", "scope": "full,attn"}],
        [{"impl": "transformer_engine", "scope": "full"}, {"impl": "transformer_engine"}],
    ),
    "scopes of modules with the whole iteration": (
        [{"scope": "attn"}, {"impl": "local", "scope": "full_iteration,mlp"}],
        [{}, {"impl": "local", "scope": "full_iteration"}],
    ),
    "scopes of experts or Mamba in a dense model": (
        [{"impl": "transformer_engine", "scope": scope} for scope in ("moe", "moe_router,moe_preprocess", "mamba")],
        [{"impl": "transformer_engine", "scope": "attn,mlp"}],
    ),
    "scopes of modules with implementation local": (
        [{"impl": "local", "scope": "attn"}, {"impl": "local", "scope": "mlp"}, {"impl": "local", "scope": "full"}],
        [{"impl": "local"}],
    ),
    "scope full_iteration with implementation transformer_engine": (
        [{"impl": "transformer_engine", "scope": "full_iteration"}],
        [{"impl": "local", "scope": "full_iteration"}],
    ),
    "recompute of full granularity with Megatron's graphs of layers": (
        [{"impl": "transformer_engine", "full_recompute": True}, {"impl": "local", "full_recompute": True}],
        [{"full_recompute": True}, {"impl": "local", "scope": "full_iteration", "full_recompute": True}],
    ),
}


def test_every_row_has_its_cases():
    assert [rule.what for rule in RULES] == list(CASES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_row(rule):
    refused, allowed = CASES[rule.what]
    for fields in refused:
        with pytest.raises(ValueError) as caught:
            refuse(Setting(**fields))
        assert str(caught.value) == f"cannot capture {rule.what}: {rule.why}; take {rule.instead}", fields
    for fields in allowed:
        refuse(Setting(**fields))
    for text in (rule.what, rule.why, rule.instead):
        assert text.isascii() and "|" not in text and "\n" not in text


def test_the_page_is_the_table():
    page = (ROOT / "docs" / "what_cannot_be_captured.md").read_text()
    assert page.endswith(f"\n\n{capturable.table()}\n")


def test_the_command_answers(capsys):
    capturable.main([])
    assert capsys.readouterr().out == capturable.table() + "\n"
    capturable.main(["--impl", "chunk", "--changing-microbatches", "true"])
    assert "nothing in the table" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        capturable.main(["--impl", "transformer_engine", "--scope", "attn,moe"])
    assert caught.value.code == 2
    answer = capsys.readouterr()
    assert answer.out == "" and answer.err.count("\n") == 1 and "in a dense model" in answer.err


# --- the script's own flags and environment

TINY = PRESETS["tiny"]
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
WHOLE = ("chunk", "graph", "full_step")


@pytest.mark.parametrize(
    "changes, environment, refused",
    [
        ({}, {}, ()),
        ({"nan_checks": True}, {}, WHOLE),
        ({"ramp": "1,2,3"}, {}, ("graph", "full_step")),
        ({"ramp": "2,2"}, {}, ()),
        ({"clip": "host"}, {}, ("full_step",)),
        ({}, EXPANDABLE, ("layer", *WHOLE)),
        ({}, {**EXPANDABLE, "NCCL_GRAPH_REGISTER": "0"}, ()),
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"}, ("layer", *WHOLE)),
        ({"pp": 2}, {}, ()),
    ],
)
def test_flags_meet_the_table(changes, environment, refused):
    config = replace(TINY, **changes)
    for variant in VARIANTS:
        if variant in refused:
            with pytest.raises(ValueError):
                require_capturable(config, variant, environment)
        else:
            require_capturable(config, variant, environment)


def test_a_refusal_is_one_line_before_anything_is_built():
    arguments = ["--preset", "tiny", "--variant", "graph", "--ramp", "1,2,3"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    answer = forked.run("llama31.train", arguments, environment, timeout_s=100)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), answer
    assert "--variant chunk" in answer.stderr
