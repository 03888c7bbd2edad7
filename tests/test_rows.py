"""Rows of a table: the base, pairs within sessions, sessions that pool, and what stands beside a row."""

import statistics

import pytest

from benchmarks import compare, frame, rows, tables
from tests.table_records import SPEEDUP, STEPS, make, mean_ratio, packed, put, schema_1, session


def table_of(root, base=None):
    return {row["variant"]: row for row in rows.summarise(frame.read(root).frame, base)}


def row_of(found, variant="graph", base=None):
    return next(row for row in rows.summarise(found, base) if row["variant"] == variant)


def eagers(times, **options):
    """Rounds of eager variants: name -> steps of each round, all ms."""
    return [
        make(name, number, steps=steps_of(steps), statistic_ms=statistics.median(steps), busy_ms=0.1, **options)
        for name, rounds in times.items()
        for number, steps in enumerate(rounds, 1)
    ]


def steps_of(times):
    return {"gpu_ms": list(times), "batch": [0] * len(times), "wall_ms": sum(times)}


# ------------------------------------------------------------------------------------------------
# The base


def two_eagers(scale):
    """eager has the better median, eager_padded the better 10th percentile."""
    even = [10.0 + 0.001 * index for index in range(20)]
    uneven = [9.0 + 0.001 * index for index in range(6)] + [11.0 + 0.001 * index for index in range(14)]

    def rounds(times):
        return [[scale * ms * (1 + 1e-6 * number) for ms in times] for number in range(3)]

    return {"eager": rounds(even), "eager_padded": rounds(uneven)}


@pytest.mark.parametrize(
    ("scale", "base", "ms"), [(1.0, "eager_padded", 11.0), (36.0, "eager_padded", 396.0), (40.0, "eager", 400.0)]
)
def test_the_base_is_the_best_eager_by_10th_percentile_and_by_median_beyond_400_ms(scale, base, ms):
    found = [*eagers(two_eagers(scale)), *(make("graph", number, 8.0 * scale) for number in (1, 2, 3))]
    row = row_of(found)
    assert row["base"] == base and row["base_ms"] == pytest.approx(ms, rel=2e-3)
    assert [row["variant"] for row in rows.summarise(found) if row["is_base"]] == [base]
    (note,) = [note for note in compare.notes(found, rows.summarise(found), []) if note.startswith("base: ")]
    assert note.startswith(f"base: {base}, the best of eager")


def test_a_variant_that_declares_itself_eager_may_be_the_base():
    found = [*session(), *(make("wide", number, 9.0, extra={"kind": "eager"}) for number in range(1, 6))]
    assert row_of(found)["base"] == "wide" and row_of(found, "wide")["is_base"]


def test_the_base_is_chosen_once_for_the_sessions_that_pool(tmp_path):
    """eager is the faster in the first by chance, eager_sync over both."""
    for hour, sync in ((3, 10.1), (4, 9.0)):
        found = session() + [make("eager_sync", number, sync) for number in range(1, 6)]
        packed(tmp_path, found, hour=hour, boot=f"{hour:06x}", gpu=f"{hour:04x}")
    row = table_of(tmp_path)["graph"]
    assert (row["base"], row["num_hosts"], row["num_pairs"]) == ("eager_sync", 2, 10)
    assert row["speedup"] == pytest.approx((10.1 * 9.0) ** 0.5 / (8.0 * 8.1 * 8.0 * 8.05 * 8.0) ** 0.2)


def test_a_base_that_was_named_is_that_of_every_session(tmp_path):
    packed(tmp_path, session())
    row = table_of(tmp_path, base="graph")["eager"]
    assert row["speedup"] == pytest.approx(1 / SPEEDUP) and (row["verdict"], row["base"]) == ("slower", "graph")


# ------------------------------------------------------------------------------------------------
# Pairs


def test_speed_up_is_the_mean_of_paired_log_ratios():
    row = row_of(session())
    assert row["speedup"] == pytest.approx(SPEEDUP) and row["speedup_low"] < SPEEDUP < row["speedup_high"]
    assert (row["verdict"], row["scope"]) == ("faster", "on this host")
    assert (row["num_rounds"], row["num_pairs"], row["num_hosts"], row["num_sessions"]) == (5, 5, 1, 1)
    assert row["quiet_speedup"] == pytest.approx(SPEEDUP, rel=1e-6)
    assert row["model_speedup"] == pytest.approx(mean_ratio([(a - 1, b - 1) for a, b in STEPS]))
    assert row["step_ms"] == 8.0 and row["base"] == "eager" and row["base_ms"] == 10.0


