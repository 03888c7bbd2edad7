"""Token sources: one-dimensional arrays of token ids, and windows drawn from them. Megatron's files are memory-mapped.

    tokens = open_tokens("")                             the Python standard library's own source text
    tokens = open_tokens("/data/books")                  a folder of text, byte by byte
    tokens = open_tokens("/data/c4_text_document")       Megatron-LM's .bin/.idx
    batch = tokens.batch(index, num_sequences=4, sequence_length=2048, seed=0)

Byte-level sources have 256 ids, and a zero byte ends each document. Only numpy is needed.
"""

import hashlib
import os
import platform
import sysconfig
from pathlib import Path

import numpy as np

_END_OF_DOCUMENT = b"\0"
_NO_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


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


def open_tokens(data) -> TokenFile:
    """Open the tokens that --data names: "" is the Python corpus, a folder its text, else a Megatron prefix or file.

    Raises ValueError that names --data.
    """
    if not data:
        return python_corpus()
    from common.data import megatron_tokens, text_folder

    if Path(data).is_dir():
        return TokenFile(*text_folder.read(data, _END_OF_DOCUMENT))
    if any(path.is_file() for path in megatron_tokens.paths(data)):
        return TokenFile(*megatron_tokens.read(data))
    raise ValueError(
        f"--data {data}: neither a folder of text nor the prefix of Megatron token files ({data}.bin, {data}.idx)"
    )


def python_corpus() -> TokenFile:
    """The source text of this Python's standard library, about 12 MB, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    candidates: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NO_CORPUS and not name.startswith(".")]
        candidates += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(".")]
    paths = sorted(filter(os.path.isfile, candidates), key=lambda path: path.relative_to(root).as_posix())
    text = b"".join(path.read_bytes() + _END_OF_DOCUMENT for path in paths)
    name = f"python-{platform.python_version()}-{hashlib.sha256(text).hexdigest()[:16]}"
    return TokenFile(np.frombuffer(text, dtype=np.uint8), name)
