"""The simulation follows benchmarks.intervals, false verdicts stay within the bound, and the tables are fresh."""

import json
import lzma
import math
import shlex
from pathlib import Path

import numpy
import pytest

from benchmarks import intervals, scatter, sessions, simulate, verdict_rates
from common import record as records

ROOT = Path(__file__).resolve().parent.parent
METHOD = ROOT / "docs" / "method.md"
NUM_RUNS = 3000

# ------------------------------------------------------------------------------------------------
# The rates


@pytest.fixture(scope="module")
def cells():
    return verdict_rates.plain_cells(NUM_RUNS, simulate.SEED)


@pytest.mark.parametrize("num_eagers", [1, 2])
def test_false_verdicts_stay_within_the_bound(cells, num_eagers):
    bound = [cell for cell in cells if cell.is_bound and cell.num_eagers == num_eagers]
    assert len(bound) == 18
    for cell in bound:
        assert cell.rates.holds, cell


def test_a_choice_among_two_eagers_makes_faster_rarer(cells):
    for one, two in zip(*([cell for cell in cells if cell.num_eagers == num] for num in (1, 2)), strict=True):
        assert (one.kind, one.shape, one.host, one.scatter) == (two.kind, two.shape, two.host, two.scatter)
        assert two.rates.faster <= one.rates.faster + 0.006, two


def test_what_the_method_says_of_skewed_hosts_and_of_power(cells):
    found = {(c.kind, c.shape, c.host, c.scatter, c.num_eagers): c.rates for c in cells}
    rates = {shape: found["independent", shape, 0.05, 0.003, 1] for shape, _ in verdict_rates.HOSTS}
    assert rates["lognormal 0.5"].false == pytest.approx(0.06, abs=0.015)
    assert rates["lognormal 1"].false == pytest.approx(0.17, abs=0.03)
    power = rates["normal"].power[verdict_rates.EFFECTS.index(0.05)]
    assert power == pytest.approx([0.04, 0.18, 0.61], abs=0.03)


def test_a_look_at_every_number_of_units_would_be_false_more_often():
    values = numpy.random.default_rng(1).standard_normal((20_000, 12))

    def false(looks):
        found = [verdict_rates.interval_of(values[:, :look]) for look in looks]
        return verdict_rates.rates_of(found).false

    assert false(intervals.LOOKS) == pytest.approx(0.027, abs=0.004)
    assert false(range(3, 13)) == pytest.approx(0.049, abs=0.006)


def test_on_this_host_is_false_in_one_percent_of_sessions_of_independent_runs():
    found = list(verdict_rates.host_rows(NUM_RUNS, simulate.SEED))
    assert [num_eagers for _, num_eagers, *_ in found] == [1, 1, 1, 2, 2, 2] * 2
    for kind, _, _, rates, num_rounds in found:
        worst = max(each.false for each in rates)
        assert worst < (0.02 if kind == "independent" else 0.065)
        assert 8 <= num_rounds <= 15


@pytest.mark.parametrize(("kind", "share"), [("independent", 0.039), ("AR(1) 0.3", 0.058)])
def test_both_scopes_together(kind, share):
    for num_eagers in (1, 2):
        rates = verdict_rates.ever_rates(NUM_RUNS, simulate.SEED, kind, num_eagers)
        assert rates.false == pytest.approx(share, abs=0.014)
        assert rates.faster < 0.65 * rates.false


def test_a_base_that_changes_between_looks_stays_within_the_bound():
    rates = {
        (kind, speed): verdict_rates.between_rates(NUM_RUNS, simulate.SEED, kind, speed)
        for kind in ("independent", "AR(1) 0.3")
        for speed in (0.0, verdict_rates.UNEQUAL)
    }
    for (kind, speed), of_case in rates.items():
        assert of_case.holds, (kind, speed)
        # More often than at the looks alone.
        assert of_case.false == pytest.approx(0.045 if speed else 0.035, abs=0.01)