@pytest.mark.parametrize(
    ("num", "verdict", "hosts"), [(1, "one round", 0), (2, "two pairs", 0), (3, "", 1), (4, "", 1), (5, "faster", 1)]
)
def test_few_pairs_have_no_interval_and_no_verdict(num, verdict, hosts):
    row = row_of(session(STEPS[:num]))
    assert row["speedup"] == pytest.approx(mean_ratio(STEPS[:num]))
    assert (row["verdict"], row["num_hosts"], row["num_pairs"]) == (verdict, hosts, num)
    assert (row["speedup_low"] is None) == (num < 3) and row["range_low"] is None
    text = tables.folder_text(rows.summarise(session(STEPS[:num])))
    assert f"{hosts}, {num}" in text and ("95 %" in text) == (num >= 3)
    assert verdict in text and ("on this host" in text) == (num == 5)


def test_pairs_never_cross_sessions(tmp_path):
    """Round 2 of the one session has no eager, round 2 of the other has."""
    found = session()
    packed(tmp_path, [record for record in found if (record["variant"], record["round"]) != ("eager", 2)])
    packed(tmp_path, session(), hour=5)
    row = table_of(tmp_path)["graph"]
    assert row["num_pairs"] == 9
    one = mean_ratio([pair for index, pair in enumerate(STEPS) if index != 1])
    # Of one host: one unit, the mean of its sessions' values.
    assert row["speedup"] == pytest.approx((one * SPEEDUP) ** 0.5) and row["num_hosts"] == 1


@pytest.mark.parametrize("key", ["gpu_uuid", "boot_id", "source_hash"])
def test_only_runs_of_one_gpu_boot_and_source_are_paired(tmp_path, key):
    found = session()
    for record in found[1::2]:
        record["env"][key] = "other"
    put(tmp_path, *found)
    row = table_of(tmp_path)["graph"]
    assert (row["speedup"], row["num_pairs"], row["verdict"]) == (None, 0, "no eager of the same round")


def test_pairs_join_equal_attempts_and_a_verdict_holds_for_first_and_last(tmp_path):
    again = [make("eager", 2, 10.2, attempt=2), make("graph", 2, 8.0, attempt=2)]
    found = session() + again
    row = row_of(found)
    assert row["num_rounds"] == row["num_pairs"] == 5 and row["verdict"] == "faster"
    assert row["speedup"] == pytest.approx(mean_ratio([*STEPS[:1], (10.2, 8.0), *STEPS[2:]]))
    group = rows.group_of(found)
    both = [rows.pairs(group, group.order[0], "graph", "eager", last) for last in (True, False)]
    assert [[(a["attempt"], b["attempt"]) for a, b in each] for each in both] == [
        [(1, 1), (2, 2), (1, 1), (1, 1), (1, 1)],
        [(1, 1)] * 5,
    ]
    # Without eager beside it a second attempt has no pair: the first stands.
    assert row_of(session() + again[1:])["speedup"] == pytest.approx(SPEEDUP)
    # First attempts that say something else make it unclear.
    wild = session(((10.0, 8.0), (10.0, 30.0), (10.0, 8.0), (10.0, 8.1), (10.0, 8.0)))
    assert row_of(wild)["verdict"] == "unclear"
    row = row_of([*wild, make("eager", 2, 10.0, attempt=2), make("graph", 2, 8.0, attempt=2)])
    assert (row["verdict"], row["scope"]) == ("unclear", "on this host") and row["speedup"] > 1.2


def test_a_repeated_round_chooses_the_base_by_its_last_attempt():
    sync = [make("eager_sync", number, 9.9) for number in range(1, 6)]
    again = [make("eager_sync", number, 11.0, attempt=2) for number in range(1, 6)]
    assert row_of(session() + sync)["base"] == "eager_sync"
    assert row_of(session() + sync + again)["base"] == "eager"


# ------------------------------------------------------------------------------------------------
# Hosts


def hosts(root, *steps, **options):
    for number, each in enumerate(steps):
        packed(root, session(each, **options), hour=number, boot=f"{number:06x}", gpu=f"{number:04x}")


def scaled(factor):
    return tuple((a * factor, b) for a, b in STEPS)


def test_two_hosts_have_a_range_and_no_interval(tmp_path):
    hosts(tmp_path, STEPS, scaled(1.2))
    row = table_of(tmp_path)["graph"]
    assert (row["num_hosts"], row["num_sessions"], row["num_pairs"]) == (2, 2, 10)
    assert row["speedup"] == pytest.approx(SPEEDUP * 1.2**0.5) and row["speedup_low"] is None
    assert (row["range_low"], row["range_high"]) == (pytest.approx(SPEEDUP), pytest.approx(1.2 * SPEEDUP))
    assert (row["verdict"], row["scope"]) == ("faster", "on this host")
    assert f"{SPEEDUP:.3f} to {1.2 * SPEEDUP:.3f}" in tables.folder_text(list(table_of(tmp_path).values()))


