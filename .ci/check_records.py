"""Fail unless a folder of benchmarks.run holds every record that it must, each sound.

    PYTHONPATH=. python .ci/check_records.py DIR --model gpt3 --rounds 2

Required are rounds 0 to --rounds of every variant that the model's script names, status `pass` and, for the
--bitwise ones, parity `bitwise`. A variant outside --bitwise that cannot run here has status `unsupported`
in round 0 and needs no more. Prints a line for each fault; exit status 1 when there is one, else 0.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from common import record as records


def find_faults(folder: Path, variants: list[str], bitwise: list[str], num_rounds: int) -> list[str]:
    """One line for each record that is missing, unreadable, not `pass`, or not bitwise where it must be."""
    faults = [f"{name} is not a variant of the model" for name in bitwise if name not in variants]
    for variant in variants:
        for number in range(num_rounds + 1):
            path = folder / records.file_name(variant, number)
            try:
                record = records.read(path)
            except FileNotFoundError:
                faults.append(f"{path.name} is missing")
                continue
            except records.RecordError as error:
                faults.append(str(error))
                continue
            if (record["variant"], record["round"]) != (variant, number):
                faults.append(f"{path.name} holds {record['variant']}, round {record['round']}")
            elif record["status"] == "unsupported" and variant not in bitwise:
                break
            elif record["status"] != "pass":
                faults.append(f"{path.name}: {record['status']}: {record['message']}")
            elif variant in bitwise and record["numerics"]["parity"] != "bitwise":
                faults.append(f"{path.name}: parity is {record['numerics']['parity']}, not bitwise")
    return faults


def describe_variants(model: str) -> list[str]:
    """The variants that `python -m MODEL.train --describe` names. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", f"{model}.train", "--describe"]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return list(json.loads(answer.stdout)["variants"])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="check_records.py", description="Are the records of a folder whole and sound?"
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="OUT of the run")
    parser.add_argument("--model", required=True, help="whose variants to expect")
    parser.add_argument("--rounds", required=True, type=int, metavar="N", help="timed rounds to expect")
    parser.add_argument("--bitwise", default="eager,graph", metavar="A,B", help="must pass, bitwise (eager,graph)")
    args = parser.parse_args(argv)
    variants = describe_variants(args.model)
    faults = find_faults(args.folder, variants, args.bitwise.split(","), args.rounds)
    for fault in faults:
        print(f"check_records.py: {fault}")
    if not faults:
        print(f"{args.folder}: records of {', '.join(variants)} are whole and sound, {args.bitwise} bitwise")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
