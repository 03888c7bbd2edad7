"""Tables of what a batch job has measured, and what became of its tasks.

    python -m benchmarks.slurm.collate JOB FOLDER...

Each folder is the root of one task's runs, those of nodes it ran on before among them, and has in logs/job-JOB.status
the exit status with which the task ended. Exit status: 0 when every task ended with 0 and left a run, 1 otherwise, with
a line for each that did not.
"""

import sys
from pathlib import Path

from graph_worth.harness.command import parser_of
from graph_worth.harness.files import partial, run_file
from graph_worth.harness.files.facts import Run
from graph_worth.harness.pages import run_table


def outcome(folder: Path, job: str) -> str | None:
    """Return what went wrong with the task of a folder, in words, or None."""
    path = folder / "logs" / f"job-{job}.status"
    if not path.exists():
        return "did not come to its end (killed, cancelled, or never started)"
    status = path.read_text(errors="replace").strip()
    return None if status == "0" else f"ended with exit status {status or 'unknown'}"


def collate(folder: Path, job: str) -> tuple[list[Run], list[str]]:
    """Print the tables of one task; return its runs, and what is wrong with it, in words."""
    runs, damaged = run_file.find(folder) if folder.is_dir() else ([], [])
    # The folder may hold other runs; a job of an array has an id of its own besides.
    runs = [(path, run) for path, run in runs if job in map(run.host.slurm.get, ("job_id", "array_job_id"))]
    for path, run in runs:
        print(f"{path}\n{run.begin_utc} to {run.end_utc}\n\n{run_table.report(run)}\n", flush=True)
    for path in sorted(folder.rglob(f"*{partial.SUFFIX}")):
        print(f"not at its end: {path}\n", flush=True)
    fault = outcome(folder, job)
    return [run for _, run in runs], [*([fault] if fault else []), *damaged, *([] if runs else ["no run"])]


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    parser = parser_of("slurm.collate", "Tables of a batch job's runs.")
    parser.add_argument("job", metavar="JOB", help="id of the job that measured")
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path, help="root of one task's runs")
    args = parser.parse_args(argv)
    runs, failed = [], 0
    for folder in args.folders:
        task_runs, faults = collate(folder, args.job)
        runs += task_runs
        failed += bool(faults)
        for fault in faults:
            print(f"failed: {folder}: {fault}", flush=True)
    if len(runs) > 1:
        print(f"\n{run_table.suite(runs, has_dates=True)}\n")
    print(f"job {args.job}: {len(args.folders) - failed} of {len(args.folders)} tasks ended well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
