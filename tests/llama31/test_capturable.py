"""llama31/capturable: the table of what cannot be captured, row by row, its page, and the flags that meet it."""

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest

from common.config import Arguments, Run
from llama31 import capturable
from llama31.capturable import RULES, TABLE, Setting
from llama31.config import PRESETS, Config, require_capturable, require_runnable
from llama31.state import hyperparameters
from llama31.variants import VARIANTS
from tests.helpers import forked

ROOT = Path(__file__).resolve().parents[2]
TE, LOCAL = {"variant": "transformer_engine"}, {"variant": "local"}
FULL_ITERATION = LOCAL | {"scope": "full_iteration"}
# What a rule refuses -> (settings that it refuses, settings as near to them as can be that may be captured).
CASES = {
    "a NaN check with a graph over whole microbatches": (
        [{"nan_checks": True, **more} for more in ({}, {"variant": "graph_microbatch"}, FULL_ITERATION)],
        [{"variant": "eager", "nan_checks": True}, {"variant": "graph_layer", "nan_checks": True}],
    ),
    "CPU offload with graphs of layers or microbatches": (
        [{"variant": "graph_layer", "cpu_offload": True}, TE | {"cpu_offload": True}],
        [{"cpu_offload": True}, {"variant": "eager", "cpu_offload": True}],
    ),
    "sequences of changing length": (
        [{"changing_lengths": True}, LOCAL | {"changing_lengths": True}],
        [{"variant": "eager", "changing_lengths": True}],
    ),
    "a number of microbatches that changes, with a graph over all of them": (
        [{"ramp": "4,6,8"}, {"variant": "graph_step", "ramp": "1, 2"}],
        [{"variant": "graph_microbatch", "ramp": "4,6,8"}, {"ramp": "4, 4"}, {"ramp": "4"}],
    ),
    "clipping with a host read in a captured optimizer": (
        [{"variant": "graph_step", "clip": "host"}],
        [{"clip": "host"}, {"variant": "graph_step"}],
    ),
    "expandable segments while NCCL registers buffers in captures": (
        [{"expandable_segments": True}, TE | {"expandable_segments": True}],
        [{"expandable_segments": True, "nccl_graph_register": False}],
    ),
    "dropout whose generator is not registered": (
        [{"dropout": 0.1, "registered_generator": False}],
        [{"dropout": 0.1}, {"registered_generator": False}],
    ),
    "scope full beside other scopes": ([TE | {"scope": "full,attn"}], [TE | {"scope": "full"}, TE]),
    "scopes of modules with the whole iteration": ([{"scope": "attn"}, LOCAL | {"scope": "full_iteration,mlp"}], [{}]),
    "scopes of experts or Mamba in a dense model": (
        [TE | {"scope": scope} for scope in ("moe_router,moe_preprocess", "mamba")],
        [TE | {"scope": "attn,mlp"}],
    ),
    "scopes of modules with variant local": ([LOCAL | {"scope": scope} for scope in ("attn", "full")], [LOCAL]),
    "scope full_iteration with variant transformer_engine": ([TE | {"scope": "full_iteration"}], [FULL_ITERATION]),
    "recompute of full granularity with Megatron's graphs of layers": (
        [TE | {"full_recompute": True}, LOCAL | {"full_recompute": True}],
        [{"full_recompute": True}, FULL_ITERATION | {"full_recompute": True}],
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_row(rule):
    refused, allowed = CASES[rule.what]
    for given in refused:
        fault = f"{rule.what}: {rule.why}; take {rule.instead}"
        assert fault in TABLE.faults(Setting(**given)), given
        with pytest.raises(ValueError) as caught:
            TABLE.refuse(Setting(**given))
        assert str(caught.value).startswith("cannot capture ") and fault in str(caught.value), given
    for given in allowed:
        TABLE.refuse(Setting(**given))
    for text in (rule.what, rule.why, rule.instead):
        assert text.isascii() and "|" not in text and "\n" not in text


def test_the_page_is_the_table():
    assert [rule.what for rule in RULES] == list(CASES)
    page = (ROOT / "docs" / "what_cannot_be_captured.md").read_text()
    assert page.endswith(f"\n\n{TABLE.markdown()}\n")


def test_the_command_answers(capsys):
    TABLE.main([])
    assert capsys.readouterr().out == TABLE.markdown() + "\n"
    TABLE.main(["--variant", "graph_microbatch", "--ramp", "4,6,8"])
    assert "nothing in the table" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        TABLE.main(["--variant", "transformer_engine", "--scope", "attn,moe"])
    assert caught.value.code == 2
    answer = capsys.readouterr()
    assert answer.out == "" and answer.err.count("\n") == 1 and "in a dense model" in answer.err


@pytest.mark.parametrize(
    "arguments, fault",
    [
        (["--ramp", "abc"], "--ramp abc: takes numbers from 1 up"),
        (["--scope", "attention"], "--scope attention: takes some of full, "),
        (["--variant", "nope"], "argument --variant: 'nope' is not one of eager, "),
        (["--dropout", "nan"], "--dropout nan: takes a number from 0 up, below 1"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments, fault, capsys):
    with pytest.raises(SystemExit) as caught:
        TABLE.main(arguments)
    answer = capsys.readouterr()
    assert (caught.value.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith(f"python -m llama31.capturable: {fault}")


def test_all_faults_are_told(capsys):
    arguments = ["--variant", "graph_step", "--nan-checks", "true", "--ramp", "4,6", "--clip", "host"]
    with pytest.raises(SystemExit) as caught:
        TABLE.main(arguments)
    assert caught.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 3
    with pytest.raises(ValueError) as refused:
        TABLE.refuse(Setting(variant="graph_step", nan_checks=True, ramp="4,6", clip="host"))
    assert "\n" not in str(refused.value) and str(refused.value).count(". Nor ") == 2


def test_flags_and_variants_have_the_names_of_the_training_script():
    assert set(VARIANTS) <= set(capturable.VARIANTS)
    shared = {field.name for field in fields(Setting)} & {field.name for field in fields(Config)}
    assert shared == {"nan_checks", "ramp", "clip"}


# --- the script's own flags and environment

TINY = PRESETS["tiny"]
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}
RANKS = {"WORLD_SIZE": "2"}
WHOLE = ("graph_microbatch", "graph_fwd_bwd", "graph_step")


@pytest.mark.parametrize(
    "changes, environment, refused",
    [
        ({}, {}, ()),
        ({"nan_checks": True}, {}, WHOLE),
        ({"ramp": "1,2,3"}, {}, ("graph_fwd_bwd", "graph_step")),
        ({"clip": "host"}, {}, ("graph_step",)),
        ({"ramp": "02,2"}, {}, ()),
        ({}, RANKS | EXPANDABLE, ("graph_layer", *WHOLE)),
        ({}, RANKS | EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}, ()),
        (
            {},
            RANKS | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "1"},
            ("graph_layer", *WHOLE),
        ),
        # Alone, a process has no NCCL.
        ({}, {"WORLD_SIZE": "1"} | EXPANDABLE, ()),
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


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--variant", "graph_fwd_bwd", "--ramp", "1,2,3"], "--variant graph_microbatch"),
        (["--variant", "graph_microbatch", "--ramp", "1,2,3", "--mllog", "-"], "leave out --ramp 1,2,3"),
    ],
)
def test_a_refusal_is_one_line_before_ranks_meet(arguments, said):
    """The other one of two ranks never comes: whoever waited for it would not end."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    answer = forked.run("llama31.train", ["--preset", "tiny", *arguments], environment, timeout_s=300)
    assert (answer.returncode, answer.stdout, answer.stderr.count("\n")) == (2, "", 1), answer
    assert said in answer.stderr


def test_a_log_takes_one_number_of_microbatches():
    logged = replace(Run(preset="tiny", variant="graph_microbatch"), mllog="-")
    require_runnable(Arguments(config=replace(TINY, ramp="2,2"), run=logged))
    assert hyperparameters(replace(TINY, ramp="2,2"), data_ranks=4)["global_batch_size"] == 2 * 4
    assert hyperparameters(TINY, data_ranks=4)["global_batch_size"] == 3 * 4
    with pytest.raises(ValueError, match="--mllog counts the same samples in each step: leave out --ramp 1,2"):
        require_runnable(Arguments(config=replace(TINY, ramp="1,2"), run=logged))
