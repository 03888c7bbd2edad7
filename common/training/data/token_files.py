"""Token sources: one-dimensional arrays of token ids, memory-mapped where they are files, and windows drawn from them.

    tokens = open_tokens("")                             the Python standard library's own source text
    tokens = open_tokens("/data/books")                  a folder of text, byte by byte
    tokens = open_tokens("/data/c4_text_document")       Megatron-LM's .bin/.idx
    batch = tokens.batch(index, num_sequences=4, sequence_length=2048, seed=0)

Byte-level sources have 256 ids, and a zero byte ends each document. Only numpy is needed.
"""

import codecs
import errno
import hashlib
import json
import os
import platform
import struct
import sysconfig
import warnings
from pathlib import Path

import numpy as np

from common.config import require_folder_of_its_own
from common.files import write_whole
from common.text import printable
from common.training.data.limits import open_regular

# A folder of text is copied once, byte by byte; a larger one belongs into Megatron's token files.
MAX_FILES = 100_000
MAX_TEXT_BYTES = 16 * 2**30
# Of copies of text.
CACHE = Path(__file__).resolve().parents[3] / "runs" / ".cache"

_END_OF_DOCUMENT = b"\0"
_NO_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_ELSE = "take one of its folders, or make Megatron token files (.bin, .idx) of it"


class TokenFile:
    """A run of token ids.

    tokens: one-dimensional array of integers, all documents one after the other. name: what the tokens are, for the
    record.
    """

    def __init__(self, tokens, name):
        self.tokens, self.name = tokens, name

    @property
    def num_tokens(self) -> int:
        """Number of token ids, all documents together."""
        return len(self.tokens)

    def batch(self, index, num_sequences, sequence_length, seed=0) -> np.ndarray:
        """int64 [num_sequences, sequence_length + 1]: inputs are [:, :-1], targets [:, 1:].

        Windows start anywhere, with replacement, and may cross documents. They depend on (seed, index) alone, so any
        rank or variant draws batch `index` without having drawn those before. Raises ValueError when the file is
        shorter than one window.
        """
        return self._windows(self._starts([seed, index], num_sequences, sequence_length), sequence_length)

    def held_out(self, num_sequences, sequence_length, num_batches, batch_sequences, seed=0) -> np.ndarray:
        """int64 [num_sequences, sequence_length + 1]: windows that share no place with training batches.

        Those are the batches 0 .. num_batches - 1 of batch_sequences each that `batch` draws with this seed. Text that
        the file itself repeats is not noticed. Raises LookupError where so little is left that windows are not found.
        """
        starts = [self._starts([seed, index], batch_sequences, sequence_length) for index in range(num_batches)]
        seen = np.sort(np.concatenate(starts))
        # One seed component more than any batch has, and enough draws for a file of which a tenth is left.
        drawn = self._starts([seed, 0, 1], 100 * num_sequences, sequence_length)
        after = np.searchsorted(seen, drawn)
        distance = np.minimum(
            np.abs(drawn - seen[np.minimum(after, len(seen) - 1)]), np.abs(drawn - seen[np.maximum(after - 1, 0)])
        )
        free = drawn[distance > sequence_length]
        if len(free) < num_sequences:
            raise LookupError(f"training batches leave no {num_sequences} windows of {self.name} to hold out")
        return self._windows(free[:num_sequences], sequence_length)

    def _starts(self, seeds, num_sequences, sequence_length):
        num_starts = self.num_tokens - sequence_length
        if num_starts < 1:
            raise ValueError(
                f"--data: {self.name} has {self.num_tokens} tokens, one window of sequence length {sequence_length} "
                f"needs {sequence_length + 1}; give more text or a shorter sequence"
            )
        return np.random.default_rng(seeds).integers(num_starts, size=num_sequences)

    def _windows(self, starts, sequence_length):
        windows = np.empty((len(starts), sequence_length + 1), dtype=np.int64)
        for row, start in zip(windows, starts, strict=True):
            row[:] = self.tokens[start : start + sequence_length + 1]
        return windows


def open_tokens(data, cache_dir=CACHE) -> TokenFile:
    """Open the tokens that --data names: "" is the Python corpus, a folder its text, else a Megatron prefix or file.

    cache_dir: where token files made from a folder of text are kept. Raises ValueError that names --data, or the file
    that cannot be written there.
    """
    if not data:
        return python_corpus()
    if Path(data).is_dir():
        return text_folder(data, cache_dir)
    if any(path.is_file() for path in _megatron_paths(data)):
        return megatron(data)
    raise ValueError(
        f"--data {data}: neither a folder of text nor the prefix of Megatron token files ({data}.bin, {data}.idx)"
    )


# ------------------------------------------------------------------------------------------------
# Text, byte by byte


