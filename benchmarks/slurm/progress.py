"""Whether a job that is near its time limit may go back into the queue: only while it comes nearer to its end.

    python -m benchmarks.slurm.progress FOLDER JOB STARTED

Records in FOLDER that the next start will keep are counted: some must be newer than the file STARTED, which was
written when this start began, and they must be more than at any requeue of JOB before, which FOLDER/logs remembers.
A job that always comes back on other nodes, and there measures anew, ends by that. Prints one line. Exit status: 0 for
a requeue, 1 when it would lead nowhere.
"""

import argparse
import sys
from pathlib import Path

from common import record as records

# benchmarks.run measures these again.
NOT_KEPT = ("failed", "timeout")


def standing(folder: Path) -> list[Path]:
    """Published records that a resumed session keeps, unless it runs on another machine."""
    return [path for path in sorted(folder.glob("*.r*.json")) if _stands(path)]


def _stands(path):
    try:
        return records.read(path)["status"] not in NOT_KEPT
    except (records.RecordError, OSError):
        return False


def judge(folder: Path, job: str, started: Path) -> tuple[bool, str]:
    """(whether to go back into the queue, why); notes the count if so."""
    since = started.stat().st_mtime_ns
    found = standing(folder)
    num_new = sum(path.stat().st_mtime_ns > since for path in found)
    memory = folder / "logs" / f"job-{job}.progress"
    most = int(memory.read_text()) if memory.exists() else 0
    if not num_new:
        return False, "no run ended well within the time limit: ask for more (TIME=, --time)"
    if len(found) <= most:
        return False, (
            f"{len(found)} records after this start and {most} at an earlier requeue: on other nodes, or after a "
            "change, all is measured anew; ask for more time (TIME=) or for certain nodes (SBATCH=nodelist=...)"
        )
    memory.write_text(f"{len(found)}\n")
    return True, f"{len(found)} records stand, {num_new} of them new; back into the queue for the rest"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slurm.progress", description="Whether a job may be queued again.", allow_abbrev=False
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the task's records")
    parser.add_argument("job", metavar="JOB", help="id of the job")
    parser.add_argument("started", metavar="STARTED", type=Path, help="a file as old as this start of the job")
    args = parser.parse_args(argv)
    goes_on, why = judge(args.folder, args.job, args.started)
    print(why)
    return 0 if goes_on else 1


if __name__ == "__main__":
    sys.exit(main())