def test_a_base_for_each_session_breaks_the_bound_and_one_for_the_row_does_not():
    rules = verdict_rates.rule_rates(NUM_RUNS, simulate.SEED)
    rates, shift, _ = rules["session"]
    assert 0.07 < rates.false < 0.11
    assert not rates.holds
    assert rates.faster < 0.005  # nearly all of them say slower
    assert shift < -0.2
    assert all(rules[name][0].upper < 0.05 for name in rules if name != "session")
    assert -0.15 < rules["row"][1] < rules["unequal"][1] < -0.04
    # Those that never overstate the variant, and those that do.
    excess = {name: result[2] for name, result in rules.items()}
    assert max(excess["session"], excess["row"], excess["mean"]) < 0.03
    assert 0.03 < excess["unequal"] < excess["others"] < 0.3 < excess["clear"]


def test_rates_have_wilsons_upper_end():
    # 5 of 100: 2.15 to 11.18 %.
    assert verdict_rates.Rates(100, 0.05, 0.0, numpy.zeros(1)).upper == pytest.approx(0.1118, abs=1e-4)


# ------------------------------------------------------------------------------------------------
# The same rules as benchmarks.intervals


def session(number, log_ratios):
    ratios = tuple(log_ratios)
    begin = f"2026-11-22T{number:02d}:00:00Z"
    return intervals.Session(
        name=begin, boot=str(number), gpus=(), begin=begin, log_ratios=ratios, first_log_ratios=ratios
    )


def test_plain_verdicts_are_those_of_judge():
    times = scatter.draw(numpy.random.default_rng(5), "independent", 60 * 12, 2, 5).reshape(2, 2, 60, 12, 5)
    ratios = times[0, 0] - times[0, 1] + 1
    verdicts = [
        [intervals.judge([session(n, pairs) for n, pairs in enumerate(row[:look])]).verdict for look in (3, 6, 12)]
        for row in ratios
    ]
    faster, slower = ([[word == wanted for word in row] for row in verdicts] for wanted in ("faster", "slower"))
    rates = verdict_rates.rates_of(verdict_rates.looks_of_rows(times, 1.0))
    assert 0.2 < numpy.any(faster, axis=1).mean() == rates.faster
    assert numpy.any(numpy.logical_or(faster, slower), axis=1).mean() == rates.false


def base_of(log_ms):
    """Of log times of two eagers, [2, sessions, rounds], by what rows ask."""
    candidates = {name: [([math.exp(ms)], [0]) for ms in log_ms[name].ravel()] for name in (0, 1)}
    return intervals.choose_base(candidates)


@pytest.mark.parametrize("effect", [0.0, 0.1, 3.0])
def test_the_base_of_a_row_is_that_of_choose_base_over_all_sessions_at_each_look(effect):
    random = numpy.random.default_rng(5)
    times = scatter.draw(random, "independent", 40 * 12, 3, 5).reshape(2, 3, 40, 12, 5)
    host = effect * random.standard_normal((40, 12))
    looks = verdict_rates.looks_of_rows(times, host)
    seen = set()
    for row in range(40):
        eagers = times[0, :2, row] + host[row, :, None]
        names = [base_of(eagers[:, :look]) for look in (3, 6, 12)]
        seen.add(tuple(names))
        for look, name, (mean, half_width) in zip((3, 6, 12), names, looks, strict=True):
            values = (eagers[name, :look] - times[0, 2, row, :look]).mean(axis=-1)
            expected = intervals.interval(values, 0.99)
            assert (mean[row], half_width[row]) == pytest.approx((expected.mean, expected.half_width))
    assert len(seen) > 2  # the base of a row may be another one at a later look


def test_the_rules_of_a_row_and_of_a_session_are_one_with_one_session():
    times = scatter.draw(numpy.random.default_rng(5), "independent", 40, 3, 5)
    ratios = verdict_rates.chosen(times, "session")
    assert (ratios == verdict_rates.chosen(times[:, :, :, None])[:, 0]).all()
    for number in range(40):
        log_ms = times[0][:, number]
        assert ratios[number] == pytest.approx(log_ms[base_of(log_ms)] - log_ms[2])