def python_corpus() -> TokenFile:
    """The source text of this Python's standard library, about 12 MB, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _files(root, _NO_CORPUS) if path.suffix == ".py"]
    text = b"".join(path.read_bytes() + _END_OF_DOCUMENT for path in paths)
    name = f"python-{platform.python_version()}-{hashlib.sha256(text).hexdigest()[:16]}"
    return TokenFile(np.frombuffer(text, dtype=np.uint8), name)


def text_folder(path, cache_dir) -> TokenFile:
    """All UTF-8 files below `path`, whatever their suffix, in the order of their names; hidden ones are left out.

    Others are left out too; a warning counts and names them when the cached copy is made, which is keyed by names,
    sizes and modification times. Raises ValueError when there is no text, when a file cannot be read, and for more than
    MAX_FILES names or MAX_TEXT_BYTES, before any file is read.
    """
    root = Path(path)
    require_folder_of_its_own("--data", str(root.resolve()))
    paths = _files(root)
    stats = [file.stat() for file in paths]
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
            write_whole(tokens_path, lambda file: _concatenate(root, paths, file, skipped))
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            raise ValueError(
                f"{tokens_path}: {error.strerror}; token files made from text are kept there, or give Megatron's as "
                "--data"
            ) from None
        if skipped:
            more = ", ..." if len(skipped) > 10 else ""
            names = ", ".join(map(printable, skipped[:10]))
            warnings.warn(f"{path}: {len(skipped)} files are not UTF-8, skipped: {names}{more}", stacklevel=3)
    if not tokens_path.stat().st_size:
        raise ValueError(f"--data {path}: no UTF-8 text in this folder")
    return TokenFile(np.memmap(tokens_path, dtype=np.uint8, mode="r"), name)


def _files(root, skipped_folders=frozenset()):
    """Regular files below `root`, sorted by relative path; hidden ones left out, linked folders not followed.

    ValueError for more than MAX_FILES names of files and folders.
    """
    found, num_names = [], 0
    for folder, folders, names in os.walk(root):
        num_names += len(folders) + len(names)
        if num_names > MAX_FILES:
            raise ValueError(f"--data {root}: more than {MAX_FILES:,} files below this folder: {_ELSE}")
        folders[:] = [name for name in folders if name not in skipped_folders and not name.startswith(".")]
        found += [Path(folder) / name for name in names if not name.startswith(".")]
    # Unlike Path's, os.path's isfile is False for a link into a folder that is closed to us.
    return sorted(filter(os.path.isfile, found), key=lambda path: path.relative_to(root).as_posix())


def _concatenate(root, paths, out, skipped):
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
            out.write(_END_OF_DOCUMENT)


# ------------------------------------------------------------------------------------------------
# Megatron-LM's indexed dataset (megatron/core/datasets/indexed_dataset.py)

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, number of sequences, length of the document index
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


def megatron(prefix) -> TokenFile:
    """Open `prefix`.bin and `prefix`.idx (MMapIndexedDataset, version 1) without reading the tokens.

    prefix: with or without .bin or .idx. Raises ValueError that names the file and what is wrong with it: missing,
    foreign, truncated, a dtype that holds no token ids, or lengths that contradict the size of the .bin.
    """
    bin_path, idx_path = _megatron_paths(prefix)
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise ValueError(f"--data: {path} is missing, Megatron token files come as .bin and .idx")
    with open_regular(idx_path, "--data") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise ValueError(f"--data: {idx_path} is not a Megatron index, it does not start with {_MAGIC!r}")
    if len(header) < _HEADER.size:
        raise ValueError(f"--data: {idx_path} is truncated within its header")
    _, version, code, num_sequences, num_documents = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"--data: {idx_path} has version {version}, this code reads version 1")
    if code not in _DTYPES:
        raise ValueError(f"--data: {idx_path} has the dtype code {code}, token ids have one of {sorted(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code]).newbyteorder("<")
    if not num_sequences:
        raise ValueError(f"--data: {idx_path} has no sequences")
    # int32 lengths, int64 pointers, int64 document index.
    num_index_bytes = _HEADER.size + num_sequences * (4 + 8) + num_documents * 8
    if (actual := idx_path.stat().st_size) != num_index_bytes:
        raise ValueError(f"--data: {idx_path} has {actual} bytes, its counts need {num_index_bytes}")
    lengths = np.memmap(idx_path, dtype="<i4", mode="r", offset=_HEADER.size, shape=(num_sequences,))
    if int(lengths.min()) < 0:
        raise ValueError(f"--data: {idx_path} has a negative sequence length")
    num_tokens = int(lengths.sum(dtype=np.int64))
    if num_tokens * dtype.itemsize != bin_path.stat().st_size:
        raise ValueError(
            f"--data: {bin_path} has {bin_path.stat().st_size} bytes, the lengths in {idx_path.name} sum to "
            f"{num_tokens} tokens of {dtype.itemsize} bytes"
        )
    if not num_tokens:  # nothing cannot be mapped
        raise ValueError(f"--data: {bin_path} holds no tokens")
    return TokenFile(np.memmap(bin_path, dtype=dtype, mode="r"), bin_path.stem)


def _megatron_paths(prefix):
    text = str(prefix)
    text = text[:-4] if text.endswith((".bin", ".idx")) else text
    return Path(text + ".bin"), Path(text + ".idx")