def test_hosts_that_disagree_are_unclear(tmp_path):
    hosts(tmp_path, STEPS, scaled(0.7))
    assert table_of(tmp_path)["graph"]["verdict"] == "unclear"


def test_three_hosts_have_an_interval_over_hosts_and_a_plain_verdict(tmp_path):
    hosts(tmp_path, STEPS, scaled(1.01), scaled(0.99))
    row = table_of(tmp_path)["graph"]
    assert (row["verdict"], row["scope"], row["num_hosts"], row["num_pairs"]) == ("faster", "plain", 3, 15)
    assert row["speedup_low"] == pytest.approx(SPEEDUP * 2.71828 ** (-4.30265 * 0.01 / 3**0.5), rel=1e-4)
    assert tables.verdict(row) == "faster"


def test_a_verdict_of_some_hosts_says_of_how_many(tmp_path):
    packed(tmp_path, session(), hour=1, boot="aaaaaa", gpu="0001")
    assert tables.verdict(table_of(tmp_path)["graph"]) == "faster on this host"
    packed(tmp_path, session(STEPS[:3]), hour=2, boot="bbbbbb", gpu="0002")
    row = table_of(tmp_path)["graph"]
    assert (row["num_hosts"], row["num_judged_hosts"]) == (2, 1)
    assert tables.verdict(row) == "faster on 1 host" and "faster on 1 host" in tables.folder_text([row])
    packed(tmp_path, session(), hour=3, boot="cccccc", gpu="0003")
    # Three hosts have a plain verdict.
    assert tables.verdict(table_of(tmp_path)["graph"]) == table_of(tmp_path)["graph"]["verdict"]


def test_sessions_that_share_a_boot_or_a_gpu_are_one_host(tmp_path):
    packed(tmp_path, session(), hour=1, boot="aaaaaa", gpu="0001")
    packed(tmp_path, session(), hour=2, boot="bbbbbb", gpu="0001")
    packed(tmp_path, session(), hour=3, boot="bbbbbb", gpu="0002")
    packed(tmp_path, session(), hour=4, boot="cccccc", gpu="0003")
    row = table_of(tmp_path)["graph"]
    assert (row["num_sessions"], row["num_hosts"]) == (4, 2)


def test_sessions_that_share_one_of_several_nodes_are_one_host(tmp_path):
    for hour, boot, other in ((1, "aaaaaa", "bbbbbb"), (2, "bbbbbb", "dddddd"), (3, "eeeeee", "ffffff")):
        nodes = [{"boot_id": boot, "gpu_uuids": [f"{boot}-0"]}, {"boot_id": other, "gpu_uuids": [f"{other}-{hour}"]}]
        packed(tmp_path, session(), hour=hour, boot=boot, gpu=f"{hour:04x}", nodes=nodes)
    assert table_of(tmp_path)["graph"]["num_hosts"] == 2


def test_a_session_of_two_pairs_stands_beside_hosts_and_enters_none(tmp_path):
    hosts(tmp_path, STEPS, STEPS[:2])
    row = table_of(tmp_path)["graph"]
    assert (row["num_hosts"], row["num_pairs"], row["num_sessions"]) == (1, 5, 2)
    assert row["speedup"] == pytest.approx(SPEEDUP)


# ------------------------------------------------------------------------------------------------
# Sessions that pool, and older ones


def two(root, older, newer):
    """Rows of two sessions on two hosts."""
    packed(root, older, hour=1, boot="aaaaaa", gpu="0001")
    packed(root, newer, hour=2, boot="bbbbbb", gpu="0002")
    return table_of(root)


def traced(kernels="k", state="s", **changes):
    extra = {"profile": {"kernels_hash": kernels}}
    first = [make(variant, 0, numerics={"state_hash": state}, **changes) for variant in ("eager", "graph")]
    return first + session(extra=extra, **changes)


def test_sessions_pool_by_the_hash_of_what_ran(tmp_path):
    source = {"env": {"source_hash": "elsewhere", "git_sha": "f" * 40}}
    row = two(tmp_path, session(**source), session())["graph"]
    assert (row["num_sessions"], row["num_hosts"], row["num_older"]) == (2, 2, 0)


def test_sessions_pool_by_fingerprint_where_their_code_differs(tmp_path):
    row = two(tmp_path, traced(env={"run_hash": "other"}), traced())["graph"]
    assert (row["num_hosts"], row["num_older"]) == (2, 0)


