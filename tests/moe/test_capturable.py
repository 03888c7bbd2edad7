"""moe/capturable: Megatron's rules row by row, each with settings that it refuses and near ones that it takes."""

import pytest

from moe.capturable import RULES, TABLE, Setting

BRIDGE = {"scope": "attn,moe_router,moe_preprocess"}
PADDED = {"scope": "attn,moe", "capacity_factor": 1.25}
WHOLE = {"impl": "full_iteration"}
# What a rule refuses -> (settings that it refuses, settings as near to them as can be that break no rule).
CASES = {
    "scope moe beside moe_router": ([PADDED | {"scope": "moe,moe_router"}], [PADDED]),
    "scope moe_preprocess without moe_router": ([{"scope": "attn,moe_preprocess"}], [BRIDGE]),
    "dropless experts in a graph of the layer": ([{"scope": "attn,moe"}, {}], [PADDED, WHOLE]),
    "scope moe_preprocess with a capacity factor": ([BRIDGE | {"capacity_factor": 1.0}], [BRIDGE]),
    "scope mlp without dense layers": ([{"scope": "attn,mlp"}], [{"scope": "attn,mlp", "dense_layers": 1}]),
    "scopes of modules with impl full_iteration": ([BRIDGE | WHOLE], [WHOLE]),
    "scopes of modules with impl local in Bridge": (
        [BRIDGE | {"impl": "local"}],
        [{"impl": "local", "capacity_factor": 1.0}],
    ),
    "experts that run again beside a captured router": (
        [BRIDGE | {"recompute": "moe"}],
        [{"scope": "attn", "recompute": "moe"}],
    ),
    "recompute of full granularity with graphs of layers": ([BRIDGE | {"recompute": "full"}], [WHOLE]),
    "dropout in captured modules that run again": (
        [BRIDGE | {"recompute": "selective", "dropout": 0.1}],
        [BRIDGE | {"dropout": 0.1}],
    ),
    "graphs without te_rng_tracker": (
        [BRIDGE | {"rng_tracker": False}],
        [{"impl": "none", "rng_tracker": False}],
    ),
    "a NaN check with impl full_iteration": ([WHOLE | {"nan_checks": True}], [BRIDGE | {"nan_checks": True}]),
    "CPU offload with graphs of layers": ([BRIDGE | {"cpu_offload": True}], [WHOLE | {"cpu_offload": True}]),
    "overlap of the experts' exchange with captured experts": (
        [PADDED | {"overlap_exchange": True}],
        [BRIDGE | {"overlap_exchange": True}],
    ),
    "packed documents with captured attention": (
        [BRIDGE | {"packed": True}, WHOLE | {"packed": True}],
        [BRIDGE | {"packed": True, "padded_bounds": True}, {"scope": "moe_router", "packed": True}],
    ),
    "expandable segments while NCCL registers buffers in captures": (
        [BRIDGE | {"expandable_segments": True}],
        [BRIDGE | {"expandable_segments": True, "nccl_graph_register": False}],
    ),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_each_rule_refuses_what_it_says_and_no_more(rule):
    refused, taken = CASES[rule.what]
    for fields in refused:
        assert rule.what in [fault.partition(":")[0] for fault in TABLE.faults(Setting(**fields))]
    for fields in taken:
        TABLE.refuse(Setting(**fields))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--scope", "attn,moe,moe_router", "--capacity-factor", "1"), "scope moe beside moe_router"),
        (("--scope", "moe_preprocess"), "moe_preprocess without moe_router"),
        (("--capacity-factor", "0.5"), "--capacity-factor 0.5"),
        (("--ep", "3"), "--ep 3: takes a divisor of --experts 128"),
        (("--scope", "attn,mamba"), "--scope attn,mamba"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_two(capsys, arguments, words):
    with pytest.raises(SystemExit) as exit_:
        TABLE.main(arguments)
    said = capsys.readouterr().err
    assert exit_.value.code == 2 and words in said and len(said.splitlines()) == 1