def test_the_choice_is_by_what_a_quiet_host_sees():
    compared = numpy.array([[[1.0, 1.0, 1.0]], [[2.0, 2.0, 2.0]], [[0.0, 0.0, 0.0]]])
    quiet = numpy.array([[[5.0, 5.0, 0.0]], [[4.0, 4.0, 9.0]], [[0.0, 0.0, 0.0]]])
    assert verdict_rates.chosen([compared, quiet]).tolist() == [[2.0, 2.0, 2.0]]
    assert verdict_rates.chosen([compared, quiet], "session").tolist() == [[2.0, 2.0, 2.0]]
    assert verdict_rates.chosen([compared, quiet], gap=2.0).tolist() == [[1.0, 1.0, 1.0]]
    assert verdict_rates.chosen([compared, quiet], "clear").tolist() == [[1.0, 1.0, 1.0]]
    # Without its own round: of the last pair by (5, 5) and (4, 4), of the others by (5, 0) and (4, 9).
    assert verdict_rates.chosen([compared, quiet], "others").tolist() == [[1.0, 1.0, 2.0]]


def test_the_choice_for_a_row_is_over_all_its_rounds():
    # Two sessions of three rounds; medians of all six: 4.5 and 4; means of sessions' medians: 4.5 and 5.
    quiet = numpy.array([[[5.0, 5.0, 5.0], [4.0, 4.0, 4.0]], [[3.0, 3.0, 4.0], [4.0, 7.0, 7.0]], [[0.0] * 3] * 2])
    compared = numpy.stack([numpy.full((2, 3), each) for each in (1.0, 2.0, 0.0)])
    assert (verdict_rates.chosen([compared, quiet], "row") == 2).all()
    assert (verdict_rates.chosen([compared, quiet], "mean") == 1).all()
    assert verdict_rates.chosen([compared, quiet], "session").tolist() == [[2.0] * 3, [1.0] * 3]
    # A second host so slow that the median is the mean of the highest round of one and the lowest of the other.
    slow = numpy.array([[0.0], [90.0]])
    assert (verdict_rates.chosen([compared, quiet], "row", speed=slow) == 2).all()
    quiet[1, 0, 2] = 6.5
    assert (verdict_rates.chosen([compared, quiet], "row", speed=slow) == 1).all()


def test_auto_is_next_num_rounds():
    assert verdict_rates.auto_schedule() == [8, 10, 12, 14, 15]
    times = scatter.draw(numpy.random.default_rng(5), "independent", 300, 2, 15)
    rates, mean_rounds = verdict_rates.on_this_host(times, 0.01)
    numbers, faster = [], []
    for row in 0.01 * verdict_rates.chosen(times, "session"):
        number = 0
        while (wanted := intervals.next_num_rounds([intervals.interval(row[: max(number, 1)])], number)) != number:
            number = wanted
        numbers.append(number)
        faster.append(intervals.verdict(row[:number] + math.log(1.02)) == "faster")
    assert len(set(numbers)) > 2
    assert mean_rounds == numpy.mean(numbers)
    assert rates[2].power[0, 0] == numpy.mean(faster)


# ------------------------------------------------------------------------------------------------
# Scatter


def test_host_effects_have_mean_zero_and_unit_deviation():
    for shape in {shape for shape, _ in verdict_rates.HOSTS}:
        effect = verdict_rates.host_effect(numpy.random.default_rng(1), shape, 1_000_000)
        assert effect.mean() == pytest.approx(0, abs=0.01)
        assert effect.std() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("kind", "correlation"), [("independent", 0.0), ("AR(1) 0.3", 0.3)])
def test_correlated_runs_keep_their_deviation(kind, correlation):
    times, quiet = scatter.draw(numpy.random.default_rng(1), kind, 100_000, 2, 15)
    assert (times == quiet).all()
    assert times.std(axis=1) == pytest.approx(numpy.ones((2, 15)), abs=0.02)
    assert numpy.corrcoef(times[0, :, 13], times[0, :, 14])[0, 1] == pytest.approx(correlation, abs=0.02)
    assert numpy.corrcoef(times[0, :, 14], times[1, :, 14])[0, 1] == pytest.approx(0, abs=0.02)


