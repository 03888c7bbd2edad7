"""Copy sealed run files, unchanged, into results/.

    python -m benchmarks.publish runs/h200x1/gpt3-bench/20261125T101500Z-a7d396c1.json

A published file is never changed or removed. --as-is copies a run that a fence (docs/method.md) stopped, and prints
its failure. Exit status: 0; 1 where a run is refused, with a line that says why; 2 for
a mistake on the command line.
"""

import functools
import re
import sys
from pathlib import Path

from graph_worth.files import write_text
from graph_worth.folders import ROOT
from graph_worth.harness import program_epochs
from graph_worth.harness.checks import FENCES
from graph_worth.harness.command import parser_of
from graph_worth.harness.files import run_file
from graph_worth.harness.files.facts import Census, Epochs, Run, folder_of, folder_of_sweep
from graph_worth.harness.files.run_file import CENSUS, EPOCHS, Content, runs_of
from graph_worth.harness.judge import Judged, judged
from graph_worth.harness.processes.gpus import Gpus
from graph_worth.machine.source import last_commits, source_hash_of_commit
from graph_worth.text import digits, printable

# A run of few cycles adds a host or a size; its row says so and is no headline by itself.
LEAST_CYCLES = 3
# Of one program at least, eager and graphed.
LEAST_EPOCHS, LEAST_STEPS = 2, 100
# How far back the source of a run is looked for.
COMMITS = 50
ON_A_CPU = "measured on a CPU, which says nothing about the speed of a GPU"
UNKNOWN_SOURCE = "measured from a tree with changes, or of an unknown commit; commit first, then measure"
NOTHING_TIMED = "nothing in it was timed"
# Names of folders and files are made of these, so none leads out of results/.
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class NotPublished(ValueError):
    """A run that is not published; the text is one line that names the file and the reason."""


def publish(path: Path, results: Path, as_is: bool = False) -> Path:
    """Copy a run file into results/<gpu>x<count>/<model>-<preset>[-<label>]/ under its own id; return the copy.

    A file that is published already stays as it is. `as_is`: one with a variant that a fence stopped is copied, too.

    Raises:
        run_file.Damaged: it is no whole run file of this schema.
        NotPublished: it is no evidence, or another file of this name is published.
        OSError: a folder cannot be written.
    """
    # Its folder, the folder of its machine, and no link in any of them: a link may lead to anyone's files.
    for entry in (path.absolute(), *list(path.absolute().parents)[:2]):
        if entry.is_symlink():
            raise NotPublished(f"{path}: {entry.name} is a link; publish takes regular files")
    content = run_file.read_all(path)
    reason = why_not(content, as_is)
    if reason:
        raise NotPublished(f"{path}: {reason}")
    target = results.joinpath(*folders_of(content), f"{content.id}.json")
    for entry in (target, target.parent, target.parent.parent):
        if entry.is_symlink():
            raise NotPublished(f"{path}: {entry} is a link; nothing is written there")
    data = path.read_bytes()
    if target.exists():
        if target.is_file() and target.read_bytes() == data:
            return target
        raise NotPublished(f"{path}: {target} is published with other content; nothing is copied")
    if any(
        variant.sealed
        for run in runs_of(content)
        for build in run.builds.values()
        for variant in build.variants.values()
    ):
        raise NotPublished(f"{path}: schema 3 holds verdicts, and few facts to judge by; measure again")
    write_text(target, data)
    target.chmod(0o444)
    return target


def folders_of(content: Content) -> tuple[str, str]:
    """("h200x1", "gpt3-bench"), of what the run says of itself; census, epochs or gpt3-bench-over-batch of several."""
    run = content.runs[0] if isinstance(content, Census) else content
    slug = Gpus(names=tuple(gpu.name for gpu in run.host.gpus)).slug
    if isinstance(run, Epochs):
        return f"{slug}x1", EPOCHS
    folder = folder_of(run.model, run.preset, run.label)
    if isinstance(content, Census):
        folder = folder_of_sweep(run.model, run.preset, run.swept_label, run.over) if run.over else CENSUS
    return f"{slug}x{run.ranks}", folder


def why_not(content: Content, as_is: bool = False) -> str:
    """Return the reason why a file is no evidence, in a few words, or ""."""
    if isinstance(content, Run):
        return _why_not(content, as_is)
    if isinstance(content, Epochs):
        return _why_not_epochs(content)
    if not content.runs:
        return "a census without a run"
    if len({(run.host.boot, run.ranks) for run in content.runs}) > 1:
        return "a census of several hosts"
    if len({run.over and (run.over, run.model, run.preset, run.swept_label) for run in content.runs}) > 1:
        return "points of several sweeps"
    if not all(_WORD.fullmatch(word) for word in (content.id, *folders_of(content))):
        return "its id or folder cannot be the name of a file"
    reasons = [_why_not(run, as_is) for run in content.runs]
    # A point that does not fit is a row of its sweep.
    of_points = NOTHING_TIMED if content.runs[0].over and NOTHING_TIMED in reasons and "" in reasons else None
    return next((reason for reason in reasons if reason not in ("", of_points)), "")


