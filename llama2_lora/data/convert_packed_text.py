"""Make .jsonl of MLPerf's packed text, which is an .npy of pickled dicts. Run once; training reads no pickle.

    python -m llama2_lora.data.convert_packed_text --in train.npy --out govreport/train.jsonl --trust-input
    python -m llama2_lora.data.convert_packed_text --in validation.npy --out govreport/validation.jsonl --trust-input
    python -m llama2_lora.train --data govreport

A child process of limited memory and time unpickles them (`common/training/data/trusted_pickles.py`).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from common.config import Parser, mistakes_in_one_line
from common.files import sync
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
    with open(path, "rb") as file, open(out, "w") as written:
        for row in trusted_pickles.load_npy(file).tolist():
            # Arrays and numbers of numpy become lists and numbers.
            written.write(json.dumps(row, default=lambda value: value.tolist()) + "\n")


def convert(path: Path, out: Path, limits: Limits) -> rows.Source:
    """Write `out` whole or not at all, and read it. ValueError in one line that names --in or --out."""
    open_regular(path, "--in").close()
    if out.suffix != ".jsonl":
        raise ValueError(f"--out {shown(out)}: takes a name that ends in .jsonl")
    if os.path.lexists(out):
        raise ValueError(f"--out {shown(out)}: is there already, take another name")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".convert-") as folder:
            partial = Path(folder, out.name)
            arguments = [str(path.absolute()), str(partial.absolute())]
            try:
                trusted_pickles.run("llama2_lora.data.convert_packed_text:write", arguments, limits)
                source = rows.read([partial], _ANY_VOCABULARY)  # as training will read it
            except ValueError as error:
                told = str(error).removeprefix(f"{rows.FLAG}: ").replace(shown(partial), "it")
                raise ValueError(f"--in: {shown(path)}: {told}") from None
            sync(partial)
            os.replace(partial, out)
        sync(out.parent)
    except OSError as error:
        raise ValueError(f"--out {shown(out)}: cannot write there ({error.strerror})") from None
    return source


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
