"""Fixed windows of packed tokens with a loss mask: rows that are packed already, documents of text, or Python's own.

    windows = open_windows(config, cache_dir, rank, world_size)
    windows.batch(3), windows.held_out(0)            PackedBatch of tensors, all shapes the same in every batch

What --data names:
    train.npy, .parquet, .jsonl      rows with input_ids and labels or loss_mask, or a folder with such files; rows of a
                                     validation file are held out
    a .jsonl of text                 prompt and completion, or input and output (prompts are masked out), or text
    a folder of text, .bin and .idx  documents as common/token_files.py reads them
    nothing                          the Python standard library, cut so that 2 to 8 excerpts fill a window

GovReport in MLPerf's packed form (Hugging Face, regisss/scrolls_gov_report_preprocessed_mlperf_2): 3,901 rows of 8192
tokens and 173 for validation, parquet with labels, or .npy of dicts with loss_mask and seq_start_id [0] as the
submissions convert it (mlcommons/training_results_v4.0, Oracle, llama2_70b_lora, scripts/convert_dataset.py).

Documents follow one another in the order of the source. One that is longer than a window is cut, the pieces are
documents of their own; one that does not fit into the rest of a window begins the next, and padding fills the rest.
"""

import bisect
import json
import pickle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common import token_files
from llama2_lora.config import MAX_DOCUMENTS, Config

_PAIRS = (("prompt", "completion"), ("input", "output"))
_CHUNK_TOKENS = 1 << 24


class PackedBatch(NamedTuple):
    """One window of s tokens, CPU tensors; `_asdict()` gives them by name.

    tokens, targets: int64 [s]; a target is the next token of the same document. loss_mask: FP32 [s], 1 where the target
    counts, 0 for prompts, the last token of a document and padding. cu_seqlens: int32 [MAX_DOCUMENTS + 1], begins of
    the documents, then s. positions: int64 [s], from 0 in each document. Padding is a document of zeros. With
    `--documents whole` cu_seqlens and positions are those of one document, and the rest is as it is without.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    positions: torch.Tensor


class Source(NamedTuple):
    """tokens: integers [n], documents one after the other. starts: int64, begin of each document, then n.

    counted: bool [n], whether a token counts as a target; None: all do. name: what the tokens are, for messages.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    counted: np.ndarray | None = None


