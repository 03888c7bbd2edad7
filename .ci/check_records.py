"""Fail unless the sessions of benchmarks.run below a root hold every record that they must, each sound.

    PYTHONPATH=. python .ci/check_records.py ROOT --model gpt3 --rounds 2

Required are, in each session, packed, rounds 0 to --rounds of every variant that the model's script names, status
`pass` and, for the --bitwise ones, parity `bitwise`. A variant outside --bitwise that cannot run here has status
`unsupported` in round 0 and needs no more. Prints a line for each fault; exit status 1 when there is one, else 0.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import sessions
from common import record as records


def find_faults(root: Path, variants: list[str], bitwise: list[str], num_rounds: int) -> list[str]:
    """One line for each record that is missing, unreadable, not `pass`, or not bitwise where it must be."""
    faults = [f"{name} is not a variant of the model" for name in bitwise if name not in variants]
    found = sessions.find(root) if root.is_dir() else []
    if not found:
        faults.append(f"no session below {root}")
    for session in found:
        if sessions.is_open(session):
            faults.append(f"{session.name} is not packed")
        faults += [f"{session.name}: {fault}" for fault in session_faults(session, variants, bitwise, num_rounds)]
    return faults


def session_faults(session: Path, variants: list[str], bitwise: list[str], num_rounds: int) -> list[str]:
    """The same of one session. First attempts count: a run that was repeated has both."""
    read, faults = sessions.read_records(session)
    faults = [fault.replace(f"{session}/", "") for fault in faults]
    standing = [record for _, record in read if not record["extra"].get("superseded")]
    runs = {(record["variant"], record["round"], record.get("attempt", 1)): record for record in standing}
    for variant in variants:
        for number in range(num_rounds + 1):
            name = records.file_name(variant, number).removesuffix(".json")
            record = runs.get((variant, number, 1))
            if record is None:
                faults.append(f"{name} is missing")
            elif record["status"] == "unsupported" and variant not in bitwise:
                break
            elif record["status"] != "pass":
                faults.append(f"{name}: {record['status']}: {record['message']}")
            elif variant in bitwise and record["numerics"]["parity"] != "bitwise":
                faults.append(f"{name}: parity is {record['numerics']['parity']}, not bitwise")
    return faults


def describe_variants(model: str) -> list[str]:
    """The variants that `python -m MODEL.train --describe` names. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", f"{model}.train", "--describe"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(answer.stdout)["variants"])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="check_records.py", description="Are the sessions below a root whole and sound?"
    )
    parser.add_argument("root", metavar="ROOT", type=Path, help="OUT of the run")
    parser.add_argument("--model", required=True, help="whose variants to expect")
    parser.add_argument("--rounds", required=True, type=int, metavar="N", help="timed rounds to expect")
    parser.add_argument("--bitwise", default="eager,graph", metavar="A,B", help="must pass, bitwise (eager,graph)")
    args = parser.parse_args(argv)
    variants = describe_variants(args.model)
    faults = find_faults(args.root, variants, args.bitwise.split(","), args.rounds)
    for fault in faults:
        print(f"check_records.py: {fault}")
    if not faults:
        print(f"{args.root}: records of {', '.join(variants)} are whole and sound, {args.bitwise} bitwise")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
