"""Make .jsonl of MLPerf's packed text, which is an .npy of pickled dicts. Run once; training reads no pickle.

    python -m llama2_lora.data.convert_packed_text --in train.npy --out govreport/train.jsonl --trust-input
    python -m llama2_lora.data.convert_packed_text --in validation.npy --out govreport/validation.jsonl --trust-input
    python -m llama2_lora.train --data govreport

A child process of limited memory and time unpickles them (`common/training/data/trusted_pickles.py`).
"""

import json
import os
import sys
from pathlib import Path

from common.config import Parser, mistakes_in_one_line, require_writable
from common.files import write_whole
from common.training.data import trusted_pickles
from common.training.data.limits import open_regular, shown
from common.training.data.trusted_pickles import Limits
from llama2_lora.data import rows

# A list of 8192 numbers takes 36 bytes for each, MLPerf's 3,901 rows 1.4 GB.
LIMITS = Limits(memory_gib=16, minutes=30)
# Ids of 32 bits: training compares them with --vocab.
_ANY_VOCABULARY = 2**31


def write(path: str, out: str) -> None:
    """Unpickle the rows of `path` and write them to `out`. Runs in a child of `trusted_pickles.run`."""
    with open(path, "rb") as file:
        rows_of_file = trusted_pickles.load_npy(file).tolist()
    # Arrays and numbers of numpy become lists and numbers.
    lines = (json.dumps(row, default=lambda value: value.tolist()) + "\n" for row in rows_of_file)
    write_whole(out, lambda file: file.writelines(line.encode() for line in lines))


def convert(path: Path, out: Path, limits: Limits) -> rows.Source:
    """Write `out` and read it as training will. ValueError in one line that names --in or --out."""
    open_regular(path, "--in").close()
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {shown(out)}: takes a name that ends in .jsonl")
    if os.path.lexists(out):
        raise ValueError(f"--out {shown(out)}: is there already, take another name")
    require_writable("--out", out)
    arguments = [str(path.absolute()), str(out.absolute())]
    try:
        trusted_pickles.run("llama2_lora.data.convert_packed_text:write", arguments, limits)
        return rows.read([out], _ANY_VOCABULARY)
    except ValueError as error:
        out.unlink(missing_ok=True)
        told = str(error).removeprefix(f"{rows.FLAG}: ").replace(shown(out), "it")
        raise ValueError(f"--in: {shown(path)}: {told}") from None


def main(argv=None) -> int:
    """Exit status: 0, or 2 after a mistake or if the input cannot be converted."""
    parser = Parser(
        prog="python -m llama2_lora.data.convert_packed_text", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--in", dest="path", type=Path, required=True, metavar="FILE", help="an .npy of dicts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    trusted_pickles.add_flags(parser, LIMITS)
    args = parser.parse_args(argv)
    limits = trusted_pickles.require_trust(args, parser)
    try:
        source = convert(args.path, args.out, limits)
    except ValueError as error:
        parser.error(str(error))
    counts = {"documents": len(source.starts) - 1, "tokens": len(source.tokens), "counted": int(source.counted.sum())}
    print(f"{shown(args.out)}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    with mistakes_in_one_line("llama2_lora", "data.convert_packed_text"):
        status = main()
    sys.exit(status)
