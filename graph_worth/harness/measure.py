"""Measure your own training step: eager against graphs, in alternating blocks of one process.

    python -m benchmarks.measure --step my_step.py:build
    python -m benchmarks.measure --step my_step.py:build --quick          issue and busy alone, in half a minute
    python -m benchmarks.measure --step my_step.py:build --doctor         what stands against a graph, with lines
    python -m benchmarks.measure --step my_step.py:build --python PATH    the step runs in that interpreter
    python -m benchmarks.measure --step my_step.py:build --json           the verdict as JSON; all else on stderr

docs/your_step.md shows the file. The last line is a verdict. Exit status: 0 faster, 3 same, 4 unclear, 5 wrong numbers,
6 cannot be captured, 7 slower, 8 not measured (--quick, or a CPU); 1 where the step itself fails; 2 for a mistake on
the command line; 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from graph_worth.folders import CODE, OWN_STEP, ROOT, START
from graph_worth.harness import ask, command, judge, run
from graph_worth.harness.ask import Options
from graph_worth.harness.best import best_of
from graph_worth.harness.checks import FENCES
from graph_worth.harness.command import Mistake
from graph_worth.harness.files.facts import Run
from graph_worth.harness.files.run_file import RENAMED
from graph_worth.harness.judge import Judged, Verdict
from graph_worth.harness.pages import roofline
from graph_worth.harness.pages.cells import milliseconds
from graph_worth.harness.processes import gpus, launch, supervisor
from graph_worth.your_step import step_file
from graph_worth.your_step.config import LEAST_GAIN

MODEL = OWN_STEP
FASTER, EAGER_FAILED, SAME, UNCLEAR, WRONG, NO_CAPTURE, SLOWER, NOT_MEASURED = 0, 1, 3, 4, 5, 6, 7, 8
MISTAKE = 2
STATUS_OF = {"faster": FASTER, "same": SAME, "unclear": UNCLEAR, "slower": SLOWER}
# On a CPU `compile` runs where it is named, and the others do not.
COMPILED = ("compile", "graph_step_compiled", "reduce_overhead")
# Measured where the file hands one over.
MINE = "mine"
USUAL = ("graph_step", "graph_fwd_bwd", "graph_modules", *COMPILED)
VARIANTS = ("eager", *USUAL, MINE)
NAMES = {status: word for word, status in STATUS_OF.items()}
NAMES |= {WRONG: "wrong numbers", NO_CAPTURE: "cannot be captured", NOT_MEASURED: "not measured"}
NAMES |= {EAGER_FAILED: "failed"}
PROG = command.prog_of("measure")
DOCTOR_LIMIT_S = 300
# The cycles of the usual process take at most so many seconds, those of the others as few as there may be.
CYCLES_S = 24.0
# A graph of the whole step leaves nothing that a graph of a part would remove.
WHOLE = ("graph_step", *COMPILED)
# Losses of blocks of a step that does otherwise in a capture, as the doctor has compared them.
AWARE_TOLERANCE = 1e-2
LEAST_PYTHON, LEAST_TORCH = (3, 11), (2, 6)
# In the user's interpreter, which may be old: versions of Python and torch.
VERSIONS = """
import json, sys
try:
    from importlib.metadata import version
    torch = version("torch")
except Exception:
    torch = ""