@pytest.mark.parametrize(
    "older",
    [
        lambda: session(env={"run_hash": "other"}),
        lambda: traced(kernels="other", env={"run_hash": "other"}),
        lambda: traced(state="other", env={"run_hash": "other"}),
        lambda: session(config={"layers": 2}),
        lambda: session(env={"torch": "2.9.0"}),
        lambda: session(env={"driver": "570.1"}),
        lambda: session(env={"cudnn": "9"}),
        lambda: session(env={"world_size": 2}),
        lambda: session(extra={"request": {"steps": 10}}),
        lambda: schema_1(session()),
        lambda: schema_1(traced()),
    ],
)
def test_sessions_of_other_programs_count_as_older(tmp_path, older):
    table = two(tmp_path, older(), traced())
    for variant in ("eager", "graph"):
        assert (table[variant]["num_sessions"], table[variant]["num_older"]) == (1, 1)
    assert (table["graph"]["num_hosts"], table["graph"]["num_pairs"]) == (1, 5)
    assert "older" in tables.folder_text(list(table.values()))


@pytest.mark.parametrize("config, num_older", [({}, 0), ({"layer": "torch"}, 1)])
def test_transformer_engine_counts_for_models_that_have_its_layers(tmp_path, config, num_older):
    """A model without a kind of layer never loads it: installed for another model, it changes nothing."""
    older = session(config=config, env={"transformer_engine": "2.20.2"})
    row = two(tmp_path, older, session(config=config, env={"transformer_engine": None}))["graph"]
    assert (row["num_hosts"], row["num_older"]) == (2 - num_older, num_older)


def test_how_a_run_is_measured_and_where_its_data_lies_keep_sessions_together(tmp_path):
    row = two(tmp_path, session(config={"min_steps": 60, "min_window_s": 9.0}), session(config={"min_steps": 50}))
    assert row["graph"]["num_hosts"] == 2


def test_a_variant_pools_with_its_own_and_the_base_with_the_bases(tmp_path):
    """Another graph leaves eager's sessions together; another eager parts graph's too."""
    older = session()
    for record in older[1::2]:
        record["env"]["run_hash"] = "other"
    table = two(tmp_path / "a", older, session())
    assert (table["eager"]["num_older"], table["graph"]["num_older"]) == (0, 1)
    older = session()
    for record in older[::2]:
        record["env"]["run_hash"] = "other"
    table = two(tmp_path / "b", older, session())
    assert (table["eager"]["num_older"], table["graph"]["num_older"]) == (1, 1)


@pytest.mark.parametrize("older", [lambda: session(env={"run_hash": "other"}), lambda: schema_1(session())])
def test_a_session_of_less_than_three_pairs_takes_no_row_from_an_earlier_one(tmp_path, older):
    """Of other code; where all have few, the newest stands."""
    short = [record for record in session() if record["round"] <= 2]
    row = two(tmp_path / "a", older(), short)["graph"]
    assert (row["num_rounds"], row["num_pairs"], row["num_older"]) == (5, 5, 1)
    row = two(tmp_path / "b", older(), [record for record in session() if record["round"] <= 3])["graph"]
    assert (row["num_rounds"], row["num_pairs"], row["num_older"]) == (3, 3, 1)
    row = two(tmp_path / "c", [record for record in older() if record["round"] <= 2], short)["graph"]
    assert (row["num_rounds"], row["num_older"]) == (2, 1) and "schema 1" not in row["lacks"]


def test_schema_1_is_older_as_soon_as_schema_2_is_there(tmp_path):
    """Though its commit's time is later."""
    for hour in (1, 2, 3):
        packed(tmp_path, schema_1(session()), hour=hour, day=24, boot=f"{hour:06x}", gpu=f"{hour:04x}")
    row = table_of(tmp_path)["graph"]
    assert (row["num_hosts"], row["num_older"], row["lacks"]) == (3, 0, "schema 1, 15/15 windows short")
    # By the same rules, on what it holds; never plainly.
    assert (row["verdict"], row["scope"]) == ("faster", "on this host") and row["speedup_low"] is not None
    packed(tmp_path, session(), hour=1, day=22)
    row = table_of(tmp_path)["graph"]
    assert (row["num_hosts"], row["num_older"], row["lacks"]) == (1, 3, "")


