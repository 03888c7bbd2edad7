"""Fail unless a benchmark left one whole run file below a root, in which every variant is sound.

    PYTHONPATH=. python .ci/check_run.py ROOT --cycles 3

The status of each variant must be pass or unsupported, that of the --bitwise ones pass. What passed is bitwise equal to
its reference before and after its blocks, and has blocks in every cycle. Exit status: 0, or 1 with a line for each
fault.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.files import run_file


def find_faults(root: Path, bitwise: list[str], num_cycles: int) -> list[str]:
    """A line for each fault of the run below a root."""
    found, faults = run_file.find(root) if root.is_dir() else ([], [])
    if len(found) != 1:
        faults.append(f"{len(found)} run files below {root}, not one")
    for path, run in found:
        if path.stat().st_mode & 0o222:
            faults.append(f"{path.name} is not sealed, it may be written")
        faults += [f"{path.name}: {fault}" for fault in run_faults(run, bitwise, num_cycles)]
    return faults


def run_faults(run: run_file.Run, bitwise: list[str], num_cycles: int) -> list[str]:
    """The same of a run, in which no variant promises less than bitwise equality on a CPU."""
    faults = [] if run.whole else ["it ended early"]
    variants = {name for build in run.builds.values() for name in build.variants}
    faults += [f"{name} is missing" for name in bitwise if name not in variants]
    for build in run.builds.values():
        if build.cycles != num_cycles:
            faults.append(f"{build.cycles} cycles, not {num_cycles}")
        for name, own in build.variants.items():
            if own.status == "unsupported" and name not in bitwise:
                continue
            if own.status != "pass":
                faults.append(f"{name}: {own.status}: {own.reason}")
                continue
            cycles = {block.cycle for block in own.blocks}
            if len(cycles) != num_cycles:
                faults.append(f"{name}: blocks in {len(cycles)} cycles, not {num_cycles}")
            parity = own.parity
            if name != run.control and (parity is None or (parity.result, parity.after) != ("bitwise", "bitwise")):
                seen = f"{parity.result or 'none'}, after its blocks {parity.after or 'none'}" if parity else "none"
                faults.append(f"{name}: parity is {seen}; not bitwise")
    return faults


def main(argv=None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="check_run.py", description="Is the run below a root whole and sound?")
    parser.add_argument("root", metavar="ROOT", type=Path, help="OUT of the run")
    parser.add_argument("--cycles", required=True, type=int, metavar="N", help="cycles to expect")
    parser.add_argument("--bitwise", default="eager,graph_layer", metavar="A,B", help="must pass (eager,graph_layer)")
    args = parser.parse_args(argv)
    faults = find_faults(args.root, args.bitwise.split(","), args.cycles)
    for fault in faults:
        print(f"check_run.py: {fault}")
    if not faults:
        print(f"{args.root}: one run, whole and sound, {args.bitwise} bitwise")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