print(json.dumps([list(sys.version_info[:2]), torch]))
"""


def parse(argv=None) -> argparse.Namespace:
    """Return the command line. Mistakes end the program with one line."""
    is_doctor = ROOT != CODE and "--doctor" in (argv or [])
    parser = command.parser_of("doctor" if is_doctor else "measure", "Your own training step, eager against graphs.")
    parser.set_defaults(prog=parser.prog)
    add = parser.add_argument
    add("--step", metavar="FILE.py:BUILD", required=True, help="the file and its function build(device)")
    add("--python", metavar="PATH", help="interpreter that the step runs in; it needs torch 2.6 or newer (this one)")
    add("--doctor", action="store_true", help="only say what stands against a graph of it")
    add("--quick", action="store_true", help="issue and busy of the eager step alone")
    add("--json", action="store_true", help="print the verdict as JSON, and all else on stderr")
    helps = {
        "variants": f"some of {', '.join(VARIANTS[1:])} (those that can be best)",
        "cycles": "cycles (8, of which 5 must fit; CPU 3), or auto",
        "minutes": "go on with cycles until then",
        "ngpu": "GPUs, or ranks on the CPU, under torchrun (1)",
        "out": "root of the runs (runs)",
    }
    ask.add_flags(parser, "measure", **helps)
    return parser.parse_args(argv)


def named_step(step: str, is_sized: bool = False) -> tuple[str, list[str]]:
    """Return a label for a step, FILE.py:FUNCTION, and the flags of its script; `is_sized`: it has to take a size."""
    try:
        path, function = step_file.split(step, is_sized)
        digest = step_file.digest(step)
    except ValueError as error:
        raise Mistake(str(error)) from None
    # From the root of the repository, where workers start, so that a published run names no folder of a machine.
    resolved = path.resolve()
    named = f"{resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else os.path.abspath(path)}:{function}"
    label = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in f"{path.stem}-{function}")
    return label.lstrip("._-")[:48] or "step", ["--step", named, "--step-digest", digest]


def request(args: argparse.Namespace, usual: str | None = None) -> Options:
    """Return the options of the run that measures the step; `usual`: variants where none are named."""
    label, flags = named_step(args.step)
    options = Options(model=MODEL, label=label, flags=flags, **ask.values_for(Options, args))
    options.variants = args.variants or usual
    names = command.words_of(args.variants or "")
    unknown = [name for name in names if name not in VARIANTS and names != ["all"]]
    if unknown and unknown[0] in RENAMED:
        raise Mistake(f"variant {unknown[0]!r} is now {RENAMED[unknown[0]]!r}")
    if unknown:
        raise Mistake(f"unknown variant {unknown[0]!r}, --variants takes some of {', '.join(VARIANTS)}")
    if args.quick:
        options.variants, options.cycles, options.no_control = "eager", 1, True
    if args.variants:
        # What was asked for is waited for.
        flags += ["--compile-limit-s", "0"]
    return options


# ------------------------------------------------------------------------------------------------
# The verdict


def verdict(measured: Run) -> tuple[int, str]:
    """Return the exit status and the verdict of a run in a sentence."""
    builds = [*judge.judged(measured).values()]
    graphs = {
        name: judged
        for judged in builds
        for name, variant in judged.build.variants.items()
        if variant.kind in ("graph", "compile")
    }
    passed = {name: judged for name, judged in graphs.items() if judged.passed(name)}
    wrong = [name for name, judged in graphs.items() if judged.verdicts[name].is_wrong_numbers]
    eager = next((judged.verdicts["eager"] for judged in builds if "eager" in judged.verdicts), None)
    if graphs and not passed and eager is not None and eager.status == "failed":
        return EAGER_FAILED, f"The eager step failed: {eager.reason}."
    if graphs and not passed:
        return _none_passed({name: judged.verdicts[name] for name, judged in graphs.items()}, wrong)
    if measured.device == "cpu" or not graphs:
        return NOT_MEASURED, _not_measured(_first(builds), passed, wrong)
    return _measured(builds, wrong)


def _first(builds: list[Judged]) -> Judged:
    """The build that speaks for the eager step: the first one in which it passed."""
    return next((judged for judged in builds if judged.base), builds[0])


def _none_passed(graphs: dict[str, Verdict], wrong):
    if wrong:
        return WRONG, f"Wrong numbers: {wrong[0]} does not train as the eager step does ({graphs[wrong[0]].reason})."
    if all(failure.status == "unsupported" for failure in graphs.values()):
        return NOT_MEASURED, f"Not measured: {next(iter(graphs.values())).reason}."
    fenced = next((name for name, failure in graphs.items() if failure.fault in FENCES), "")
    if fenced:
        return NOT_MEASURED, f"Not measured: {fenced}: {graphs[fenced].reason}."
    captured = {name: failure for name, failure in graphs.items() if failure.status == "capture_failed"}
    name, failure = next(iter((captured or graphs).items()))
    return NO_CAPTURE, f"Cannot be captured: {name}: {failure.reason}"


def _not_measured(judged: Judged, passed, wrong) -> str:
    parts = []
    if judged.run.device == "cpu":
        parts.append("Not measured: there is no GPU.")
    ceiling = judged.ceiling(judged.base) if judged.base else None
    if ceiling is not None:
        gain = "has little to remove" if ceiling < LEAST_GAIN else f"may gain up to {ceiling:.2f}x"
        parts.append(f"A graph {gain}: a step takes {milliseconds(judged.ms(judged.base))} ms,")
        parts.append(f"the GPU is busy for {milliseconds(judged.working(judged.base).value)} ms.")
    if passed:
        parts.append(f"Graphs that train as eager does: {', '.join(passed)}.")
    if wrong:
        parts.append(f"Wrong numbers: {', '.join(wrong)}.")
    return " ".join(parts) or "Not measured."


def _measured(builds: list[Judged], wrong) -> tuple[int, str]:
    best = best_of(builds)
    if best is None:
        return NOT_MEASURED, "Not measured: fewer than two cycles."
    wrong_text = f" Wrong numbers: {', '.join(wrong)}." if wrong else ""
    return STATUS_OF[best.word], best.sentence + wrong_text


def doctor(options: Options) -> tuple[int, str, dict]:
    """Print what stands against a graph of the step.

    Returns:
        The doctor's exit status, its text, and what it found: "whole_is_right" and "has_mine", see
        `graph_worth.your_step.doctor.Diagnosis`; {} where it has no answer.
    """
    launched = launch.parse(options)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "findings"
        step = options.flags[options.flags.index("--step") + 1]
        words = launched.command([str(START), "graph_worth.your_step.doctor", step, str(text)])
        # Of several ranks each would print its mistake, and torchrun a page about it.
        pipe = subprocess.PIPE if options.ngpu > 1 else None
        streams: dict = {"stdout": sys.stderr if sys.stdout is sys.stderr else None, "stderr": pipe, "text": True}
        process = supervisor.start(words, asks=False, **streams)
        try:
            _, errors = process.communicate(timeout=DOCTOR_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"the doctor has no answer after {DOCTOR_LIMIT_S} s, and is left out")
            return 0, "", {}
        finally:
            supervisor.end(process, supervisor.TERMINATE_S)
        # A supervisor gives 128 + n where signal n ended its command.
        status = 128 - process.returncode if process.returncode > 128 else process.returncode
        if status != MISTAKE:
            print(flush=True)
        prog = os.environ[step_file.PROG]
        mistakes = [line for line in (errors or "").splitlines() if line.startswith(prog)]
        if mistakes:
            print(mistakes[0], file=sys.stderr)
            return MISTAKE, "", {}
        diagnosis_path = text.with_suffix(".json")
        if not diagnosis_path.is_file():
            return status, "", {}
        diagnosis = json.loads(diagnosis_path.read_text())
        findings = text.read_text()
        if status < 0 and diagnosis["has_mine"]:
            # It was written before the capture that the file itself makes was tried.
            findings += f"\nyour capture: the doctor was ended by {supervisor.name_of_signal(-status)}"
            print(findings, flush=True)
            return NO_CAPTURE, findings, diagnosis
        # Of several ranks each returns 0.
        return status or diagnosis["status"], findings, diagnosis


def _usual(args, options: Options, seen: dict) -> Options:
    """The request with the variants that are measured where none are named."""
    has_gpu = bool(gpus.find_gpus().names)
    is_whole = has_gpu and seen.get("whole_is_right")
    if is_whole:
        print(f"The whole step can be captured, so parts of it are left out; --variants={','.join(VARIANTS)} has them.")
    names = WHOLE if is_whole else [name for name in USUAL if has_gpu or name not in COMPILED]
    return request(args, ",".join([*names, *([MINE] if seen.get("has_mine") else [])]))


def _beside_doctor(measured: Run, doctor_status: int, seen: dict) -> tuple[int, str]:
    """The verdict of a run, which says how it fits to the doctor's."""
    status, sentence = verdict(measured)
    builds = judge.judged(measured).values()
    whole = next((judged.verdicts["graph_step"] for judged in builds if "graph_step" in judged.verdicts), None)
    # The others may be trusted where the run itself found the graph of the whole step wrong.
    is_seen = whole is not None and whole.status in ("failed", "numerics_failed")
    if doctor_status == WRONG and status != NO_CAPTURE and not is_seen:
        return WRONG, f"Wrong numbers: see what the doctor found above. {sentence}"
    if status == WRONG and seen.get("suspects"):
        sentence += f" Probably because of {seen['suspects'][0]}."
    elif status in (WRONG, NO_CAPTURE) and seen.get("whole_is_right"):
        sentence += " The doctor's graph of the whole step did not show it in eight steps."
    elif doctor_status == NO_CAPTURE and whole is not None and whole.status == judge.PASS:
        passed = "The whole step could be captured here, whatever the doctor found above."
        sentence += f" {passed if measured.device == 'cuda' else 'A GPU refuses graph_step: see the doctor above.'}"
    return status, sentence


