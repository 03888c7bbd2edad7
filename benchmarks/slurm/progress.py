"""The check whether a job near its time limit may go back into the queue: only while it comes nearer to its end.

    python -m benchmarks.slurm.progress FOLDER JOB [--begin]

All runs below FOLDER count, sealed and begun, of every node that the job has been on. With --begin, as the job starts,
FOLDER/logs remembers how much stands, unless this job was here before. Later more must stand than at its start and at
any requeue before. Prints one line. Exit status: 0 for a requeue, 1 when it would lead nowhere.
"""

import itertools
import json
import sys
from pathlib import Path

from graph_worth.harness.command import parser_of
from graph_worth.harness.files import partial, run_file

# Facts that a run which goes on does not measure again.
KEPT = ("parity", "plan", "cycle", "profile", "course", "left_out")


def standing(folder: Path) -> list[int]:
    """Return the number of sealed runs below a folder, and that of facts in runs that were begun."""
    sealed, _ = run_file.find(folder)
    begun = [path.read_bytes().splitlines() for path in folder.rglob(f"*{partial.SUFFIX}")]
    return [len(sealed), sum(map(_is_kept, itertools.chain(*begun)))]


def _is_kept(line):
    try:
        return json.loads(line)["fact"] in KEPT
    except (ValueError, TypeError, KeyError):
        # The line that was being written.
        return False


def _memory(folder, job):
    return folder / "logs" / f"job-{job}.progress"


def begin(folder: Path, job: str) -> None:
    """Remember how much stands as a job starts for the first time."""
    if not _memory(folder, job).exists():
        _memory(folder, job).write_text(json.dumps(standing(folder)))


def judge(folder: Path, job: str) -> tuple[bool, str]:
    """Return whether the job goes back into the queue, and why; remembers how much stands if so."""
    memory = _memory(folder, job)
    counts, most = standing(folder), json.loads(memory.read_text()) if memory.exists() else [0, 0]
    what = f"{counts[0]} runs and {counts[1]} facts of runs that were begun"
    if counts <= most:
        return False, (
            f"{what} stand, and no fewer did before ({most[0]} and {most[1]}): ask for more time (TIME=, --time) or, "
            "as other nodes begin runs of their own, for certain nodes (SBATCH=nodelist=...)"
        )
    memory.write_text(json.dumps(counts))
    return True, f"{what} stand, more than before; back into the queue for the rest"


def main(argv=None) -> int:
    """The program."""
    parser = parser_of("slurm.progress", "Whether a job may be queued again.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the root of the task's runs")
    parser.add_argument("job", metavar="JOB", help="id of the job")
    parser.add_argument("--begin", action="store_true", help="the job starts: remember how much stands")
    args = parser.parse_args(argv)
    if args.begin:
        begin(args.folder, args.job)
        return 0
    goes_on, why = judge(args.folder, args.job)
    print(why)
    return 0 if goes_on else 1


if __name__ == "__main__":
    sys.exit(main())