class Packing:
    """The windows of one source. fill: share of their tokens that belong to documents. ValueError names --data."""

    def __init__(self, source: Source, config: Config):
        self.source, self.config, s = source, config, config.sequence
        self._whole = config.documents == "whole"
        num_tokens = int(source.starts[-1])
        if num_tokens < s:
            raise ValueError(
                f"--data: {source.name} has {num_tokens:,} tokens, fewer than one window of --sequence {s}: "
                f"give more text or a shorter --sequence"
            )
        lengths = np.diff(source.starts)
        pieces = -(-lengths // s)
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._bounds = np.append(np.repeat(source.starts[:-1], pieces) + number * s, num_tokens)
        # Padding needs a place of its own in cu_seqlens.
        self._firsts = _fill_windows(self._bounds, s, s if self._whole else MAX_DOCUMENTS - 1)
        self._windows = np.flatnonzero(self._have_targets())
        if not len(self._windows):
            raise ValueError(f"--data: no document of {source.name} has a second token that counts in the loss")
        begins, ends = (self._bounds[self._firsts[self._windows + place]] for place in (0, 1))
        self.fill = float((ends - begins).sum() / (len(self._windows) * s))
        if self.fill < 0.5 and len(self._windows) > 1:
            raise ValueError(
                f"--data: documents of {source.name} are so short that {MAX_DOCUMENTS - 1} of them fill "
                f"{100 * self.fill:.0f} % of a window: take a shorter --sequence, or --documents whole"
            )

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, index: int) -> PackedBatch:
        """Window `index`. ValueError that names --vocab where a token lies outside of it."""
        s, place = self.config.sequence, self._windows[index]
        bounds = self._bounds[self._firsts[place] : self._firsts[place + 1] + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        tokens, targets, mask = np.zeros(s, np.int64), np.zeros(s, np.int64), np.zeros(s, np.float32)
        tokens[: end - begin] = self.source.tokens[begin:end]
        _require_vocabulary(tokens, self.config.vocab, self.source.name)
        targets[: end - begin - 1] = tokens[1 : end - begin]
        mask[: end - begin - 1] = 1 if self.source.counted is None else self.source.counted[begin + 1 : end]
        lasts = bounds[1:] - begin - 1
        targets[lasts], mask[lasts] = 0, 0
        cu_seqlens = np.full(MAX_DOCUMENTS + 1, s, np.int32)
        starts = bounds[:1] - begin if self._whole else bounds - begin
        cu_seqlens[: len(starts)] = starts
        everywhere = np.arange(s)
        positions = everywhere - cu_seqlens[np.searchsorted(cu_seqlens, everywhere, side="right") - 1]
        return PackedBatch(*(torch.from_numpy(each) for each in (tokens, targets, mask, cu_seqlens, positions)))

    def _have_targets(self):
        """bool, for each window."""
        if self.source.counted is None:
            return np.maximum.reduceat(np.diff(self._bounds), self._firsts[:-1]) > 1
        counted = self.source.counted.copy()
        counted[self._bounds[:-1]] = False
        return np.add.reduceat(counted, self._bounds[self._firsts[:-1]], dtype=np.int64) > 0


class Windows:
    """Training windows of one rank and held-out windows, the same in every run with the same arguments.

    name, num_windows (of all ranks), fill (share of tokens that is not padding). In an epoch no window is read twice,
    by whatever rank; each epoch has an order of its own. num_held_out may be smaller than was asked for, even 0, where
    the source is short: ranks get theirs first.
    """

    def __init__(self, training: Packing, validation: Packing | None, rank, world_size, num_held_out, seed):
        self.name, self.fill = training.source.name, training.fill
        self._training, self._rank, self._world_size, self._seed = training, rank, world_size, seed
        order = np.random.default_rng(seed).permutation(len(training))
        if validation is None:
            num_held_out = max(0, min(num_held_out, len(training) - world_size))
            self._held_out, self._held_out_order = training, order[len(order) - num_held_out :]
            order = order[: len(order) - num_held_out]
        else:
            self._held_out, self._held_out_order = validation, np.arange(min(num_held_out, len(validation)))
        self._order, self.num_windows, self.num_held_out = order, len(order), len(self._held_out_order)
        if self.num_windows < world_size:
            raise ValueError(
                f"--data: {self.name} fills {self.num_windows} windows of --sequence {training.config.sequence}, "
                f"{world_size} ranks read one each: give more text or a shorter --sequence"
            )

    def batch(self, index: int) -> PackedBatch:
        """This rank's window of step `index`, whatever was asked for before."""
        epoch, step = divmod(index, self.num_windows // self._world_size)
        shuffled = np.random.default_rng([self._seed, epoch]).permutation(self._order)
        return self._training.window(shuffled[step * self._world_size + self._rank])

    def held_out(self, index: int) -> PackedBatch:
        """Window `index`, below num_held_out, of those that no rank trains on. The same on every rank."""
        return self._held_out.window(self._held_out_order[index])


def open_windows(
    config: Config, cache_dir, rank: int = 0, world_size: int = 1, num_held_out: int = 4, seed: int = 0
) -> Windows:
    """Windows of config.sequence tokens of what config.data names, by config.documents.

    cache_dir: where token files made from text are kept. ValueError in one line that names the flag: --data that is
    missing, damaged or too short, tokens outside --vocab, documents too short for --sequence.
    """
    files = {split: _row_files(config.data, split) for split in ("train", "validation")}
    if files["train"]:
        training = _rows(files["train"], config)
    elif not config.data:
        training = _excerpts(token_files.python_corpus(cache_dir), config.sequence, seed)
    else:
        training = _documents(token_files.open_tokens(config.data, cache_dir))
    validation = Packing(_rows(files["validation"], config), config) if files["validation"] else None
    return Windows(Packing(training, config), validation, rank, world_size, num_held_out, seed)


def _fill_windows(bounds, sequence, most):
    """Index of the first piece of every window, then the number of pieces. bounds: begins of pieces, then the end."""
    firsts, first = [], 0
    while first < len(bounds) - 1:
        firsts.append(first)
        stop = min(first + most, len(bounds) - 1)
        # No piece is longer than a window, so one fits at least.
        first = bisect.bisect_right(bounds, bounds[first] + sequence, first + 1, stop + 1) - 1
    return np.array([*firsts, first])


def _require_vocabulary(tokens, vocab, where):
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        raise ValueError(f"--data: {where} has the token {low}, which is no id")
    if high >= vocab:
        raise ValueError(
            f"--data: {where} has the token {high}, beyond --vocab {vocab}: take --vocab {high + 1} or more"
        )


# ------------------------------------------------------------------------------------------------
# Documents of text


def _excerpts(corpus, sequence, seed):
    """The corpus cut so that each window is filled by 2 to 8 documents, which differ from window to window."""
    windows = np.arange(0, corpus.num_tokens, sequence)
    generator = np.random.default_rng([seed, 0])
    cuts = windows[:, None] + generator.integers(1, max(2, sequence), size=(len(windows), 7))
    kept = np.arange(7) < generator.integers(1, 8, size=(len(windows), 1))
    starts = np.sort(np.concatenate([windows, cuts[kept], [corpus.num_tokens]]))
    return Source(corpus.name, corpus.tokens, starts[starts <= corpus.num_tokens])


def _documents(tokens):
    """Of a common.token_files.TokenFile: what its index says, or else what a zero byte ends."""
    if tokens.tokens.dtype == np.uint8 and not _index_of(tokens).is_file():
        ends = [
            np.flatnonzero(tokens.tokens[start : start + _CHUNK_TOKENS] == 0) + start + 1
            for start in range(0, tokens.num_tokens, _CHUNK_TOKENS)
        ]
        starts = np.concatenate([[0], *ends])
    else:
        # The header of Megatron's index, checked when it was opened: the number of sequences, 8 bytes at 18.
        count = int(np.fromfile(_index_of(tokens), "<u8", 1, offset=18)[0])
        starts = np.append(0, np.cumsum(np.fromfile(_index_of(tokens), "<i4", count, offset=34), dtype=np.int64))
    return Source(tokens.name, tokens.tokens, starts)


def _index_of(tokens):
    return Path(tokens.tokens.filename).with_suffix(".idx")


# ------------------------------------------------------------------------------------------------
# Rows: packed tokens, or prompts and completions


def _row_files(data, split):
    """Files of rows of this split that --data names, in the order of their names."""
    if not data:
        return []
    path = Path(data)
    if path.is_file() and path.suffix in _READERS:
        return [path] if split == "train" else []
    for folder in (path, path / "data"):
        for suffix in _READERS:
            found = sorted([*folder.glob(f"{split}{suffix}"), *folder.glob(f"{split}-*{suffix}")])
            if found:
                return found
    return []


def _rows(paths, config):
    tokens, counted, starts, num_tokens = [], [], [], 0
    for path in paths:
        try:
            rows = _READERS[path.suffix](path)
        except OSError as error:
            raise ValueError(f"--data: cannot read {path} ({error.strerror})") from None
        for number, row in enumerate(rows):
            where = f"row {number} of {path}"
            ids, counts, begins = _row(row, where)
            _require_vocabulary(ids, config.vocab, where)
            tokens.append(ids)
            counted.append(counts)
            starts.append(np.asarray(begins) + num_tokens)
            num_tokens += len(ids)
    if not tokens:
        raise ValueError(f"--data: {paths[0]} has no rows")
    starts = np.concatenate([*starts, [num_tokens]])
    return Source(str(paths[0]), np.concatenate(tokens), starts, np.concatenate(counted))


def _row(row, where):
    """(int32 ids, bool whether each counts as a target, begins of documents) of one row."""
    if not isinstance(row, dict):
        raise ValueError(f"--data: {where} is no table of fields")
    if "input_ids" not in row:
        return _text_row(row, where)
    ids = _integers(row["input_ids"], "input_ids", where)
    counts = np.ones(len(ids), bool)
    if "labels" in row:
        # Hugging Face's labels lie at the token that they name.
        counts = _integers(row["labels"], "labels", where) != -100
    elif "loss_mask" in row:
        # NeMo's packed dataset weighs by it at the token that predicts.
        counts = np.roll(np.asarray(row["loss_mask"]) != 0, 1)
    if counts.shape != ids.shape:
        raise ValueError(f"--data: {where} has {len(ids)} input_ids and another number of labels or loss_mask")
    begins = _integers(row.get("seq_start_id", [0]), "seq_start_id", where)
    if begins[0] != 0 or (np.diff(begins) <= 0).any() or begins[-1] >= len(ids):
        raise ValueError(f"--data: {where} has a seq_start_id that does not rise from 0 within its {len(ids)} tokens")
    return ids.astype(np.int32), counts, begins


def _integers(values, name, where):
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty((0, 0))
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu" or np.abs(array).max() >= 2**31:
        raise ValueError(f"--data: {where} has {name} that is no list of 32-bit integers")
    return array


def _text_row(row, where):
    """Bytes of a prompt, which does not count, and of its completion; a zero byte ends the document."""
    prompt, completion = "", row.get("text")
    for first, second in _PAIRS:
        if first in row and second in row:
            prompt, completion = row[first], row[second]
    if not isinstance(prompt, str) or not isinstance(completion, str):
        names = ", or ".join(f"{first} and {second}" for first, second in _PAIRS)
        raise ValueError(f"--data: {where} has neither input_ids, nor {names}, nor text")
    prompt, completion = prompt.encode(), completion.encode()
    ids = np.frombuffer(prompt + completion + b"\0", np.uint8).astype(np.int32)
    return ids, np.arange(len(ids)) >= len(prompt), [0]


class _ArraysOnly(pickle.Unpickler):
    """Builds dicts, lists, numbers, text and numpy arrays; a pickle that names anything else is refused."""

    def find_class(self, module, name):
        if module.split(".")[0] != "numpy" or name not in _ALLOWED:
            raise pickle.UnpicklingError(f"the pickle names {module}.{name}, only numpy arrays are read")
        return _ALLOWED[name]


# scalar: numbers of a numpy dtype within a list.
_ALLOWED = {
    "ndarray": np.ndarray,
    "dtype": np.dtype,
    "_reconstruct": lambda *_: np.ndarray((0,), np.int8),
    "_frombuffer": lambda buffer, dtype, shape, order: np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order),
    "scalar": lambda dtype, content: np.frombuffer(content, dtype)[0],
}


def _npy_rows(path):
    """Rows of an array of dicts that numpy has pickled, in a file that starts with the format's header."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            _, _, dtype = read_header[version](file)
            array = _ArraysOnly(file).load() if dtype.hasobject else None
        except OSError:
            raise
        except Exception as error:  # foreign bytes can make the unpickler raise anything
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(f"--data: {path} is damaged, or no .npy of rows: {reason}") from None
    if not isinstance(array, np.ndarray) or array.ndim != 1:
        raise ValueError(f"--data: {path} is no array of dicts with input_ids")
    return array.tolist()


def _parquet_rows(path):
    import pandas  # half a second

    try:
        frame = pandas.read_parquet(path)
    except ImportError:
        raise ValueError(
            f"--data: {path} needs pyarrow to be read: ./setup.sh parquet, or make a .jsonl of it"
        ) from None
    except ValueError as error:
        raise ValueError(f"--data: {path} is damaged: {str(error).splitlines()[0]}") from None
    return frame.drop(columns=["attention_mask", "position_ids"], errors="ignore").to_dict("records")


def _jsonl_rows(path):
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError:
                    raise ValueError(f"--data: line {number + 1} of {path} is damaged, it is not JSON") from None


_READERS = {".npy": _npy_rows, ".parquet": _parquet_rows, ".jsonl": _jsonl_rows}