def _as_captured(options: Options) -> None:
    """Compare graphs with eager steps that do what they do in a capture; those of blocks do what they do without."""
    options.flags += ["--as-captured", "true"]
    options.tolerance = AWARE_TOLERANCE


def _check_root(options: Options) -> None:
    """Make the root of the runs now: the doctor may need minutes before a run would find that it cannot.

    Raises:
        Mistake: nothing can be written there.
    """
    root = Path(options.out).resolve() if options.out else command.RUNS
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Mistake(f"--out {options.out}: {error.strerror}") from None
    if not os.access(root, os.W_OK | os.X_OK):
        raise Mistake(f"--out {root}: nothing can be written there")


def require_torch(python: str, is_named: bool) -> None:
    """Ask an interpreter for its versions.

    Raises:
        Mistake: it does not run, or is too old, or has no torch or one that is too old.
    """
    done = subprocess.run([python, "-c", VERSIONS], check=False, capture_output=True, text=True)
    try:
        version, torch = json.loads(done.stdout)
    except ValueError:
        raise Mistake(f"--python {python}: it does not run as Python does") from None
    least = "{}.{}".format(*LEAST_TORCH)
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    if tuple(version) < LEAST_PYTHON:
        raise Mistake(f"--python {python} is Python {version[0]}.{version[1]}, this takes 3.11 or newer")
    if numbers is None:
        hint = "" if is_named else ": name the interpreter of your training, as in --python .venv/bin/python"
        raise Mistake(f"--python {python} has no torch{hint}")
    if tuple(map(int, numbers.groups())) < LEAST_TORCH:
        raise Mistake(f"--python {python} has torch {torch}, this takes {least} or newer")


