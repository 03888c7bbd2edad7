""".ci/run and .ci/check_records.py: what they run, what they refuse, and what their last line says.

pytest tests/test_ci.py
"""

import importlib.util
import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from benchmarks import sessions
from common import record as records

CI = Path(__file__).resolve().parent.parent / ".ci"
VARIANTS = ["eager", "graph", "graph_te"]
SESSION = "20261122T031500Z-13f405-cpu0"

spec = importlib.util.spec_from_file_location("check_records", CI / "check_records.py")
check_records = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_records)


def write(session, variant, number, status="pass", parity="bitwise", attempt=1, **extra):
    record = records.blank(variant=variant, round=number, status=status, attempt=attempt)
    record["message"] = extra.pop("message", "")
    record["numerics"]["parity"] = parity
    record["extra"].update(extra)
    suffix = ".t1.json" if extra else ".json"
    records.write(session / records.file_name(variant, number, attempt).replace(".json", suffix), record)


@pytest.fixture
def session(tmp_path):
    """Two rounds, still open, as they are on a machine without a GPU: graph_te cannot run."""
    path = tmp_path / "cpux1" / "gpt3-tiny" / f"{SESSION}.open"
    for variant in ("eager", "graph"):
        for number in range(3):
            write(path, variant, number)
    write(path, "graph_te", 0, status="unsupported", parity=None)
    sessions.write_meta(path, {"schema": 1, "session": SESSION})
    return path


def find_faults(session):
    """Of the session, packed."""
    sessions.pack(session, "complete")
    faults = check_records.find_faults(session.parents[2], VARIANTS, ["eager", "graph"], 2)
    assert all(fault.startswith(f"{SESSION}: ") for fault in faults)
    return [fault.removeprefix(f"{SESSION}: ") for fault in faults]


# ------------------------------------------------------------------------------------------------
# check_records.py


def test_whole_and_sound_records_have_no_fault(session):
    assert find_faults(session) == []


@pytest.mark.parametrize("name", ["eager.r0", "eager.r2", "graph.r1", "graph_te.r0"])
def test_missing_record(session, name):
    (session / f"{name}.json").unlink()
    assert find_faults(session)[0] == f"{name} is missing"


@pytest.mark.parametrize("status", [status for status in records.STATUSES if status != "pass"])
def test_status_other_than_pass(session, status):
    write(session, "graph", 1, status=status, message="the reason")
    assert find_faults(session) == [f"graph.r1: {status}: the reason"]


def test_variant_that_may_be_unsupported_must_pass_where_it_runs(session):
    for number in range(3):
        write(session, "graph_te", number, parity="differs")
    write(session, "graph_te", 2, status="oom", parity=None, message="no memory")
    assert find_faults(session) == ["graph_te.r2: oom: no memory"]


@pytest.mark.parametrize("parity", [None, "differs"])
@pytest.mark.parametrize(("variant", "number"), [("eager", 0), ("graph", 0), ("graph", 2)])
def test_parity_other_than_bitwise(session, variant, number, parity):
    write(session, variant, number, parity=parity)
    assert find_faults(session) == [f"{variant}.r{number}: parity is {parity}, not bitwise"]


def test_a_failed_try_that_was_made_once_more_and_a_second_attempt_are_no_fault(session):
    write(session, "graph", 1, status="failed", superseded=True)
    write(session, "graph", 1, attempt=2)
    assert find_faults(session) == []


def test_a_second_attempt_alone_is_no_run(session):
    (session / "graph.r1.json").unlink()
    write(session, "graph", 1, attempt=2)
    assert find_faults(session) == ["graph.r1 is missing"]


def test_an_open_session_and_none_are_faults(session, tmp_path):
    root = session.parents[2]
    assert check_records.find_faults(root, VARIANTS, ["eager", "graph"], 2) == [f"{SESSION}.open is not packed"]
    for empty in (tmp_path / "none", root / "cpux1" / "nothing"):
        assert check_records.find_faults(empty, VARIANTS, [], 2) == [f"no session below {empty}"]


def test_damaged_archive_is_a_fault(session):
    path = sessions.pack(session, "complete") / sessions.RECORDS
    path.write_bytes(path.read_bytes()[:200])
    faults = check_records.find_faults(session.parents[2], VARIANTS, ["eager", "graph"], 2)
    assert faults[0].startswith(f"{SESSION}: records.jsonl.xz: not a whole archive")
    assert f"{SESSION}: eager.r0 is missing" in faults