def _why_not_epochs(content: Epochs) -> str:
    if not content.host.gpus:
        return ON_A_CPU
    if not _WORD.fullmatch(content.id):
        return "its id cannot be the name of a file"
    if not is_committed(content.source):
        return UNKNOWN_SOURCE
    if not content.runs:
        return "it holds no epoch"
    few: dict[str, str] = {}
    for program in dict.fromkeys(run.program for run in content.runs):
        for form in ("eager", "graphed"):
            number = sum(run.steps >= LEAST_STEPS for run in program_epochs.of(content, program, form))
            if number < LEAST_EPOCHS:
                few.setdefault(program, f"{program} {form}: {number} epochs of {LEAST_STEPS} steps, of {LEAST_EPOCHS}")
    # A file whose time was short may have a single epoch of other programs.
    if all(run.program in few for run in content.runs):
        return next(iter(few.values()))
    return "; ".join(program_epochs.faults(content))


def stopped(judged_build: Judged) -> list[str]:
    """Return what the fences stopped in a build, as "graph_step failed: it gains ..."."""
    verdicts = judged_build.verdicts.items()
    return [f"{name} failed: {verdict.reason}" for name, verdict in verdicts if verdict.fault in FENCES]


def _why_not(run: Run, as_is: bool) -> str:
    if run.preset.startswith("tiny"):
        return f"preset {run.preset} shows that variants work, nothing about speed"
    if run.device != "cuda" or not run.host.gpus:
        return ON_A_CPU
    if not all(_WORD.fullmatch(word) for word in (run.id, *folders_of(run))):
        return "its id, model, preset or label cannot be the name of a file"
    if not is_committed(run.source):
        return UNKNOWN_SOURCE
    if not run.whole:
        return "it ended before all that was asked was measured; the same make bench goes on with it"
    if not run.builds:
        return "it holds no build"
    for name, judged_build in judged(run).items():
        if not any(variant.blocks for variant in judged_build.build.variants.values()):
            continue
        label = f"build {name}" if name else "the run"
        fenced = stopped(judged_build)
        if fenced and not as_is:
            return f"{fenced[0]}; --as-is publishes it with this failure"
        if not judged_build.base and not fenced:
            return f"no eager variant of {label} passed"
        if judged_build.quiet_cycles < LEAST_CYCLES:
            return (
                f"{label} has {judged_build.quiet_cycles} whole cycles without busy processes, "
                f"published runs have at least {LEAST_CYCLES}"
            )
    if not any(judged_build.base or stopped(judged_build) for judged_build in judged(run).values()):
        return NOTHING_TIMED
    return ""


def added(path: Path, results: Path) -> list[str]:
    """Return a line for each row that a file would add to: its times, and the hosts that the row has without it."""
    # Copying a file needs no pandas.
    from benchmarks import corrections, frame
    from benchmarks.pages import tables

    content = run_file.read_all(path)
    if isinstance(content, Epochs):
        return [*map(program_epochs.line_of, content.runs)]
    runs_with_path = [(path, run) for run in runs_of(content)]
    fenced = [text for _, run in runs_with_path for build in judged(run).values() for text in stopped(build)]
    published = frame.load(results)
    before = {(frame.where_of(row), row.variant, row.base): row for row in published.records()}
    lines = [f"published as it is: {text}" for text in fenced]
    points = frame.points_of(runs_with_path, corrections.read(results))
    declared = {*points["variant"][points["headline"]]}
    for row in frame.records(frame.rows(frame.measured(points))):
        if row.kind == "eager" or row.control or row.variant not in declared:
            continue
        name = f"{row.machine}, {row.workload} {row.variant}"
        old = before.get((frame.where_of(row), row.variant, row.base))
        if row.base_ms is None or row.ms is None:
            lines.append(f"{name}: {row.status} ({row.reason})")
            continue
        hosts = published.hosts["host"][published.hosts["row"] == old.row] if old else []
        kind = "a host more" if str(runs_with_path[0][1].host.boot) not in {*hosts} else "a run more of a known host"
        known = f"before {tables.gain_and_hosts(old)}" if old and old.hosts else ""
        lines.append(
            f"{name}: {kind} ({known or 'the first'}): {digits(row.base_ms)} / {digits(row.ms)} ms, "
            f"{tables.with_beside(tables.gain(row), row)}; {row.note}".rstrip("; ")
        )
    return lines


def is_committed(source: dict, root: Path = ROOT) -> bool:
    """Return whether a run's source is that of a commit here: the commit that it names, or one of the last commits.

    The answer of git on the run's machine does not count: a copy there may lie beside a .git of another commit.
    """
    wanted, named = source.get("hash"), source.get("commit")
    if not isinstance(wanted, str) or not wanted:
        return False
    if isinstance(named, str) and source_hash_of_commit(named, root) == wanted:
        return True
    return wanted in _hashes(tuple(last_commits(COMMITS, root)), root)


@functools.cache
def _hashes(commits, root):
    """Source hashes of commits: a second and a half for fifty."""
    return {source_hash_of_commit(sha, root) for sha in commits}


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = parser_of("publish", "Copy sealed run files, unchanged, into results/.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="RUN", help="a run file, as make bench names it")
    parser.add_argument("--as-is", action="store_true", help="also a run that a fence stopped; its failure is printed")
    parser.add_argument("--into", type=Path, default=ROOT / "results", metavar="DIR", help="results/")
    args = parser.parse_args(argv)
    refused = 0
    for path in args.paths:
        try:
            lines = added(path, args.into)
            print("\n  ".join([str(publish(path, args.into, args.as_is)), *map(printable, lines)]))
        except (ValueError, OSError) as error:
            refused += 1
            text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
            print(f"python -m benchmarks.publish: {printable(' '.join(text.split()))}", file=sys.stderr)
    if refused < len(args.paths):
        print("make readme writes the overview and the tables of the READMEs; then commit all of it")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