NAME = "20261122T031500Z-13f405-c77b"
META = {"schema": 1, "session": NAME, "begin_utc": "2026-11-22T03:15:00Z", "end_utc": None}


def record(variant, number, step_ms, attempt=1, **changes):
    """A sound record of schema 2."""
    found = records.blank(model="m", preset="tiny", variant=variant, round=number, status="pass", device="cuda")
    found["attempt"] = attempt
    found["extra"]["kind"] = "control" if variant == "control" else "eager"
    found["env"].update(boot_id="13f405", gpu_uuid="GPU-c77b", gpu_name="NVIDIA H200", num_gpus=1)
    found["steps"].update(gpu_ms=list(step_ms), batch=[0] * len(step_ms), wall_ms=sum(step_ms))
    if step_ms:
        found["statistic_ms"] = intervals.statistic(step_ms, [0] * len(step_ms))
    return found | changes


def packed(folder, found):
    """The records.jsonl.xz of a session below a folder."""
    path = folder / NAME / sessions.RECORDS
    path.parent.mkdir(parents=True)
    sessions.write_meta(path.parent, META)
    path.write_bytes(lzma.compress("".join(json.dumps(each) + "\n" for each in found).encode()))
    return path


def eager_twice(log_ratios, median_ms=10.0):
    """A session whose control takes median_ms; eager differs by log_ratios in its medians, by twice that in its p10."""
    for number, ratio in enumerate(log_ratios, start=1):
        quiet, usual = (median_ms * math.exp(each) for each in (2 * ratio, ratio))
        yield record("eager", number, [quiet, quiet, usual, usual, usual])
        # No two runs take equally long in every step.
        yield record("control", number, [median_ms * (1 + 1e-9 * number)] * 5)


def test_a_measured_session_is_read_and_centred(tmp_path):
    log_ratios = numpy.array([-0.04, -0.01, -0.02, -0.06, -0.05])
    found = list(eager_twice(log_ratios))
    found += [record("eager", 0, [9.0]), record("control", 0, [5.0])]  # round 0 is no measurement
    found.append(record("graph", 3, [1.0]))
    found.append(record("eager", 6, [], status="oom", message="CUDA out of memory"))
    path = packed(tmp_path / "one", found)
    expected = (log_ratios - log_ratios.mean()) * math.sqrt(5 / 4)
    for named in (path, path.parent):
        measured = scatter.read_measured(named)
        assert measured.log_ratios[:, 0] == pytest.approx(expected, abs=1e-7)
        # The 10th percentile of (q, q, u, u, u) is q.
        assert measured.log_ratios[:, 1] == pytest.approx(2 * expected, abs=1e-7)
        assert (measured.path, measured.num_second, measured.faults) == (str(named), 0, ())


def test_of_a_repeated_round_the_last_attempt_that_both_have_counts(tmp_path):
    log_ratios = numpy.array([-0.04, -0.01, -0.02, -0.06, -0.05])
    again = [record("eager", 5, [20.0], 3), record("eager", 5, [9.0], 2), record("control", 5, [10.0], 2)]
    again.append(record("eager", 4, [20.0], 2))
    # A try that failed and was made once more, and a record that contradicts itself, are no runs.
    tried = record("control", 2, [], status="failed", message="lost")
    tried["extra"]["superseded"] = True
    again += [tried, record("eager", 3, [1.0], 2, statistic_ms=5.0), record("control", 3, [10.5], 2)]
    measured = scatter.read_measured(packed(tmp_path, [*eager_twice(log_ratios), *again]))
    log_ratios[4] = math.log(0.9)
    expected = (log_ratios - log_ratios.mean()) * math.sqrt(5 / 4)
    assert measured.log_ratios[:, 0] == pytest.approx(expected, abs=1e-7)
    assert measured.num_second == 1
    assert len(measured.faults) == 1


