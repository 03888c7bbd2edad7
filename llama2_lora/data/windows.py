"""Fixed windows of packed tokens with a loss mask.

    windows = open_windows(config, rank, world_size)
    windows.batch(3)                                 PackedBatch of tensors, all shapes the same in every batch

--data names packed rows, a file or a folder of train and validation files, in the formats of llama2_lora/data/rows.py.
Validation rows are held out. Without --data the Python standard library is cut so that 2 to 8 excerpts fill a window.

GovReport in MLPerf's packed form (Hugging Face, regisss/scrolls_gov_report_preprocessed_mlperf_2): 3,901 rows of 8192
tokens and 173 for validation, parquet with labels. Submissions convert it to .npy of dicts with loss_mask and
seq_start_id [0] (mlcommons/training_results_v4.0, Oracle, llama2_70b_lora, scripts/convert_dataset.py).

Documents follow one another in the order of the source. A document that is longer than a window is cut into documents.
A document that does not fit into the rest of a window begins the next, and padding fills the rest.
"""

import bisect
from typing import NamedTuple

import numpy as np
import torch

from common.data import token_files
from llama2_lora.config import MAX_DOCUMENTS, Config
from llama2_lora.data import rows
from llama2_lora.data.rows import Source


class PackedBatch(NamedTuple):
    """One window of s tokens, CPU tensors.

    tokens, targets: int64 [s]; a target is the next token of the same document. loss_mask: FP32 [s], 1 where the target
    counts, 0 for prompts, the last token of a document and padding. cu_seqlens: int32 [MAX_DOCUMENTS + 1], first tokens
    of the documents, then s. positions: int64 [s], from 0 in each document. Padding is a document of zeros. With
    `--documents whole` cu_seqlens and positions are those of one document, and the rest is the same.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    positions: torch.Tensor


class Packing:
    """The windows of one source. ValueError names --data."""

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
        counted = source.counted.copy()
        counted[self._bounds[:-1]] = False  # nothing predicts the first token of a document
        has_targets = np.add.reduceat(counted, self._bounds[self._firsts[:-1]], dtype=np.int64) > 0
        self._windows = np.flatnonzero(has_targets)
        if not len(self._windows):
            raise ValueError(f"--data: no document of {source.name} has a second token that counts in the loss")

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, index: int) -> PackedBatch:
        s, number = self.config.sequence, self._windows[index]
        bounds = self._bounds[self._firsts[number] : self._firsts[number + 1] + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        tokens, targets, mask = np.zeros(s, np.int64), np.zeros(s, np.int64), np.zeros(s, np.float32)
        tokens[: end - begin] = self.source.tokens[begin:end]
        targets[: end - begin - 1] = tokens[1 : end - begin]
        mask[: end - begin - 1] = self.source.counted[begin + 1 : end]
        lasts = bounds[1:] - begin - 1
        targets[lasts], mask[lasts] = 0, 0
        cu_seqlens = np.full(MAX_DOCUMENTS + 1, s, np.int32)
        starts = bounds[:1] - begin if self._whole else bounds - begin
        cu_seqlens[: len(starts)] = starts
        everywhere = np.arange(s)
        positions = everywhere - cu_seqlens[np.searchsorted(cu_seqlens, everywhere, side="right") - 1]
        return PackedBatch(*(torch.from_numpy(array) for array in (tokens, targets, mask, cu_seqlens, positions)))


def _fill_windows(bounds, sequence, most):
    """Index of the first piece of every window, then the number of pieces. bounds: begins of pieces, then the end."""
    firsts, first = [], 0
    while first < len(bounds) - 1:
        firsts.append(first)
        stop = min(first + most, len(bounds) - 1)
        # No piece is longer than a window, so one fits at least.
        first = bisect.bisect_right(bounds, bounds[first] + sequence, first + 1, stop + 1) - 1
    return np.array([*firsts, first])


class Windows:
    """Training windows of one rank, the same in every run with the same arguments.

    name: of the source. num_windows: of all ranks. In an epoch no window is read twice by any rank, and each epoch has
    its own order.
    """

    def __init__(self, training: Packing, rank, world_size, seed):
        self.name = training.source.name
        self._training, self._rank, self._world_size, self._seed = training, rank, world_size, seed
        order = np.random.default_rng(seed).permutation(len(training))
        self._order, self.num_windows, self._epoch, self._shuffled = order, len(order), -1, order
        if self.num_windows < world_size:
            raise ValueError(
                f"--data: {self.name} fills {self.num_windows} windows of --sequence {training.config.sequence}, "
                f"{world_size} ranks read one each: give more text or a shorter --sequence"
            )

    def batch(self, index: int) -> PackedBatch:
        """This rank's window of step `index`. It does not depend on earlier calls."""
        epoch, step = divmod(index, self.num_windows // self._world_size)
        if epoch != self._epoch:
            self._epoch, self._shuffled = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._order)
        return self._training.window(self._shuffled[step * self._world_size + self._rank])


def open_windows(config: Config, rank: int = 0, world_size: int = 1, seed: int = 0) -> Windows:
    """Windows of config.sequence tokens from config.data.

    ValueError in one line: --data that is missing, damaged or too short, tokens outside --vocab.
    """
    if config.data:
        training = rows.read(rows.files(config.data), config.vocab)
    else:
        training = _excerpts(token_files.python_corpus(), config.sequence, seed)
        rows.require_vocabulary(training.tokens, config.vocab, training.name)
    return Windows(Packing(training, config), rank, world_size, seed)


def _excerpts(corpus, sequence, seed):
    """The corpus cut so that 2 to 8 documents, other ones each time, fill each window."""
    windows = np.arange(0, corpus.num_tokens, sequence)
    generator = np.random.default_rng([seed, 0])
    cuts = windows[:, None] + generator.integers(1, max(2, sequence), size=(len(windows), 7))
    kept = np.arange(7) < generator.integers(1, 8, size=(len(windows), 1))
    starts = np.sort(np.concatenate([windows, cuts[kept], [corpus.num_tokens]]))
    counted = np.ones(corpus.num_tokens, bool)
    return Source(corpus.name, corpus.tokens, starts[starts <= corpus.num_tokens], counted)
