"""Files of packed rows of tokens, .parquet or .jsonl. No torch here.

    source = read(files("govreport", "train"), vocab=32000)

A row has input_ids. Optional: labels, -100 at tokens that do not count; or loss_mask, 0 at tokens that predict one that
does not; seq_start_id, the first token of each document.

MLPerf's .npy of such rows is a pickle and is not read.
"""

import json
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.data import limits
from common.data.limits import first_line, open_regular
from graph_worth.text import printable

FLAG = "--data"
FIELDS = ("input_ids", "labels", "loss_mask", "seq_start_id")
# Rows of a parquet file that are decoded at once, and the bytes that a row takes beside its numbers.
_BATCH_ROWS, _ROW_BYTES = 64, 512
# Bytes of a number by parquet's physical type; all others have 8.
_NUMBER_BYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4}
# A parquet file may declare so many times its bytes, and _FREE_BYTES more: tokens do not shrink to a hundredth.
_MAX_EXPANSION, _FREE_BYTES = 100, 2**25


class Source(NamedTuple):
    """Documents of tokens.

    name: for messages. tokens: integers [n], documents one after the other. starts: int64, the first token of each
    document, then n. counted: bool [n], true where a token counts as a target.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    counted: np.ndarray


def files(data: str) -> list[Path]:
    """Files of rows that --data names, sorted: a file, or the train files of a folder."""
    path = Path(data)
    if not path.is_dir():
        return [path]
    for folder in (path, path / "data"):
        for suffix in _READERS:
            if paths := sorted([*folder.glob(f"train{suffix}"), *folder.glob(f"train-*{suffix}")]):
                return paths
    raise ValueError(f"{FLAG} {printable(data)}: this folder has no train file of {', '.join(_READERS)}")


def _rows(path):
    # Missing and unreadable files are said first.
    with open_regular(path, FLAG, limits.MAX_READ_BYTES) as file:
        if path.suffix not in _READERS:
            raise ValueError(f"{FLAG} {printable(path)}: takes {', '.join(_READERS)}, or a folder with train files")
        yield from _READERS[path.suffix](path, file)


def read(paths: list[Path], vocab: int) -> Source:
    """All rows of the files, one after the other, in memory.

    ValueError in one line: a file that is damaged or too large, a row that cannot be used, a token not below `vocab`.
    """
    tokens, counted, starts, num_tokens = [], [], [], 0
    for path in paths:
        for number, row in enumerate(_rows(path)):
            if len(tokens) >= limits.MAX_ROWS:
                raise ValueError(f"{FLAG}: {printable(path)} has more than {limits.MAX_ROWS:,} rows")
            ids, counts, begins = _row(row, f"row {number} of {printable(path)}")
            tokens.append(ids)
            counted.append(counts)
            starts.append(begins + num_tokens)
            num_tokens += len(ids)
    if not tokens:
        raise ValueError(f"{FLAG}: {printable(paths[0])} has no rows")
    starts.append(np.array([num_tokens]))
    source = Source(printable(paths[0]), *(np.concatenate(parts) for parts in (tokens, starts, counted)))
    require_vocabulary(source.tokens, vocab, source.name)
    return source


def require_vocabulary(tokens: np.ndarray, vocab: int, where: str) -> None:
    """ValueError if a token is negative or not below `vocab`."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        raise ValueError(f"{FLAG}: {where} has the token {low}, which is no id")
    if high >= vocab:
        raise ValueError(
            f"{FLAG}: {where} has the token {high}, beyond --vocab {vocab}: take --vocab {high + 1} or more"
        )


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
    if begins[0] or (np.diff(begins) <= 0).any() or begins[-1] >= len(ids):
        raise ValueError(f"{FLAG}: {where} has a seq_start_id that does not rise from 0 within its {len(ids)} tokens")
    return ids.astype(np.int32), counts, begins


def _numbers(row, name, where, kinds="iu"):
    """A field as an array [n]. kinds: the dtype kinds of numpy that it may have."""
    try:
        array = np.asarray(row[name])
    except (ValueError, OverflowError, RecursionError):
        array = np.empty((0, 0))
    if array.shape == (0,):
        raise ValueError(f"{FLAG}: {where} has {name} without an element")
    is_list = array.ndim == 1 and array.dtype.kind in kinds and np.isfinite(array).all()
    if not is_list or (kinds == "iu" and not -(2**31) <= array.min() <= array.max() < 2**31):
        expected = "32-bit integers" if kinds == "iu" else "finite numbers"
        raise ValueError(f"{FLAG}: {where} has {name} that is no list of {expected}")
    return array


def _parquet_rows(path, file):
    """Rows of a parquet file that declares no more than it may (`_require_declared`), _BATCH_ROWS at a time.

    A file may lie about its sizes. The rows that come out count as well, but only after pyarrow has decoded a batch: 64
    rows of a lying file can take all memory, and the system then ends the process.
    """
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise ValueError(
            f"{FLAG}: {printable(path)} needs pyarrow to be read: ./setup.sh parquet, or make a .jsonl of it"
        ) from None
    most = left = _most_bytes(os.fstat(file.fileno()).st_size)
    try:
        table = parquet.ParquetFile(file)
        fields = [field for field in table.schema_arrow if field.name in FIELDS]
        for field in fields:
            kind = getattr(field.type, "value_type", None)
            if kind is None or not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
                raise ValueError(f"{field.name} is of type {field.type}, no list of numbers")
        _require_declared(table.metadata, most)
        for batch in table.iter_batches(_BATCH_ROWS, columns=[field.name for field in fields], use_threads=False):
            left -= batch.nbytes + _ROW_BYTES * batch.num_rows
            if left < 0:
                raise ValueError(f"it holds more than {most:,} bytes uncompressed")
            for number in range(batch.num_rows):
                yield {field.name: batch[field.name][number].values for field in fields}
    except Exception as error:  # foreign bytes can make it raise anything
        raise ValueError(f"{FLAG}: {printable(path)} cannot be read: {first_line(error)}") from None


def _most_bytes(file_bytes):
    """Bytes that a parquet file may declare, and that may come out of it."""
    return min(_FREE_BYTES + _MAX_EXPANSION * file_bytes, limits.MAX_READ_BYTES)


def _require_declared(metadata, most):
    """ValueError where a parquet file declares more rows or bytes than it may, before any of them is decoded.

    pyarrow shows the declared sizes of a column's chunks, not those of the pages in them.
    """
    num_bytes = _ROW_BYTES * max(0, metadata.num_rows)
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema.partition(".")[0] in FIELDS:
                # Encoded numbers may be far smaller than decoded ones.
                decoded = chunk.num_values * _NUMBER_BYTES.get(chunk.physical_type, 8)
                num_bytes += max(0, chunk.total_uncompressed_size, decoded)
    if metadata.num_rows > limits.MAX_ROWS or num_bytes > most:
        raise ValueError(
            f"it declares {metadata.num_rows:,} rows of {num_bytes:,} bytes, more than it may: at most "
            f"{limits.MAX_ROWS:,} and {most:,}"
        )


def _json_rows(path, file):
    for number, line in enumerate(iter(lambda: file.readline(limits.MAX_LINE_BYTES + 1), b""), start=1):
        where = f"line {number} of {printable(path)}"
        if len(line) > limits.MAX_LINE_BYTES:
            raise ValueError(f"{FLAG}: {where} has more than {limits.MAX_LINE_BYTES:,} bytes")
        try:
            if line.strip():
                yield json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{FLAG}: {where} is damaged, it is not JSON") from None


_READERS = {".parquet": _parquet_rows, ".jsonl": _json_rows}
