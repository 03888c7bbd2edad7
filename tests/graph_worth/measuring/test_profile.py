"""--profile: a Chrome trace whose ranges are the script's own sections, with the operators inside them."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from graph_worth.measuring import kernel_trace
from graph_worth.measuring.marks import section
from tests.helpers import forked
from tests.helpers.by_hand import ByHand, Variant
from tests.helpers.once import once

pytestmark = pytest.mark.slow

SECTIONS = ["data", "zero gradients", "embedding", "forward", "loss", "backward", "optimizer"]
VARIANTS = {"eager": "eager.json", "graph_layer": "new folder/graph.json"}


def train(*flags):
    flags = ["--preset", "tiny", *map(str, flags)]
    return forked.run("gpt3.train", flags, os.environ | {"CUDA_VISIBLE_DEVICES": ""}, timeout_s=300)


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """variant -> (path of its trace, the trace, stdout, the result)."""

    def make(folder):
        (folder / "results").mkdir()

        def traced(item):
            files = "--profile", folder / item[1], "--record", folder / "results" / f"{item[0]}.json"
            return train("--variant", item[0], *files)

        with ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(traced, VARIANTS.items()))
        assert not any(run.returncode for run in runs), [run.stderr for run in runs]
        return dict(zip(VARIANTS, (run.stdout for run in runs), strict=True))

    folder, said = once(tmp_path_factory, "profiles", make)
    found = {}
    for variant, name in VARIANTS.items():
        result = json.loads((folder / "results" / f"{variant}.json").read_text())
        found[variant] = folder / name, json.loads((folder / name).read_text()), said[variant], result
    return found


def of(events, category, name=None):
    return [event for event in events if event.get("cat") == category and name in (None, event["name"])]


def inside(inner, outer):
    """Chrome traces round to a nanosecond; operators of backward may run in a thread of their own."""
    return outer["ts"] - 0.01 <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 0.01


def operators(events, section):
    """Names of the operators that ran inside the ranges of that name."""
    ranges = of(events, "user_annotation", section)
    return {op["name"] for op in of(events, "cpu_op") for outer in ranges if inside(op, outer)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_section_is_a_range_within_a_step(profiles, variant):
    events = profiles[variant][1]["traceEvents"]
    steps = [event for event in of(events, "user_annotation") if event["name"].startswith("ProfilerStep")]
    assert len(steps) == kernel_trace.TRACED_STEPS
    ranges = [event for event in of(events, "user_annotation") if "#" not in event["name"]]
    assert sorted({event["name"] for event in ranges}) == sorted(SECTIONS)
    for event in ranges:
        assert sum(inside(event, step) for step in steps) == 1
        assert not any(inside(event, other) for other in ranges if other is not event), event["name"]
    per_step = {name: len(of(events, "user_annotation", name)) / len(steps) for name in SECTIONS}
    # Two microbatches.
    assert all(per_step[name] == 2 for name in ("embedding", "forward", "loss", "backward"))
    assert per_step["data"] == per_step["zero gradients"] == per_step["optimizer"] == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_operators_lie_in_the_section_that_names_them(profiles, variant):
    events = profiles[variant][1]["traceEvents"]
    assert "aten::copy_" in operators(events, "data")
    assert "aten::embedding" in operators(events, "embedding")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in operators(events, "backward")
    assert "aten::_log_softmax" in operators(events, "loss")
    assert "aten::_fused_adamw_" in operators(events, "optimizer")
    for other in set(SECTIONS) - {"optimizer"}:
        assert "aten::_fused_adamw_" not in operators(events, other)
    # Eager layers are called; replayed ones run without the operators that autograd sees first.
    assert ("_EmulatedLinear" in operators(events, "forward")) == (variant == "eager")


@pytest.mark.parametrize("variant", VARIANTS)
def test_profiled_run_says_where_the_trace_is_and_times_nothing(profiles, variant):
    path, content, out, result = profiles[variant]
    assert content["traceName"] == path.name and str(path.parent) not in path.read_text()
    lines = out.splitlines()
    assert result["status"] == "pass" and result["variant"] == variant
    assert result["ms"] is None and result["step_ms"] == []
    assert result["steps"] == kernel_trace.UNTRACED_STEPS + kernel_trace.TRACED_STEPS == len(result["losses"])
    assert result["replays"] == result["expected_replays"]
    assert (result["replays"] > 0) == (variant != "eager")
    (place,) = [index for index, line in enumerate(lines) if line.startswith("traced, not timed: 3 steps in")]
    assert str(path) in lines[place]
    assert [line[:16].rstrip() for line in lines[place + 2 : place + 2 + len(SECTIONS)]] == SECTIONS
    assert not {"step", "rate"} & {line.split()[0] for line in lines}


# --- sections


def test_section_is_nothing_outside_of_a_profile():
    assert section("a") is section("b")
    with torch.profiler.profile() as profiler, section("a section"):
        torch.ones(2).sum()
    assert "a section" not in {event.name for event in profiler.events()}


def test_a_step_that_fails_under_the_profile_ends_the_ranges(tmp_path):
    def fail(index):
        with section("a"):
            raise RuntimeError("lost")

    made = ByHand(lambda state: Variant(state, fail), tmp_path, str, profile=str(tmp_path / "profile.json"))
    assert (made.result["status"], made.result["message"]) == ("failed", "RuntimeError: lost")
    assert section("a") is section("b")
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]


def traced(folder, rank=0):
    """A run with --profile of a variant with two sections in each step."""

    def before(index):
        with section("all"), section("part"):
            torch.ones(8).sum()

    profile = str(folder / f"profile{rank}.json")
    return ByHand(lambda state: Variant(state, before), folder, str, profile=profile, rank=rank)


def test_only_rank_zero_writes_and_every_rank_makes_the_same_steps(tmp_path):
    made = [traced(tmp_path, rank).variant.indices for rank in (0, 1)]
    num_steps = kernel_trace.UNTRACED_STEPS + kernel_trace.TRACED_STEPS
    assert made[0] == made[1] and made[0][-num_steps:] == list(range(num_steps))
    assert [path.name for path in tmp_path.glob("profile*")] == ["profile0.json"]


def test_sections_are_summed_over_a_step_in_order_of_appearance():
    def event(name, ts, dur, cat="user_annotation"):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("late", 50.0, 3000.0),
        event("early", 10.0, 600.0),
        event("early", 70.0, 900.0),
        event("ProfilerStep#2", 0.0, 9000.0),
        event("Optimizer.step#AdamW.step", 0.0, 9000.0),
        event("gloo:all_reduce", 0.0, 9000.0),
        event("aten::add", 0.0, 9000.0, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    assert kernel_trace.sections({"traceEvents": events}) == pytest.approx({"early": 0.5, "late": 1.0})
    assert list(kernel_trace.sections({"traceEvents": events})) == ["early", "late"]
