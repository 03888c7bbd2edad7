"""common/scope_rules: each rule with settings that it refuses and near ones that it takes, the page."""

from pathlib import Path

import pytest

from common.scope_rules import RULES, SCOPES, Setting, main, markdown, refuse

ROOT = Path(__file__).resolve().parents[2]
MOE = {"model": "moe"}
BRIDGE = MOE | {"scope": "attn,moe_router,moe_preprocess"}
PADDED = MOE | {"scope": "attn,moe", "capacity": True, "padded": True}
LAYER, MICROBATCH, WHOLE, STEP = ({"scope": scope} for scope in ("layer", "microbatch", "iteration", "step"))
NOTHING, OPTIMIZER = {"scope": ""}, {"scope": "optimizer"}
# What a rule refuses -> (settings that it refuses, settings as near to them as can be that may be captured).
CASES = {
    "another scope beside a whole one": (
        [{"scope": scope} for scope in ("layer,attn", "iteration,mlp", "layer,iteration")],
        [LAYER, WHOLE, {"scope": "attn,mlp"}],
    ),
    "impl local for less than an iteration": (
        [{"impl": "local"} | more for more in ({"scope": "attn"}, LAYER, BRIDGE)],
        [{"impl": "local"} | WHOLE],
    ),
    "scopes of experts in a dense model": (
        [{"scope": scope} for scope in ("moe_router,moe_preprocess", "attn,moe")],
        [{"scope": "attn,mlp"}, BRIDGE],
    ),
    "mlp without dense layers": ([MOE | {"scope": "attn,mlp"}], [{"model": "both", "scope": "attn,mlp"}]),
    "moe beside moe_router": ([PADDED | {"scope": "moe,moe_router"}], [PADDED]),
    "moe_preprocess without moe_router": ([MOE | {"scope": "attn,moe_preprocess"}], [BRIDGE]),
    "moe_preprocess with an unpadded capacity and alltoall": (
        [BRIDGE | {"capacity": True}],
        # As in MLPerf v6.0's submission on H100: DeepEP, capacity 1.25.
        [BRIDGE | {"capacity": True} | more for more in ({"padded": True}, {"dispatcher": "flex"})] + [BRIDGE],
    ),
    "dropless or unpadded experts in a graph of the layer": (
        [MOE | {"scope": "attn,moe"}, MOE | LAYER, PADDED | {"padded": False}],
        [PADDED, PADDED | LAYER, MOE | WHOLE, LAYER],
    ),
    "overlap of the experts' exchange with captured experts": (
        [PADDED | {"overlap_exchange": True}],
        [BRIDGE | {"overlap_exchange": True}],
    ),
    "experts that run again beside a captured router": (
        [BRIDGE | {"recompute": "moe"}],
        [MOE | {"scope": "attn", "recompute": "moe"}],
    ),
    "recompute of full granularity with graphs of layers": (
        [BRIDGE | {"recompute": "full"}, LAYER | {"recompute": "full"}],
        [WHOLE | {"recompute": "full"}, BRIDGE | {"recompute": "selective"}],
    ),
    "dropout in captured layers that run again": (
        [BRIDGE | {"recompute": "selective", "dropout": True}],
        [BRIDGE | {"dropout": True}],
    ),
    "graphs without te_rng_tracker": (
        [BRIDGE | {"rng_tracker": False}],
        [scope | {"rng_tracker": False} for scope in (NOTHING, OPTIMIZER)],
    ),
    "a NaN check with a graph over whole microbatches": (
        [scope | {"nan_checks": True} for scope in (MICROBATCH, WHOLE, STEP)],
        [scope | {"nan_checks": True} for scope in (NOTHING, LAYER, BRIDGE, OPTIMIZER)],
    ),
    "CPU offload with graphs of layers or microbatches": (
        [scope | {"cpu_offload": True} for scope in (LAYER, MICROBATCH, BRIDGE)],
        [scope | {"cpu_offload": True} for scope in (WHOLE, NOTHING)],
    ),
    "sequences of changing length": (
        [LAYER | {"sequences": "changing"}, WHOLE | {"sequences": "changing"}],
        [scope | {"sequences": "changing"} for scope in (NOTHING, OPTIMIZER)],
    ),
    "packed documents with captured attention": (
        [BRIDGE | {"sequences": "packed"}, WHOLE | {"sequences": "packed"}],
        [BRIDGE | {"sequences": "padded"}, MOE | {"scope": "moe_router", "sequences": "packed"}],
    ),
    "a changing number of microbatches in one graph": (
        [WHOLE | {"changing_microbatches": True}, STEP | {"changing_microbatches": True}],
        [scope | {"changing_microbatches": True} for scope in (MICROBATCH, OPTIMIZER)],
    ),
    "clipping with a host read in a captured optimizer": (
        [scope | {"host_clip": True} for scope in (STEP, OPTIMIZER)],
        [WHOLE | {"host_clip": True}],
    ),
    "expandable segments while NCCL registers buffers in captures": (
        [scope | {"expandable_segments": True} for scope in (LAYER, WHOLE, BRIDGE, OPTIMIZER)],
        [NOTHING | {"expandable_segments": True}],
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_refuses_what_it_says_and_no_more(rule):
    refused, taken = CASES[rule.name]
    for given in refused:
        with pytest.raises(ValueError) as caught:
            refuse(Setting(**given))
        told = str(caught.value)
        assert told.startswith("cannot capture ") and "\n" not in told, given
        assert f"{rule.name}: {rule.why}; take {rule.instead}" in told, given
    for given in taken:
        refuse(Setting(**given))
    assert set(rule.scopes) <= set(SCOPES)
    for text in (rule.name, rule.why, rule.instead, rule.source):
        assert text.isascii() and "|" not in text and "\n" not in text


def test_the_page_counts_the_rules_and_the_command_prints_them(capsys):
    assert [rule.name for rule in RULES] == list(CASES)
    page = (ROOT / "docs" / "what_to_capture.md").read_text()
    assert f"\n{len(RULES)} rules of Megatron-Core" in page and "-m common.scope_rules" in page
    main([])
    printed = capsys.readouterr().out.splitlines()[2:]
    for rule, line in zip(RULES, printed, strict=True):
        assert line == f"| {rule.name} | {rule.why} | {rule.instead} | {rule.source} |"


def test_all_rules_that_are_broken_are_named_in_one_line():
    with pytest.raises(ValueError) as refused:
        refuse(Setting(scope="step", nan_checks=True, changing_microbatches=True, host_clip=True))
    assert "\n" not in str(refused.value) and str(refused.value).count(". Nor ") == 2


def test_the_command_prints_the_table_and_answers(capsys):
    main([])
    assert capsys.readouterr().out == markdown() + "\n"
    main(["--scope", "microbatch", "--changing-microbatches", "true"])
    assert "nothing in the table" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, fault",
    [
        (["--scope", "attn,moe"], "cannot capture scopes of experts in a dense model: "),
        (["--scope", "attention"], "--scope attention: takes some of attn, "),
        (["--impl", "nope"], "argument --impl: 'nope' is not one of transformer_engine, "),
    ],
)
def test_a_refusal_is_one_line_and_exit_status_two(arguments, fault, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    answer = capsys.readouterr()
    assert (caught.value.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith(f"python -m common.scope_rules: {fault}")
