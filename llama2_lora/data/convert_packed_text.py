"""Make .safetensors of MLPerf's packed text, which is an .npy of pickled dicts. Run once; training reads no pickle.

    python -m llama2_lora.data.convert_packed_text --in train.npy --out govreport/train.safetensors --trust-input
    python -m llama2_lora.data.convert_packed_text --trust-input --in validation.npy \
        --out govreport/validation.safetensors
    python -m llama2_lora.train --data govreport

The rows have the fields of `llama2_lora/data/rows.py`. A child process of limited memory and time unpickles them
(`common/training/data/trusted_pickles.py`).
"""

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


def write(path: str, out: str) -> dict:
    """Unpickle `path`, write its rows to `out`, return their counts. Runs in a child of `trusted_pickles.run`."""
    with open(path, "rb") as file:
        source = rows.collect(path, trusted_pickles.load_npy(file).tolist())
    rows.write_safetensors(out, source)
    return {"documents": len(source.starts) - 1, "tokens": len(source.tokens), "counted": int(source.counted.sum())}


def convert(path: Path, out: Path, limits: Limits) -> dict:
    """Write `out` whole or not at all. ValueError in one line that names --in or --out."""
    open_regular(path, "--in").close()
    if out.suffix != ".safetensors":
        raise ValueError(f"--out {shown(out)}: takes a name that ends in .safetensors")
    if os.path.lexists(out):
        raise ValueError(f"--out {shown(out)}: is there already, take another name")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".convert-") as folder:
            partial = Path(folder, out.name)
            try:
                arguments = [str(path.absolute()), str(partial.absolute())]
                written = trusted_pickles.run("llama2_lora.data.convert_packed_text:write", arguments, limits)
                rows.read([partial], _ANY_VOCABULARY)  # as training will read it
            except ValueError as error:
                told = str(error).removeprefix(f"{rows.FLAG}: ")
                for name in (path.absolute(), partial):
                    told = told.replace(shown(name), shown(path))
                raise ValueError(f"--in: {told}" if shown(path) in told else f"--in: {shown(path)} {told}") from None
            sync(partial)
            os.replace(partial, out)
        sync(out.parent)
    except OSError as error:
        raise ValueError(f"--out {shown(out)}: cannot write there ({error.strerror})") from None
    return written


def main(argv=None) -> int:
    """Exit status: 0, or 2 after a mistake or if the input cannot be converted."""
    parser = Parser(
        prog="python -m llama2_lora.data.convert_packed_text", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--in", dest="path", type=Path, required=True, metavar="FILE", help="an .npy of dicts")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the .safetensors file to write")
    trusted_pickles.add_flags(parser, LIMITS)
    args = parser.parse_args(argv)
    limits = trusted_pickles.require_trust(args, parser)
    try:
        written = convert(args.path, args.out, limits)
    except ValueError as error:
        parser.error(str(error))
    print(f"{shown(args.out)}: " + ", ".join(f"{count:,} {name}" for name, count in written.items()))
    return 0


if __name__ == "__main__":
    with mistakes_in_one_line("llama2_lora", "data.convert_packed_text"):
        status = main()
    sys.exit(status)