def test_a_session_of_three_pairs_is_enough(tmp_path):
    assert len(scatter.read_measured(packed(tmp_path, eager_twice([0.1, 0.2, 0.4]))).log_ratios) == 3


def test_long_steps_have_no_percentile(tmp_path):
    log_ratios = [-0.04, -0.01, -0.02, -0.06, -0.05]
    found = scatter.read_measured(packed(tmp_path, eager_twice(log_ratios, 500.0))).log_ratios
    assert (found[:, 1] == found[:, 0]).all()


def test_resampled_pairs_are_stretches_of_a_measured_session():
    measured = [numpy.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), numpy.array([[100.0, 200.0]] * 7)]
    random = numpy.random.default_rng(1)
    compared, quiet = scatter.draw(random, "resampled", 20_000, 2, 4, measured)
    ratios = compared[0] - compared[1]
    # All rounds of a session are of one measured one, and of one sign.
    small = abs(ratios[:, 0]) < 50
    assert small.mean() == pytest.approx(0.5, abs=0.02)
    assert (abs(ratios[~small]) == 100).all()
    assert set(abs(ratios[small]).ravel()) == {1.0, 3.0, 5.0, 7.0}
    assert (numpy.sign(ratios).std(axis=1) == 0).all()
    assert numpy.sign(ratios[:, 0]).mean() == pytest.approx(0, abs=0.03)
    # Two thirds follow their predecessor, and of the others one in four does so by chance.
    steps = numpy.diff(abs(ratios[small]), axis=1)
    assert numpy.isin(steps, (2.0, -6.0)).mean() == pytest.approx(2 / 3 + 1 / 12, abs=0.02)
    assert quiet[0][small] == pytest.approx(compared[0][small] + numpy.sign(compared[0][small]))


def test_a_resampled_mean_scatters_as_one_of_independent_runs_does():
    # Stretches as long as the session would all have its mean, which is zero.
    ratios = numpy.random.default_rng(2).standard_normal((15, 1)).repeat(2, axis=1)
    ratios -= ratios.mean(axis=0)
    times = scatter.draw(numpy.random.default_rng(1), "resampled", 20_000, 2, 15, [ratios])[0]
    means = (times[0] - times[1]).mean(axis=-1)
    assert 0.5 < means.std() / (ratios[:, 0].std() / math.sqrt(15)) < 1.5


def test_resampled_variants_differ_as_much_as_the_measured_two():
    ratios = numpy.random.default_rng(2).standard_t(3, (200, 1)).repeat(2, axis=1)
    ratios -= ratios.mean(axis=0)
    times = scatter.draw(numpy.random.default_rng(1), "resampled", 100_000, 3, 5, [ratios])[0]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert (times[a] - times[b]).std() == pytest.approx(ratios[:, 0].std(), rel=0.02)


def test_resampled_cases_join_the_tables(tmp_path, capsys):
    random = numpy.random.default_rng(3)
    paths = [
        packed(tmp_path / name, eager_twice(random.normal(0, size, 15)))
        for name, size in (("one", 0.003), ("two", 0.01))
    ]
    measured = [scatter.read_measured(path).log_ratios for path in paths]
    found = [cell for cell in verdict_rates.plain_cells(NUM_RUNS, 1, measured) if cell.kind == "resampled"]
    assert len(found) == 2 * len(verdict_rates.HOSTS)
    for cell in found:
        if cell.is_bound:
            assert cell.rates.holds, cell
    page = tmp_path / "page.md"
    page.write_text(f"{simulate.BEGIN}\n{simulate.END}\n")
    assert simulate.main(["--runs", "200", "--resample", *map(str, paths), "--write", str(page)]) == 0
    assert capsys.readouterr().out == ""
    text = page.read_text()
    assert f"--runs 200 --seed 1 --resample {paths[0]} {paths[1]}`" in text
    assert text.count("| resampled | normal, 5 % | as measured |") == 1
    assert text.count("| resampled |") == len(verdict_rates.HOSTS) + 2 + 1 + 1
    # The sessions are named, with what they hold.
    sizes = [
        f"`{path}` (15 pairs, scatter of their log ratios {100 * of[:, 0].std():.2f} %)"
        for path, of in zip(paths, measured, strict=True)
    ]
    assert f"Resampled: {', '.join(sizes)}." in text


