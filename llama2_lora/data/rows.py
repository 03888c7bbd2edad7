"""Files of packed rows of tokens. None of the formats can hold code. No torch here.

    source = read(files("govreport", "train"), vocab=32000)

    .safetensors      input_ids [n], all rows one after the other, mapped to memory. Optional: starts int64, the first
                      token of each document; counted BOOL [n], true for tokens that count as targets
    .npy              integers [rows, tokens], mapped to memory
    .parquet, .jsonl  rows with input_ids. Optional: labels, -100 at tokens that do not count; or loss_mask, 0 at tokens
                      that predict one; seq_start_id, the first token of each document

An .npy of objects is a pickle and refused: `llama2_lora/data/convert_packed_text.py` makes .safetensors of it.
"""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.training.data import limits, safetensors_header
from common.training.data.limits import first_line, open_regular, shown

FLAG = "--data"
FIELDS = ("input_ids", "labels", "loss_mask", "seq_start_id")
_CHUNK_TOKENS = 1 << 24
# Rows of a parquet file that are decoded at once.
_BATCH_ROWS = 64


class Source(NamedTuple):
    """Documents of tokens.

    name: for messages. tokens: integers [n], documents one after the other. starts: int64, the first token of each
    document, then n. counted: bool [n], true where a token counts as a target; None: all do.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    counted: np.ndarray | None = None


def files(data: str, split: str) -> list[Path]:
    """Files of rows of a split, "train" or "validation", that --data names, sorted. A single file is for training."""
    path = Path(data)
    if not data or not path.is_dir():
        return [path] if data and split == "train" else []
    for folder in (path, path / "data"):
        for suffix in _READERS:
            if found := sorted([*folder.glob(f"{split}{suffix}"), *folder.glob(f"{split}-*{suffix}")]):
                return found
    if split == "train":
        raise ValueError(f"{FLAG} {shown(data)}: this folder has no train file of {', '.join(_READERS)}")
    return []


def require(data: str) -> None:
    """ValueError in one line if --data names no file that is read here, or a pickle. Nothing has been built then."""
    for path in files(data, "train") + files(data, "validation"):
        _reader(path)
        if path.suffix == ".npy":
            _npy(path)


def _reader(path):
    # Missing and unreadable files are said first.
    open_regular(path, FLAG).close()
    if path.suffix not in _READERS:
        raise ValueError(f"{FLAG} {shown(path)}: takes {', '.join(_READERS)}, or a folder with train files")
    return _READERS[path.suffix]


def read(paths: list[Path], vocab: int) -> Source:
    """All rows of the files, one after the other. A single .safetensors or .npy stays in its file.

    Raises:
        ValueError: In one line that begins with --data: a file that is damaged or too large, a row that cannot be
            used, a token that is not below `vocab`.
    """
    sources = [source for source in (_reader(path)(path) for path in paths) if len(source.tokens)]
    if not sources:
        raise ValueError(f"{FLAG}: {shown(paths[0])} has no rows")
    for source in sources:
        require_vocabulary(source.tokens, vocab, source.name)
    if len(sources) == 1:
        return sources[0]
    ends = np.cumsum([len(source.tokens) for source in sources])
    starts = [source.starts[:-1] + end - len(source.tokens) for source, end in zip(sources, ends, strict=True)]
    counted = [np.ones(len(one.tokens), bool) if one.counted is None else one.counted for one in sources]
    tokens = np.concatenate([source.tokens for source in sources])
    return Source(sources[0].name, tokens, np.concatenate([*starts, ends[-1:]]), np.concatenate(counted))


def require_vocabulary(tokens: np.ndarray, vocab: int, where: str) -> None:
    """ValueError if a token is negative or not below `vocab`."""
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0:
            raise ValueError(f"{FLAG}: {where} has the token {low}, which is no id")
        if high >= vocab:
            raise ValueError(
                f"{FLAG}: {where} has the token {high}, beyond --vocab {vocab}: take --vocab {high + 1} or more"
            )


# ------------------------------------------------------------------------------------------------
# Files that are read row by row


def collect(path, rows) -> Source:
    """Rows of an iterator, dicts with the fields of FIELDS, in memory. ValueError that names `path` and the row."""
    tokens, counted, starts, num_tokens = [np.zeros(0, np.int32)], [np.zeros(0, bool)], [], 0
    for number, row in enumerate(rows):
        if number >= limits.MAX_ROWS:
            raise ValueError(f"{FLAG}: {shown(path)} has more than {limits.MAX_ROWS:,} rows")
        ids, counts, begins = _row(row, f"row {number} of {shown(path)}")
        tokens.append(ids)
        counted.append(counts)
        starts.append(begins + num_tokens)
        num_tokens += len(ids)
    starts.append(np.array([num_tokens]))
    return Source(shown(path), *(np.concatenate(parts) for parts in (tokens, starts, counted)))


def _row(row, where):
    """(int32 ids, bool: counts as a target, int64 first tokens of documents) of one row."""
    if not isinstance(row, dict) or "input_ids" not in row:
        raise ValueError(f"{FLAG}: {where} has no input_ids")
    ids = _numbers(row, "input_ids", where)
    counts = np.ones(len(ids), bool)
    if "labels" in row:
        # Hugging Face's labels lie at the token that they name.
        counts = _numbers(row, "labels", where) != -100
    elif "loss_mask" in row:
        # NeMo's packed dataset weighs by it at the token that predicts.
        counts = np.roll(_numbers(row, "loss_mask", where, "iufb") != 0, 1)
    if counts.shape != ids.shape:
        raise ValueError(f"{FLAG}: {where} has {len(ids)} input_ids and another number of labels or loss_mask")
    begins = _numbers({"seq_start_id": [0], **row}, "seq_start_id", where).astype(np.int64)
    if not _rise_from_0(begins, len(ids)):
        raise ValueError(f"{FLAG}: {where} has a seq_start_id that does not rise from 0 within its {len(ids)} tokens")
    return ids.astype(np.int32), counts, begins


def _rise_from_0(begins, num_tokens):
    # Compared, not subtracted: differences of 64-bit integers overflow.
    return begins[0] == 0 and (begins[1:] > begins[:-1]).all() and begins[-1] < num_tokens


def _numbers(row, name, where, kinds="iu"):
    """A field as an array [n]. kinds: the dtype kinds of numpy that it may have."""
    try:
        found = np.asarray(row[name])
    except (ValueError, OverflowError, RecursionError):
        found = np.empty((0, 0))
    is_list = found.ndim == 1 and len(found) and found.dtype.kind in kinds
    if not is_list or (kinds == "iu" and not -(2**31) <= found.min() <= found.max() < 2**31):
        told = "32-bit integers" if kinds == "iu" else "numbers"
        raise ValueError(f"{FLAG}: {where} has {name} that is no list of {told}")
    return found


def _parquet_rows(path):
    try:
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{FLAG}: {shown(path)} needs pyarrow to be read: ./setup.sh parquet, or make a .jsonl of it"
        ) from None
    with open_regular(path, FLAG, limits.MAX_READ_BYTES) as file:
        try:
            table = parquet.ParquetFile(file)
            about = table.metadata
            num_bytes = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
            if about.num_rows > limits.MAX_ROWS or num_bytes > limits.MAX_READ_BYTES:
                raise ValueError(f"{about.num_rows:,} rows of {num_bytes:,} bytes uncompressed are too many")
            fields = [field for field in table.schema_arrow.names if field in FIELDS]
            for batch in table.iter_batches(_BATCH_ROWS, columns=fields):
                # Lists become arrays.
                yield from batch.to_pandas(ignore_metadata=True).to_dict("records")
        except Exception as error:  # foreign bytes can make it raise anything
            raise ValueError(f"{FLAG}: {shown(path)} cannot be read: {first_line(error)}") from None


def _json_rows(path):
    with open_regular(path, FLAG, limits.MAX_READ_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(limits.MAX_LINE_BYTES + 1), b""), start=1):
            where = f"line {number} of {shown(path)}"
            if len(line) > limits.MAX_LINE_BYTES:
                raise ValueError(f"{FLAG}: {where} has more than {limits.MAX_LINE_BYTES:,} bytes")
            try:
                if line.strip():
                    yield json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{FLAG}: {where} is damaged, it is not JSON") from None


# ------------------------------------------------------------------------------------------------
# Files that are mapped


def _safetensors(path):
    name = shown(path)
    entries, _ = safetensors_header.read(path, FLAG, limits.MAX_HEADER_BYTES)
    found = {"starts": np.zeros(1, np.int64)}
    for tensor, kinds in (("input_ids", "iu"), ("starts", "i"), ("counted", "b")):
        if entry := entries.get(tensor):
            dtype = safetensors_header.NUMPY.get(entry.dtype)
            if dtype is None or dtype.kind not in kinds or len(entry.shape) != 1:
                raise ValueError(
                    f"{FLAG}: {name} has {tensor} of {shown(entry.dtype)} {list(entry.shape)[:8]}, not what is read"
                )
            found[tensor] = safetensors_header.mapped(path, entry)
    if "input_ids" not in found:
        raise ValueError(f"{FLAG}: {name} holds no tensor input_ids")
    ids, starts, counted = found["input_ids"], found["starts"], found.get("counted")
    if len(starts) > limits.MAX_ROWS:
        raise ValueError(f"{FLAG}: {name} has more than {limits.MAX_ROWS:,} documents")
    if len(ids) and (not len(starts) or not _rise_from_0(starts, len(ids))):
        raise ValueError(f"{FLAG}: {name} has starts that do not rise from 0 within its {len(ids):,} tokens")
    if counted is not None:
        if counted.shape != ids.shape:
            raise ValueError(f"{FLAG}: {name} has {len(ids):,} input_ids and another number of counted")
        # A damaged file may have bools of other bytes than 0 and 1.
        counted = counted.view(np.uint8) != 0
    return Source(name, ids, np.append(np.asarray(starts, np.int64), len(ids)), counted)


def write_safetensors(path, source: Source) -> None:
    """Write a source of `collect` as a .safetensors file."""
    parts = {"input_ids": source.tokens, "starts": source.starts[:-1], "counted": source.counted}
    dtypes = {"input_ids": "I32", "starts": "I64", "counted": "BOOL"}
    with open(path, "wb") as file:
        file.write(safetensors_header.make({name: (dtypes[name], part.shape) for name, part in parts.items()}, {}))
        for name, part in parts.items():
            file.write(part.astype(safetensors_header.NUMPY[dtypes[name]], copy=False).view(np.uint8))


def _npy(path):
    name = shown(path)
    with open_regular(path, FLAG) as file:
        is_pickle = file.read(1) == b"\x80"
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # foreign bytes can make numpy's parser raise anything
        if is_pickle:
            raise ValueError(
                f"{FLAG}: {name} is pickled, which can run code, and is not read: it is no .npy, make a .jsonl of it"
            ) from None
        if "objects" in str(error):
            told, out = (shlex.quote(shown(each)) for each in (path, path.with_suffix(".safetensors")))
            raise ValueError(
                f"{FLAG}: {told} is pickled, which can run code, and is not read: convert it once, python -m "
                f"llama2_lora.data.convert_packed_text --in {told} --out {out} --trust-input"
            ) from None
        raise ValueError(f"{FLAG}: {name} is damaged, or no .npy: {first_line(error)}") from None
    is_table = isinstance(found, np.ndarray) and found.ndim == 2 and found.dtype.kind in "iu" and found.size
    if not is_table or not found.flags.c_contiguous or len(found) > limits.MAX_ROWS:
        raise ValueError(
            f"{FLAG}: {name} is no array of integers [rows, tokens] of 1 to {limits.MAX_ROWS:,} rows, stored row by row"
        )
    rows, length = found.shape
    return Source(name, found.reshape(-1), np.arange(rows + 1, dtype=np.int64) * length)


_READERS = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".parquet": lambda path: collect(path, _parquet_rows(path)),
    ".jsonl": lambda path: collect(path, _json_rows(path)),
}
