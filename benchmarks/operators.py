"""Every operator of torch in a graph: what a capture refuses, and what replays wrongly on other inputs.

    python -m benchmarks.operators              a few minutes on a GPU; then copy the file to results/operators/

graph_worth/measuring/captured_operators.py tries them, in several processes. One that ends is started again behind the
operator that ended it. Exit status: 0; 2 for a mistake on the command line.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from graph_worth.files import write_text
from graph_worth.folders import ROOT
from graph_worth.harness.command import RUNS, Mistake, exit_status, parser_of, positive, shown, words_of
from graph_worth.harness.files.partial import utc
from graph_worth.harness.processes import launch
from graph_worth.harness.processes.gpus import find_gpus
from graph_worth.harness.run import SOURCE
from graph_worth.text import printable

# A sample that takes longer hangs.
SILENT_S = 120
CHILD = ("-m", "graph_worth.measuring.captured_operators")
NAMES = "from graph_worth.measuring.captured_operators import operators; print(*operators(), sep='\\n')"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = parser_of("operators", "Every operator of torch in a graph.")
    parser.add_argument("--operators", metavar="A,B", type=words_of, default=[], help="these alone (all)")
    parser.add_argument("--processes", metavar="N", type=positive, default=4, help="at a time (4)")
    parser.add_argument("--out", metavar="DIR", type=Path, default=RUNS / "operators", help="(runs/operators)")
    return parser.parse_args(argv)


def survey(args: argparse.Namespace) -> int:
    """Try the operators, write the file and print the results."""
    host, gpus = launch.describe_here()["env"], find_gpus()
    torch_version, device = host["torch"], "cuda" if gpus.names else "cpu"
    names = subprocess.run([sys.executable, "-c", NAMES], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        raise Mistake(f"torch's samples cannot be read: {printable(names.stderr.strip().splitlines()[-1])}")
    known = names.stdout.split()
    unknown = sorted(set(args.operators) - set(known))
    if unknown:
        raise Mistake(f"--operators {unknown[0]}: torch {torch_version} has no samples of it")
    wanted = args.operators or known
    shares = [wanted[number :: args.processes] for number in range(args.processes)]
    with ThreadPoolExecutor(args.processes) as threads:
        rows = [row for share_rows in threads.map(lambda share: surveyed(share, device), shares) for row in share_rows]
    outcomes: dict[str, dict] = {name: {} for name in sorted(wanted)}
    for row in rows:
        outcomes[row["operator"]][row["pass"]] = {key: row[key] for key in ("outcome", "why")}
    source = {key: host[name] for key, name in SOURCE.items()} | {"clean": host["git_dirty"] is False}
    gpu = gpus.names[0] if gpus.names else "CPU"
    file = {"torch": torch_version, "gpu": gpu, "begin_utc": utc(), "source": source, "operators": outcomes}
    path = args.out / f"{gpus.slug}-torch{torch_version.partition('+')[0]}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(file, indent=0) + "\n")
    for row in rows:
        if row["outcome"] in ("crashed", "refused", "wrong"):
            print(f"{row['operator']} {row['pass']}: {row['outcome']}: {row['why']}")
    for kind in ("forward", "backward"):
        counts = Counter(row["outcome"] for row in rows if row["pass"] == kind)
        print(f"{kind}: {', '.join(f'{number} {outcome}' for outcome, number in counts.most_common())}")
    print(shown(path))
    return 0


def surveyed(names: list[str], device: str) -> list[dict]:
    """The outcome of each operator in each pass that was tried."""
    rows: list[dict] = []
    while names:
        command = [sys.executable, *CHILD, "--device", device]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        ) as child:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n".join(names))
            child.stdin.close()
            begun: dict = {}
            watch = threading.Timer(SILENT_S, child.kill)
            watch.start()
            for line in child.stdout:
                watch.cancel()
                watch = threading.Timer(SILENT_S, child.kill)
                watch.start()
                begun = json.loads(line)
                rows += [begun] if "outcome" in begun else []
            watch.cancel()
        if not begun and child.returncode == 0:
            # What is left are operators whose results are not written.
            break
        if not begun:
            raise RuntimeError(f"{names[0]}: no process can try it, it ended with status {child.returncode}")
        if "outcome" not in begun:
            rows.append(begun | {"outcome": "crashed", "why": f"its process ended with status {child.returncode}"})
        names = names[names.index(begun["operator"]) + 1 :]
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status."""
    args = parse(argv)
    return exit_status("python -m benchmarks.operators", lambda: survey(args))


if __name__ == "__main__":
    sys.exit(main())