def _as_json(measured: Run, path: Path, sentence: str) -> dict:
    """The numbers behind a verdict; times in ms, the eager step's and its busy time's quotient as "at_most"."""
    builds = [*judge.judged(measured).values()]
    judged = _first(builds)
    # Variants that stand apart have an eager and a control of their own.
    timed = {name: build for build in reversed(builds) for name in build.build.variants if build.passed(name)}
    ratios = {name: build.ratio_of(name) for name, build in timed.items() if name != build.base}
    point = roofline.point_of(judged, judged.base) if judged.base else None
    return {
        "text": sentence,
        "run": str(path),
        "step_ms": judged.ms(judged.base),
        "busy_ms": judged.working(judged.base).value,
        "at_most": judged.ceiling(judged.base),
        "roofline": point and {"kernel_us": point.kernel_us, "host_us": point.host_us, "gain": point.expected},
        "variants": {
            name: {"ms": timed[name].ms(name), "ratio": ratio.ratio, "low": ratio.low, "high": ratio.high}
            for name, ratio in ratios.items()
            if ratio is not None
        },
    }


def measure(args: argparse.Namespace) -> int:
    """Measure the step that the command line names, print the verdict as asked, and return the exit status."""
    if not args.json:
        return _measure(args, {})
    answer: dict = {}
    with contextlib.redirect_stdout(sys.stderr):
        status = _measure(args, answer)
    if status != MISTAKE:
        words = NAMES | ({0: "nothing stands against a graph"} if args.doctor else {})
        print(json.dumps({"verdict": words.get(status, "failed"), "status": status, **answer}))
    return status


def _measure(args, answer: dict) -> int:
    """The exit status; what --json says beside it goes to `answer`."""
    begin_s = time.monotonic()
    options = request(args)
    os.environ[step_file.PROG] = args.prog
    if Path.cwd() != CODE:
        os.environ[step_file.FOLDER] = os.getcwd()
    require_torch(launch.parse(options).python, args.python is not None)
    ask.require_ranks(options.ngpu, gpus.find_gpus())
    is_left_out = args.quick and not args.doctor
    if not args.doctor:
        _check_root(options)
    doctor_status, findings, seen = (0, "", {}) if is_left_out else doctor(options)
    doctor_s = 0.0 if is_left_out else round(time.monotonic() - begin_s, 2)
    if args.doctor and doctor_status < 0:
        name = supervisor.name_of_signal(-doctor_status)
        print(f"{args.prog}: the doctor was ended by {name}, perhaps out of host memory", file=sys.stderr)
        return 1
    if args.doctor or doctor_status == MISTAKE:
        answer["text"] = findings
        return doctor_status
    if doctor_status not in (0, WRONG, NO_CAPTURE):
        ended = f" (ended by {supervisor.name_of_signal(-doctor_status)})" if doctor_status < 0 else ""
        print(f"The doctor itself failed{ended} and is left out.")
    if not args.variants and not args.quick:
        options = _usual(args, options, seen)
    if seen.get("is_capture_aware"):
        _as_captured(options)
    if args.cycles is None and args.minutes is None and not args.host_load:
        options.cycles_s = CYCLES_S
    options.doctor_s = doctor_s
    ((measured, path),), _ = run.measured(options)
    if path is None:
        print("The eager step failed, so nothing was timed.")
        return EAGER_FAILED
    status, sentence = _beside_doctor(measured, doctor_status, seen)
    print(run.page_line(path, findings, sentence))
    answer |= _as_json(measured, path, sentence)
    print(sentence)
    return status


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    return command.exit_status(args.prog, lambda: measure(args), run.FAILURES)


if __name__ == "__main__":
    sys.exit(main())
