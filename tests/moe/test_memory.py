"""moe/memory: bytes around a capture, predicted and from a run's file."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moe import memory
from moe.config import GIB, PRESETS, activation_bytes, fit, state_bytes

WHOLE = replace(PRESETS["gpt_oss_120b"], microbatches=2)
AT_3 = replace(WHOLE, layers=3)
ON_GPU = {"host": {"gpus": [{}]}}


def test_a_larger_scope_holds_more_and_needs_no_more_by_itself():
    bytes_of = {scope: memory.predicted(AT_3, scope) for scope in memory.SCOPES}
    held = [each["after"] - each["before"] for each in bytes_of.values()]
    assert held[0] == 0 and held == sorted(held) and held[-1] > activation_bytes(AT_3)
    for scope, own in bytes_of.items():
        assert own["before"] == state_bytes(AT_3)
        # Graphs of parts have an input for each microbatch; else the memory is eager's, whoever holds it.
        inputs = 3 * 2 * 4096 * 2880 * 110 // 100 if 0 < memory.SCOPES[scope] < 3 else 0
        assert own["step"] == pytest.approx(bytes_of["eager"]["step"] + inputs, abs=3)
        assert own["beside_eager"] - own["after"] == pytest.approx(bytes_of["eager"]["step"] - own["before"], abs=3)


def test_depths_are_the_last_that_fit():
    for budget in (100 * GIB, 137 * GIB, 1 * GIB):
        layers = memory.layers_that_fit(WHOLE, "graph_step", "beside_eager", budget)
        sizes = [memory.predicted(replace(WHOLE, layers=count), "graph_step")["beside_eager"] for count in range(1, 37)]
        assert layers == sum(size <= budget for size in sizes)
    assert layers == 0


def test_at_the_deepest_120b_only_graphs_of_attention_and_router_fit_beside_eager():
    preset, budget = PRESETS["gpt_oss_120b_fwd_bwd"], memory.DEFAULT_GIB * GIB
    config = fit(preset, budget)
    beside = {scope for scope in memory.SCOPES if memory.predicted(config, scope)["beside_eager"] <= budget}
    alone = {scope for scope in memory.SCOPES if memory.predicted(config, scope)["step"] <= budget}
    assert config.layers == 10 and alone == set(memory.SCOPES)
    assert beside == {"eager", "graph_attn", "graph_attn_router", "graph_attn_router_preprocess"}


def written(tmp_path, run):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    return str(path)


def around(before, peak, after):
    numbers = {"before": before, "peak": peak, "after": after}
    capture = {name: {"reserved": gib * GIB, "allocated": gib * GIB // 2} for name, gib in numbers.items()}
    return {"memory": {"capture": capture, "warmup": {}}}


def test_measured_bytes_stand_behind_the_predicted_ones(tmp_path, capsys):
    """Of a run file of make bench, and of what --record wrote."""
    config = asdict(replace(PRESETS["tiny"], layers=3))
    variants = {"eager": {"capture": {"memory": {}}}, "graph_layer": {"capture": around(10, 30, 20)}}
    bench = {"model": "moe", "preset": "tiny-l3", "builds": {"": {"config": config, "variants": variants}}, **ON_GPU}
    by_hand = {"model": "moe", "preset": "tiny-l3", "config": config, "variant": "graph_layer", **around(10, 30, 20)}
    by_hand["device"] = "cuda"
    printed = []
    for run in (bench, by_hand):
        memory.main(["--run", written(tmp_path, run)])
        printed.append(capsys.readouterr().out)
    rows = [[line for line in text.splitlines() if line.startswith("| graph_layer ")] for text in printed]
    assert printed[0].startswith("moe-tiny-l3: 3 layers") and rows[0] == rows[1]
    measured = [cell.split(", ")[1] for cell in rows[0][0].split(" | ")[1:4]]
    assert measured == ["10.0 (5.0)", "30.0 (15.0)", "20.0 (10.0)"]
    assert "graph_step" not in printed[0]  # did not run


@pytest.mark.parametrize("path", sorted(Path("results").glob("*/moe-*/*.json")), ids=str)
def test_published_runs_added_what_is_predicted(path):
    config, _, found = memory.measured(path)
    graphs = {scope: facts["added"] for scope, facts in found.items() if memory.SCOPES.get(scope)}
    assert len(graphs) == 3
    for scope, added in graphs.items():
        own = memory.predicted(config, scope)
        # Within a fifth, and half a GiB for small ones.
        assert own["after"] - own["before"] == pytest.approx(added, rel=0.2, abs=GIB / 2), scope


@pytest.mark.parametrize("run, words", [
    ({"model": "moe"}, "no run of moe"),
    ([], "no run of moe"),
    ({"model": "moe", "preset": "", "config": {"layers": 0}, "variant": "eager"}, "no run of moe"),
    ({"model": "gpt3", "preset": "", "config": {}, "variant": "graph_step", **around(1, 1, 1)}, "a run of gpt3"),
    ({"model": "moe", "preset": "", "config": {}, "variant": "eager", "device": "cpu"}, "a run on a CPU"),
])  # fmt: skip
def test_a_file_that_tells_nothing_is_refused_in_one_line(tmp_path, capsys, run, words):
    with pytest.raises(SystemExit):
        memory.main(["--run", written(tmp_path, run)])
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize("flags, words", [
    (["--gib", "0"], "--gib 0: takes a number from 1 up"),
    (["--run", "x", "--layers", "2"], "--run takes the sizes of the run"),
    (["--run", "/nowhere/x"], "No such file"),
    (["--preset", "x"], "tiny"),
    (["--preset", "gpt_oss_120b", "--gib", "4"], "one layer needs"),
])  # fmt: skip
def test_mistakes_are_answered_in_one_line(capsys, flags, words):
    with pytest.raises(SystemExit):
        memory.main(flags)
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
