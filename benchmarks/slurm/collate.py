"""Tables of what a batch job has measured, and what became of its tasks.

    python -m benchmarks.slurm.collate JOB FOLDER...

Each folder is the root of one task's sessions, those of nodes it ran on before among them, and has in
logs/job-JOB.status the exit status with which the task ended. Writes summary.csv and table.md into each group of
sessions and prints the tables. Exit status: 0 when every task ended with 0 and left
records, 1 otherwise, with a line for each that did not.
"""

import sys
from pathlib import Path

from benchmarks import compare, frame
from benchmarks.command import parser_of


def outcome(folder: Path, job: str) -> str | None:
    """What went wrong with the task of `folder`, in words, or None."""
    path = folder / "logs" / f"job-{job}.status"
    if not path.exists():
        return "did not come to its end (killed, cancelled, or never started)"
    status = path.read_text().strip()
    return None if status == "0" else f"ended with exit status {status or 'unknown'}"


def collate(folder: Path, job: str) -> list[str]:
    """Write and print the tables of one task; returns what is wrong with it, in words."""
    faults = [fault] if (fault := outcome(folder, job)) else []
    try:
        runs = frame.read(folder)
    except FileNotFoundError:
        return [*faults, "no records"]
    faults += runs.faults
    if runs.frame.empty:
        return [*faults, "no records"]
    for group, part in runs.frame.groupby("group", sort=True):
        place = folder if group == "." else folder / group
        try:
            compare.write_summary(place)
            text, _ = compare.report(part, [], metas=runs.metas)
            print(f"{place}: {part['session'].nunique()} sessions, {len(part)} records\n\n{text}\n", flush=True)
        except (compare.Mixed, OSError) as error:
            faults.append(f"{group}: {error}")
    return faults


def main(argv=None) -> int:
    parser = parser_of("slurm.collate", "Tables of a batch job's records.")
    parser.add_argument("job", metavar="JOB", help="id of the job that measured")
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="root of one task's sessions")
    args = parser.parse_args(argv)
    failed = 0
    for folder in args.folders:
        faults = collate(folder, args.job)
        failed += bool(faults)
        for fault in faults:
            print(f"failed: {folder}: {fault}", flush=True)
    print(f"job {args.job}: {len(args.folders) - failed} of {len(args.folders)} tasks ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