def test_a_variant_of_schema_1_alone_keeps_its_row(tmp_path):
    old = session() + [make("graph_te", number, 7.0) for number in range(1, 6)]
    packed(tmp_path, schema_1(old), hour=1)
    packed(tmp_path, session(), hour=2)
    table = table_of(tmp_path)
    assert [table["graph_te"][key] for key in ("num_pairs", "num_older")] == [5, 0]
    assert table["graph_te"]["lacks"].startswith("schema 1")
    assert (table["graph"]["num_older"], table["graph"]["lacks"]) == (1, "")


def test_what_failed_in_the_newest_session_is_said_though_older_runs_stand(tmp_path):
    failed = make("graph", 0, status="capture_failed", message="stream is capturing")
    newer = [*[record for record in session() if record["variant"] == "eager"], failed]
    row = two(tmp_path, session(), newer)["graph"]
    assert (row["status"], row["num_pairs"]) == ("capture_failed", 5)


def test_what_one_machine_lacked_is_named_with_its_session_beside_the_runs_of_another(tmp_path):
    lacking = make("graph", 1, status="unsupported", message="graph needs lightning")
    newer = [*[record for record in session() if record["variant"] == "eager"], lacking]
    row = two(tmp_path, session(), newer)["graph"]
    assert (row["status"], row["num_pairs"]) == ("pass", 5)
    assert row["message"].startswith("unsupported in 20261122T") and "graph needs lightning" in row["message"]
    assert "\ngraph: unsupported in 2026" in tables.folder_text([row])
    (alone,) = [row for row in rows.summarise(newer) if row["variant"] == "graph"]
    assert (alone["status"], alone["message"]) == ("unsupported", "graph needs lightning")


# ------------------------------------------------------------------------------------------------
# What stands beside a row


def long_session(**changes):
    return session([(500.0, 450.0 + n) for n in range(5)], **changes)


def test_steps_beyond_400_ms_have_no_10th_percentile_and_no_tail():
    row = row_of(long_session())
    assert row["speedup"] and row["quiet_speedup"] is None and row["p10_ms"] is None and row["tail"] is None
    assert row["verdict"] == "faster"
    text = tables.folder_text(rows.summarise(long_session()))
    assert "p95/p50" not in text and "by p10" not in text
    short = tables.folder_text(rows.summarise(session()))
    assert "p95/p50" in short and "by p10" in short


@pytest.mark.parametrize(
    ("step_ms", "num_steps", "window_s", "preset", "is_short"),
    [
        (10.0, 500, 5.0, "bench", False),
        (10.0, 499, 4.99, "bench", True),
        (200.0, 49, 9.8, "bench", True),
        (500.0, 40, 20.0, "bench", False),
        (500.0, 39, 19.5, "bench", True),
        (3000.0, 7, 21.0, "bench", True),
        (10.0, 5, 0.05, "tiny", False),
        (10.0, 5, None, "bench", False),
    ],
)
def test_a_window_is_short_by_its_seconds_or_its_steps(step_ms, num_steps, window_s, preset, is_short):
    record = make("graph", 1, step_ms, num_steps, preset=preset, conditions={"window_s": window_s})
    assert rows.is_short(record) == is_short
    assert rows.lacks([record]) == ("1/1 windows short" if is_short else "")


def test_what_runs_lack_stands_in_a_column():
    found = session()
    assert rows.lacks(found) == "" and "lacks" not in tables.folder_text(rows.summarise(found))
    found[1]["conditions"].update(settled=False)
    found[3]["conditions"].update(settled=True, others_on_gpu=["python 7"])
    found[5]["conditions"].update(window_s=found[5]["steps"]["wall_ms"] / 1e3, other_sessions=["another"])
    assert row_of(found)["lacks"] == "1/5 windows short, 1/5 not settled, 2/5 beside others"
    text = tables.folder_text(rows.summarise(found))
    assert "lacks" in text.splitlines()[0] and "2/5 beside others" in text
    cpu = [make("graph", 1, device="cpu", conditions={"settled": False})]
    assert row_of(cpu)["lacks"] == ""


def test_a_first_attempt_that_did_not_settle_is_not_counted_where_the_second_did():
    found = session()
    for record in found[:2]:
        record["conditions"]["settled"] = False
    assert row_of(found)["lacks"] == "1/5 not settled"
    again = [make("eager", 1, 10.0, attempt=2), make("graph", 1, 8.0, attempt=2)]
    assert row_of(found + again)["lacks"] == ""


def test_parity_names_its_reference_where_that_is_not_eager():
    def parity(variant="graph", **numerics):
        return row_of([*session(), make(variant, 0, numerics={"parity": "bitwise", **numerics})], variant)["parity"]

    assert parity(reference="eager") == parity() == "bitwise"
    assert parity(reference="eager_padded") == "bitwise to eager_padded"
    assert parity("eager") == "reference"
