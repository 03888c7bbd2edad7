"""Whether a job that is near its time limit may go back into the queue: only while it comes nearer to its end.

    python -m benchmarks.slurm.progress FOLDER JOB STARTED

Records of all sessions below FOLDER are counted, open and packed, of every node that the job has run on: some must be
newer than the file STARTED, which was written when this start began, and they must be more than at any requeue of JOB
before, which FOLDER/logs remembers. Prints one line. Exit status: 0 for a requeue, 1 when it would lead nowhere.
"""

import sys
from pathlib import Path

from benchmarks import sessions
from benchmarks.command import parser_of

# benchmarks.run measures these again.
NOT_KEPT = ("failed", "timeout")


def standing(folder: Path) -> list[int]:
    """When each record that stands was written, ns since the epoch, over all sessions below folder."""
    times = []
    for session in sessions.find(folder) if folder.is_dir() else []:
        found, _ = sessions.read_records(session)
        for where, record in found:
            if record["status"] not in NOT_KEPT and not record["extra"].get("superseded"):
                times.append(Path(where.rsplit(":", 1)[0] if ".xz:" in where else where).stat().st_mtime_ns)
    return times


def judge(folder: Path, job: str, started: Path) -> tuple[bool, str]:
    """(whether to go back into the queue, why); notes the count if so."""
    since = started.stat().st_mtime_ns
    found = standing(folder)
    num_new = sum(written > since for written in found)
    memory = folder / "logs" / f"job-{job}.progress"
    most = int(memory.read_text()) if memory.exists() else 0
    if not num_new:
        return False, "no run ended well within the time limit: ask for more (TIME=, --time)"
    if len(found) <= most:
        return False, (
            f"{len(found)} records after this start and {most} at an earlier requeue: ask for more time (TIME=) or, as "
            "other nodes begin a session of their own, for certain nodes (SBATCH=nodelist=...)"
        )
    memory.write_text(f"{len(found)}\n")
    return True, f"{len(found)} records stand, {num_new} of them new; back into the queue for the rest"


def main(argv=None) -> int:
    parser = parser_of("slurm.progress", "Whether a job may be queued again.")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the task's records")
    parser.add_argument("job", metavar="JOB", help="id of the job")
    parser.add_argument("started", metavar="STARTED", type=Path, help="a file as old as this start of the job")
    args = parser.parse_args(argv)
    goes_on, why = judge(args.folder, args.job, args.started)
    print(why)
    return 0 if goes_on else 1


if __name__ == "__main__":
    sys.exit(main())