# ------------------------------------------------------------------------------------------------
# The command


def lines(*found):
    return lzma.compress("".join(json.dumps(each) + "\n" for each in found).encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"text", "not a whole archive"),
        (lines(*eager_twice([0.1, 0.2, 0.4, 0.5]))[:-30], "not a whole archive"),
        (lzma.compress(b'{"round": 0}\n{}\n'), "0 pairs of eager and control, 3 are needed (2 faults, the first: "),
        (lzma.compress(b"[1]\n"), "0 pairs"),
        (lzma.compress(b'{"round"\n'), "0 pairs"),
        (lzma.compress(b""), "0 pairs"),
        (lines(*eager_twice([0.1, 0.2])), "2 pairs of eager and control, 3 are needed\n"),
        (lines(*(each for each in eager_twice([0.1, 0.2, 0.3]) if each["variant"] == "eager")), "0 pairs"),
    ],
    ids=["missing", "text", "truncated", "no record", "list", "no json", "empty", "short", "no control"],
)
def test_a_session_that_cannot_be_resampled_is_named(tmp_path, capsys, content, message):
    path = tmp_path / NAME / sessions.RECORDS
    path.parent.mkdir()
    sessions.write_meta(path.parent, META)
    if content is not None:
        path.write_bytes(content)
    refused(capsys, path, message)


def refused(capsys, *paths_and_message):
    *paths, message = paths_and_message
    with pytest.raises(SystemExit) as exit_status:
        simulate.main(["--runs", "100", "--resample", *map(str, paths)])
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(paths[-1]) in error
    assert message in error


def test_what_is_no_packed_session_cannot_be_resampled(tmp_path, capsys):
    path = packed(tmp_path, eager_twice([0.1, 0.2, 0.4]))
    refused(capsys, tmp_path, "no packed session")
    refused(capsys, tmp_path / "other" / NAME, "No such file")
    refused(capsys, path, path.parent, "named twice")


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--runs", "many"], ["--seed", "-1"], ["--run", "500"]])
def test_bad_flags_are_refused(capsys, arguments):
    with pytest.raises(SystemExit) as exit_status:
        simulate.main(arguments)
    assert exit_status.value.code == 2


def test_write_replaces_what_stands_between_the_markers(tmp_path, capsys):
    path = tmp_path / "page.md"
    path.write_text("before\n")
    with pytest.raises(SystemExit):
        simulate.main(["--runs", "100", "--write", str(path)])
    assert "no line" in capsys.readouterr().err
    assert path.read_text() == "before\n"
    path.write_text(f"before\n{simulate.BEGIN}\nold\n{simulate.END}\nafter\n")
    simulate.write(path, "new")
    assert path.read_text() == f"before\n{simulate.BEGIN}\n\nnew\n\n{simulate.END}\nafter\n"


def tables_of_method():
    text = METHOD.read_text()
    return text[text.index(simulate.BEGIN) + len(simulate.BEGIN) : text.index(simulate.END)].strip()


def test_the_method_names_the_command_of_its_tables():
    command = shlex.split(tables_of_method().splitlines()[0].strip("`"))
    assert command[:3] == ["python", "-m", "benchmarks.simulate"]
    assert command[3:7] == ["--runs", str(simulate.NUM_RUNS), "--seed", str(simulate.SEED)]


@pytest.mark.slow
def test_the_tables_of_the_method_are_those_that_the_program_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)  # measured sessions are named from here
    arguments = shlex.split(tables_of_method().splitlines()[0].strip("`"))[3:]
    simulate.main(arguments)
    assert capsys.readouterr().out.strip() == tables_of_method()