def test_a_line_that_is_no_record_is_a_fault(session):
    (session / "graph.r2.json").write_text('{"schema": 99}')
    faults = find_faults(session)
    assert faults[0].startswith("records.jsonl.xz:6: ") and faults[1] == "graph.r2 is missing"


def test_bitwise_variant_that_the_model_does_not_have_is_a_fault(session):
    root = sessions.pack(session, "complete").parents[2]
    assert check_records.find_faults(root, ["eager"], ["eager", "graph"], 2) == ["graph is not a variant of the model"]


def test_exit_status_follows_the_faults(session, monkeypatch, capsys):
    monkeypatch.setattr(check_records, "describe_variants", lambda model: VARIANTS)
    arguments = [str(sessions.pack(session, "complete").parents[2]), "--model", "fake", "--rounds", "2"]
    assert check_records.main(arguments) == 0
    assert check_records.main([*arguments[:-1], "3"]) == 1
    assert f"{SESSION}: eager.r3 is missing" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# run

FAKE_MAKE = """#!/bin/bash
echo "make $*" >>"$CALLS"
case $1 in
test) echo "==== 12 passed, 2 skipped, 9 deselected in 3.21s ====" ;;
test-slow) echo "${SLOW_SUMMARY:-3 passed, 18 deselected in 61.00s (0:01:01)}" ;;
bench)
    echo "12 steps a second"
    [ -z "${ENDLESS:-}" ] || exec sleep 60
    ;;
esac
[ "$1" != "${FAILING:-}" ] || exit 2
"""

# What comes in packages, all there, so that nothing is installed.
SLURM = ("sbatch", "slurmctld", "slurmd", "munged")
PACKAGED = (*SLURM, "git", "shellcheck", "espeak-ng")
TOOLS = ("awk", "bash", "cat", "chmod", "dirname", "env", "id", "mktemp", "rm", "sleep", "tee")
FAKE_SUDO = '#!/bin/bash\nshift\nexec "$@"\n'
# Installs the names in INSTALLS beside itself.
FAKE_APT = """#!/bin/bash
echo "apt-get $*" >>"$CALLS"
[ "${FAILING:-}" != apt-get ] || exit 100
[[ "$*" == *install* ]] || exit 0
for name in ${INSTALLS:-sbatch slurmctld slurmd munged}; do
    : >"${0%/*}/$name"
    chmod +x "${0%/*}/$name"
done
"""

# Stands for the interpreter of pip and of the checker.
FAKE_PYTHON = """#!/bin/bash
echo "python $*" >>"$CALLS"
step=records
[[ "$*" != *pip* ]] || step=triton
[ "${FAILING:-}" != $step ] || exit 1
"""


def run_ci(tmp_path, packaged=PACKAGED, **variables):
    """A copy of .ci/run among fakes: (exit status, output lines, calls)."""
    (tmp_path / ".ci").mkdir()
    # Only what is in the folder counts, not this machine's daemons.
    (tmp_path / ".ci" / "run").write_text((CI / "run").read_text().replace(":/usr/sbin", ""))
    (tmp_path / ".ci" / "run").chmod(0o755)
    fakes = {name: "#!/bin/bash\n" for name in packaged}
    for name, text in {
        "make": FAKE_MAKE,
        "python": FAKE_PYTHON,
        "apt-get": FAKE_APT,
        "sudo": FAKE_SUDO,
        **fakes,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in TOOLS:
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "work").mkdir()
    environment = {
        "PATH": str(tmp_path),
        "PYTHON": str(tmp_path / "python"),
        "CALLS": str(tmp_path / "calls"),
        "TMPDIR": str(tmp_path / "work"),
        "CI": "true",
        **variables,
    }
    answer = subprocess.run(
        [tmp_path / ".ci" / "run"], cwd="/", env=environment, capture_output=True, text=True, timeout=30
    )
    assert not list((tmp_path / "work").iterdir()), "the temporary folder is left behind"
    return answer.returncode, answer.stdout.splitlines(), (tmp_path / "calls").read_text().splitlines()


