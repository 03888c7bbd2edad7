"""Watch the training steps of any script, unchanged: what could a graph gain, and what stands against it?

    python -m benchmarks.watch -- python train.py --epochs 3
    python -m benchmarks.watch -- torchrun --nproc-per-node 2 train.py
    python -m benchmarks.watch --json -- python train.py          what was seen as JSON; all else on stderr

Steps are the calls of a torch.optim optimizer's step(); after ten, ten are timed, and the next ten have their kernels
and their reads on the host noted. What was seen is printed then, on stderr, or at the script's end. Exit status: the
script's, 128 + n where signal n ended it; 2 for a mistake on the command line.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from graph_worth.folders import PACKAGE
from graph_worth.harness import command
from graph_worth.harness.pages import roofline
from graph_worth.text import printable
from graph_worth.your_step.config import LEAST_GAIN

HOOK = PACKAGE / "your_step" / "hook"
# The environment variable that the hook reads.
FOLDER = "GRAPH_WORTH_WATCH"
NEEDED = 30
POLL_S = 0.5
# Of what a process has told, see ScriptWatch of graph_worth/your_step/script_watch.py.
_OF_STEPS = ("steps", "loop", "optimizer", "num_calls", "step_ms", "issue_ms", "second_streams")
_OF_GPU = ("busy_ms", "kernels", "collective_ms", "graph_share")
KEPT = (*_OF_STEPS, *_OF_GPU, "differ", "shapes", "error")
# The call that makes a graph of the whole step, by the loop of ScriptWatch.
CALLS = {
    "transformers": "graph_worth.transformers.GraphedTrainer in the place of Trainer, on one GPU",
    "lightning": "graph_worth.lightning.CUDAGraphCallback among the Trainer's callbacks, on one GPU",
    "": "graph_worth.graphed of your step",
}
SECOND_STREAM = "second stream: {}; a graph of kernels this short replays up to 10 % faster where all are on one"
WHY_NOT = ("in a capture", "in the loader")
# Over the reads of each kind.
TITLES = {
    "reads on the host, which no graph can hold:": lambda note: note not in WHY_NOT,
    "reads that a capture may skip, for which their code asks:": lambda note: note == WHY_NOT[0],
    "reads of the data loader, outside of the step:": lambda note: note == WHY_NOT[1],
}
RARE = "the ten steps differ in their reads: such as come every 10 or 100 steps may be missing"
NOT_SEEN = {
    "": "no Python process has loaded the watch, which -I, -E and -S of Python pass over, and Python before 3.11",
    "python": "the script has imported no torch",
    "torch": "no optimizer of torch.optim has made a step",
}


def run(words: list[str], folder: Path, stdout=None, meanwhile: Callable[[], object] = bool) -> int:
    """Run a command with the hook; return its exit status, 128 + n where signal n ended it.

    stdout: a file in the place of this program's. meanwhile: is called again and again until the command ends.

    Raises:
        Mistake: it cannot be started.
    """
    paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}
    try:
        process = subprocess.Popen(words, env=environment, stdout=stdout)
    except OSError as error:
        raise command.Mistake(f"{words[0]}: {error.strerror}") from None
    # The terminal sends Ctrl-C to the script, too.
    signal.signal(signal.SIGINT, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: process.send_signal(number))
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(POLL_S)
            return status if status >= 0 else 128 - status
        meanwhile()


def seen_by(folder: Path) -> tuple[int, dict]:
    """Return (processes that made steps, what one of them has told), {} without any.

    Of several processes the first rank, and the one that came farthest.
    """
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("steps-*.json"))]
    return len(reports), min(reports, key=lambda report: (report["rank"], -report["steps"]), default={})


def is_whole(folder: Path) -> bool:
    """Return whether all processes that made steps have told all that they will."""
    reports = [json.loads(path.read_text()) for path in folder.glob("steps-*.json")]
    return bool(reports) and all("reads" in report or "error" in report for report in reports)


def text_of(folder: Path) -> str:
    """Return what the processes of the script have told, in lines."""
    number, report = seen_by(folder)
    if not report:
        reached = [name for name in ("torch", "python") if (folder / name).exists()]
        return f"nothing was seen: {NOT_SEEN[(reached or [''])[0]]}"
    lines = [f"{number} processes made steps; this is process {report['pid']}"] if number > 1 else []
    if "error" in report:
        lines.append(f"the watch has ended early: {report['error']}")
    if "step_ms" not in report:
        return "\n".join([*lines, f"fewer than {NEEDED} steps were made: ten, then twenty that are looked at"])
    lines.append(f"a step is a call of step() of {report['optimizer']}")
    lines += [f"  in it are {count:g} calls of {name}" for name, count in report["num_calls"].items()]
    lines += _pace(report)
    lines += [SECOND_STREAM.format(line or "set by no line of the script") for line in report.get("second_streams", [])]
    lines += _reads(report)
    for name, shapes in report.get("shapes", {}).items():
        if len(shapes) > 1:
            kinds = "; ".join(" ".join(str(list(shape)) for shape in input_shapes) for input_shapes in shapes)
            lines.append(f"the inputs of {name} change their shapes, each of which needs a graph: {kinds}")
    return "\n".join(lines)


def _pace(report) -> list[str]:
    step_ms, busy_ms, kernels = report["step_ms"], report.get("busy_ms"), report.get("kernels")
    text = f"step {step_ms:.4g} ms"
    if not report["on_gpu"]:
        return [f"{text}; the busy time, and with it what a graph can gain, needs a GPU"]
    if not busy_ms or not kernels:
        return [f"{text}; the GPU's busy time was not seen"]
    text += (
        f": {kernels:,.0f} kernels keep the GPU busy for {busy_ms:.4g} ms of it, {1e3 * busy_ms / kernels:.3g} us each"
    )
    share = report.get("graph_share") or 0.0
    lines = [text + (f"; graphs launch {100 * share:.0f} % of them already" if share > 0 else "")]
    if waiting_ms := report.get("collective_ms"):
        lines.append(f"{waiting_ms:.4g} ms of these are NCCL's, which also wait for other ranks: a graph may gain more")
    expected, ceiling = expected_of(report), step_ms / busy_ms
    if expected is None:
        return lines
    host = (
        f"this host takes {1e3 * report['issue_ms'] / kernels:.3g} us a kernel for all that the script does in a step: "
    )
    if expected < LEAST_GAIN:
        idle = f", though the GPU waits for {100 - 100 / ceiling:.0f} % of the step" if ceiling >= LEAST_GAIN else ""
        return [*lines, f"{host}a graph has little to remove{idle}"]
    most = f", and {ceiling:.2f}x (step / busy) at most" if ceiling > expected else ""
    lines.append(f"{host}expect up to {expected:.2f}x from a graph of the whole step{most}")
    if "CUBLAS_WORKSPACE_CONFIG" in os.environ:
        lines.append("  CUBLAS_WORKSPACE_CONFIG is set: torch 2.11 parses it at each matrix product, for 40 to 80 us")
    return [*lines, f"  {roofline.ERROR}", f"  for it: {CALLS[report.get('loop', '')]}"]


def expected_of(report: dict) -> float | None:
    """Return the gain of a graph of the whole step by the launch roofline; None where a time was not seen."""
    busy_ms, issue_ms = report.get("busy_ms"), report.get("issue_ms")
    return roofline.gain(issue_ms / busy_ms) if busy_ms and issue_ms else None


def _reads(report):
    if "reads" not in report:
        return [] if "error" in report else [f"reads on the host were not looked at in fewer than {NEEDED} steps"]
    if not report["reads"]:
        return ["reads on the host: none"]
    lines = []
    for words, is_of in TITLES.items():
        reads = [read for read in report["reads"] if is_of(read[3])]
        lines += [words] if reads else []
        for line, name, number, note in reads:
            remedy = f"\n    {note}" if note and note not in WHY_NOT else ""
            lines.append(f"  {line}: {name}, {number:g} in a step{remedy}")
    return lines + [RARE] * report.get("differ", False)


def as_json(folder: Path, status: int, text: str) -> dict:
    """Return what was seen for programs: times in ms, and quotients of them; what was not seen is missing.

    "at_most" is step / busy, and "expected" the gain by the launch roofline.
    """
    number, report = seen_by(folder)
    answer = {"status": status, "text": text, "processes": number}
    answer |= {name: report[name] for name in KEPT if name in report}
    if report.get("busy_ms"):
        answer |= {"at_most": report["step_ms"] / report["busy_ms"], "expected": expected_of(report)}
    names = ("line", "call", "in_a_step", "note")
    return answer | {"reads": [dict(zip(names, read, strict=True)) for read in report.get("reads", [])]}


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    arguments, words = command.split_flags(argv)
    parser = command.parser_of("watch", "What could a graph gain in a script?", "The script's command follows --.")
    parser.add_argument("--json", action="store_true", help="print what was seen as JSON, and all else on stderr")
    args = parser.parse_args(arguments)
    if not words:
        parser.error("takes a command behind --, as in -- python train.py")

    def work() -> int:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            answer: list[str] = []
            seen = 0

            def show(lines):
                print("\n".join(["", *map(printable, lines)]), file=sys.stderr, flush=True)

            def look():
                nonlocal answer, seen
                if not seen and is_whole(folder):
                    seen, answer = seen_by(folder)[0], text_of(folder).splitlines()
                    show(answer)

            status = run(words, folder, sys.__stderr__ if args.json else None, look)
            number, report = seen_by(folder)
            lines = []
            if status > 128 and status - 128 in set(signal.Signals):
                lines.append(f"the script was ended by {signal.Signals(status - 128).name}")
            elif status and not report:
                lines.append(f"the script ended with status {status}")
            if seen and number > seen:
                lines.append(f"{number} processes made steps; the answer above is of the first")
            answer = answer or text_of(folder).splitlines()
            if lines or not seen:
                show(lines if seen else lines + answer)
            if args.json:
                print(json.dumps(as_json(folder, status, "\n".join(map(printable, lines + answer)))))
        return status

    return command.exit_status(parser.prog, work, stopped="")


if __name__ == "__main__":
    sys.exit(main())
