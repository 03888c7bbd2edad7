"""A folder of text as tokens, byte by byte, in memory."""

import codecs
import os
import sys
from pathlib import Path

import numpy as np

from common.data.megatron_tokens import starts_as_index
from graph_worth.config import require_folder_of_its_own
from graph_worth.text import printable

# Each rank holds all of the text in its memory; larger text belongs into Megatron's token files, which are mapped.
MAX_FILES = 100_000
MAX_TEXT_BYTES = 2**30

_ELSE = "take one of its folders, or make Megatron token files (.bin, .idx) of it"


def read(path, end: bytes) -> tuple[np.ndarray, str]:
    """Return tokens and name of all UTF-8 files below `path`, whatever their suffix, in the order of their names.

    Hidden files are left out, and files that are not UTF-8, which the first rank names on stderr.

    Args:
        path: the folder.
        end: bytes behind each file.

    Returns:
        uint8 [n], read-only, and the folder's name.

    Raises:
        ValueError: there is no text, a file cannot be read, the folder has token files of Megatron, or more than
            MAX_FILES names or MAX_TEXT_BYTES in all; of these limits before any text is read.
    """
    root = Path(path)
    require_folder_of_its_own("--data", str(root.resolve()))
    paths = _files(root)
    for file in paths:
        if file.suffix == ".idx" and starts_as_index(file):
            prefix = printable(file.with_suffix(""))
            raise ValueError(f"--data {path}: this folder has token files of Megatron, name them: --data {prefix}")
    sizes = [file.stat().st_size for file in paths]
    if sum(sizes) > MAX_TEXT_BYTES:
        raise ValueError(
            f"--data {path}: {sum(sizes):,} bytes in {len(paths):,} files, at most {MAX_TEXT_BYTES:,} are read as "
            f"text: {_ELSE}"
        )
    # Files without a size are not read: those of /proc have none either, and some of them never end.
    text, skipped = _joined(root, [file for file, size in zip(paths, sizes, strict=True) if size], end)
    if skipped and os.environ.get("RANK", "0") == "0":
        more = ", ..." if len(skipped) > 10 else ""
        names = ", ".join(map(printable, skipped[:10]))
        print(f"--data {path}: {len(skipped)} files are not UTF-8, skipped: {names}{more}", file=sys.stderr)
    if not text:
        raise ValueError(f"--data {path}: no UTF-8 text in this folder")
    tokens = np.frombuffer(text, dtype=np.uint8)
    tokens.flags.writeable = False
    return tokens, printable(root.resolve().name)


def _files(root):
    """Regular files below `root`, sorted by relative path; hidden ones left out, linked folders not followed.

    ValueError for more than MAX_FILES names of files and folders.
    """
    candidates, num_names = [], 0
    for folder, folders, names in os.walk(root):
        num_names += len(folders) + len(names)
        if num_names > MAX_FILES:
            raise ValueError(f"--data {root}: more than {MAX_FILES:,} files below this folder: {_ELSE}")
        folders[:] = [name for name in folders if not name.startswith(".")]
        candidates += [Path(folder) / name for name in names if not name.startswith(".")]
    # Unlike Path's, os.path's isfile is False for a link into a folder that is closed to us.
    return sorted(filter(os.path.isfile, candidates), key=lambda path: path.relative_to(root).as_posix())


def _joined(root, paths, end):
    """(bytes of all UTF-8 files, names of the others); empty files are neither."""
    text, skipped = bytearray(), []
    for path in paths:
        start = len(text)
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    decoder.decode(chunk)
                    text += chunk
                decoder.decode(b"", final=True)
        except OSError as error:
            raise ValueError(f"--data {root}: cannot read {printable(path)} ({error.strerror})") from None
        except UnicodeDecodeError:
            skipped.append(path.relative_to(root).as_posix())
            del text[start:]
            continue
        if len(text) > start:
            text += end
    return text, skipped