def test_ci_runs_every_step_and_sums_the_tests(tmp_path):
    status, lines, calls = run_ci(tmp_path)
    assert status == 0
    assert calls[0] == "make lint" and calls[1].startswith("python -m pip ") and " triton==" in calls[1]
    assert calls[2] == "make test"
    # The benchmark runs beside the slow tests.
    bench, slow = sorted(calls[3:5])
    assert bench.startswith("make bench MODEL=gpt3 PRESET=tiny ROUNDS=2 OUT=") and slow == "make test-slow"
    folder = bench.partition("OUT=")[2]
    assert calls[5:] == [f"python .ci/check_records.py {folder} --model gpt3 --rounds 2"]
    assert lines.index("12 steps a second") > lines.index("3 passed, 18 deselected in 61.00s (0:01:01)")
    assert lines[-1].startswith("15 passed, 2 skipped in ")


@pytest.mark.parametrize(
    ("failing", "num_calls", "status", "passed"),
    [
        ("lint", 1, 2, 0),
        ("triton", 2, 1, 0),
        ("test", 3, 2, 12),
        ("test-slow", 4, 2, 15),
        ("bench", 4, 2, 15),
        ("records", 5, 1, 15),
    ],
)
def test_ci_stops_at_the_step_that_fails(tmp_path, failing, num_calls, status, passed):
    returned, lines, calls = run_ci(tmp_path, FAILING=failing)
    assert (returned, len([call for call in calls if not call.startswith("make bench")])) == (status, num_calls)
    assert lines[-2] == f"step {failing} failed with exit status {status}"
    assert lines[-1].startswith(f"1 failed, {passed} passed, ")


def test_ci_ends_the_benchmark_where_slow_tests_fail(tmp_path):
    start = time.monotonic()
    status, lines, _ = run_ci(tmp_path, FAILING="test-slow", ENDLESS="1")
    assert status == 2 and lines[-2] == "step test-slow failed with exit status 2"
    assert time.monotonic() - start < 30


def test_ci_installs_what_the_tests_with_slurm_need(tmp_path):
    # As after apt install slurm-client slurmd.
    status, _, calls = run_ci(tmp_path, packaged=("sbatch", "slurmd", "munged", "git"))
    assert status == 0
    assert calls[:2] == [
        "apt-get -qq update",
        "apt-get -qq install -y --no-install-recommends shellcheck espeak-ng slurm-wlm munge",
    ]
    assert calls[2] == "make lint"


def test_ci_installs_what_a_bare_machine_lacks(tmp_path):
    # PYTHON unset: .venv would be made with the machine's python3, which is not there.
    status, _, calls = run_ci(tmp_path, packaged=("shellcheck", "espeak-ng"), PYTHON="", FAILING="lint")
    assert (status, calls[1].partition("recommends ")[2]) == (2, "git python3-venv slurm-wlm munge")


@pytest.mark.parametrize("variables", [{"INSTALLS": "sbatch slurmd munged"}, {"FAILING": "apt-get"}])
def test_ci_fails_where_slurm_could_be_installed_and_was_not(tmp_path, variables):
    status, lines, calls = run_ci(tmp_path, packaged=("git", "shellcheck", "espeak-ng"), **variables)
    assert status != 0 and not any(call.startswith("make") for call in calls)
    assert lines[-2].startswith("step packages failed")


def test_ci_without_slurm_if_told(tmp_path):
    status, _, calls = run_ci(tmp_path, packaged=("git", "shellcheck", "espeak-ng"), WITHOUT_SLURM="1")
    assert status == 0 and calls[0] == "make lint"


def test_ci_installs_nothing_that_is_there(tmp_path):
    assert run_ci(tmp_path)[2][0] == "make lint"


def test_ci_counts_failed_tests(tmp_path):
    summary = "2 failed, 1 passed, 1 error in 4.00s"
    _, lines, _ = run_ci(tmp_path, FAILING="test-slow", SLOW_SUMMARY=summary)
    assert lines[-1].startswith("3 failed, 13 passed, 2 skipped in ")


def test_checker_asks_the_training_script_for_its_variants(tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    text = json.dumps({"variants": {"eager": "", "graph": ""}})
    (tmp_path / "fake" / "train.py").write_text(f"import sys\nassert sys.argv[1:] == ['--describe']\nprint({text!r})\n")
    monkeypatch.chdir(tmp_path)
    assert check_records.describe_variants("fake") == ["eager", "graph"]
    (tmp_path / "fake" / "train.py").write_text("raise SystemExit(2)\n")
    with pytest.raises(subprocess.CalledProcessError):
        check_records.describe_variants("fake")
