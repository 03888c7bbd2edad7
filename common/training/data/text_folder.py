"""A folder of text as tokens, byte by byte: it is copied once into a file, which is mapped."""

import codecs
import errno
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from common.config import require_folder_of_its_own
from common.files import write_whole
from common.text import printable
from common.training.data.megatron_tokens import starts_as_index

# A larger folder belongs into Megatron's token files.
MAX_FILES = 100_000
MAX_TEXT_BYTES = 16 * 2**30

_ELSE = "take one of its folders, or make Megatron token files (.bin, .idx) of it"


def read(path, cache_dir, end: bytes) -> tuple[np.ndarray, str]:
    """Return tokens and name of all UTF-8 files below `path`, whatever their suffix, in the order of their names.

    Hidden files are left out, and others, too: stderr names them when the cached copy is made, which is keyed by names,
    sizes and modification times. end: bytes behind each file. Raises ValueError when there is no text, when a file
    cannot be read, for token files of Megatron, and for more than MAX_FILES names or MAX_TEXT_BYTES, before any text is
    read.
    """
    root = Path(path)
    require_folder_of_its_own("--data", str(root.resolve()))
    paths = _files(root)
    stats = [file.stat() for file in paths]
    for file in paths:
        if file.suffix == ".idx" and starts_as_index(file):
            prefix = printable(file.with_suffix(""))
            raise ValueError(f"--data {path}: this folder has token files of Megatron, name them: --data {prefix}")
    num_bytes = sum(stat.st_size for stat in stats)
    if num_bytes > MAX_TEXT_BYTES:
        raise ValueError(
            f"--data {path}: {num_bytes / 2**30:,.0f} GiB in {len(paths):,} files, a folder of text may have "
            f"{MAX_TEXT_BYTES / 2**30:.0f}: {_ELSE}"
        )
    found = list(zip(paths, stats, strict=True))
    listing = [(file.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for file, stat in found]
    key = hashlib.sha256(json.dumps([str(root.resolve()), listing]).encode()).hexdigest()[:16]
    name = f"{root.resolve().name}-{key}"
    tokens_path = Path(cache_dir) / f"{name}.bin"
    if not tokens_path.is_file():
        skipped: list[str] = []
        # What has no size is not read: files of /proc have none either, and some of them never end.
        paths = [file for file, stat in found if stat.st_size]
        try:
            write_whole(tokens_path, lambda file: _concatenate(root, paths, file, skipped, end))
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise ValueError(
                f"{tokens_path}: {error.strerror}; token files made from text are kept there, or give Megatron's as "
                "--data"
            ) from None
        if skipped:
            more = ", ..." if len(skipped) > 10 else ""
            names = ", ".join(map(printable, skipped[:10]))
            print(f"--data {path}: {len(skipped)} files are not UTF-8, skipped: {names}{more}", file=sys.stderr)
    if not tokens_path.stat().st_size:
        raise ValueError(f"--data {path}: no UTF-8 text in this folder")
    return np.memmap(tokens_path, dtype=np.uint8, mode="r"), name


def _files(root):
    """Regular files below `root`, sorted by relative path; hidden ones left out, linked folders not followed.

    ValueError for more than MAX_FILES names of files and folders.
    """
    found, num_names = [], 0
    for folder, folders, names in os.walk(root):
        num_names += len(folders) + len(names)
        if num_names > MAX_FILES:
            raise ValueError(f"--data {root}: more than {MAX_FILES:,} files below this folder: {_ELSE}")
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    # Unlike Path's, os.path's isfile is False for a link into a folder that is closed to us.
    return sorted(filter(os.path.isfile, found), key=lambda path: path.relative_to(root).as_posix())


def _concatenate(root, paths, out, skipped, end):
    """Append each UTF-8 file to `out`, others' names to `skipped`; empty files are neither."""
    for path in paths:
        start = out.tell()
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            with open(path, "rb") as file:
                while chunk := file.read(1 << 20):
                    decoder.decode(chunk)
                    out.write(chunk)
                decoder.decode(b"", final=True)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # of `out`
                raise
            raise ValueError(f"--data {root}: cannot read {printable(path)} ({error.strerror})") from None
        except UnicodeDecodeError:
            skipped.append(path.relative_to(root).as_posix())
            out.seek(start)
            out.truncate()
            continue
        if out.tell() > start:
            out.write(end)
