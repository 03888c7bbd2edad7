"""Transcripts: normalising them, and text to tokens. Imports no torch."""

from pathlib import Path

LETTERS = " abcdefghijklmnopqrstuvwxyz'"


def normalise(text: str) -> str:
    """Lower case, words one space apart."""
    return " ".join(text.lower().split())


class Chars:
    """One token per character: space, a to z, apostrophe are 0 to 27."""

    num_tokens = len(LETTERS)

    def encode(self, text: str) -> list[int]:
        """The ids of a normalised text. Raises ValueError for other characters."""
        unknown = sorted(set(text) - set(LETTERS))
        if unknown:
            raise ValueError(f"characters outside the vocabulary: {''.join(unknown[:10])!a}")
        return [LETTERS.index(letter) for letter in text]


class Pieces:
    """The pieces of a sentencepiece .model file, which was trained on lower-case text."""

    def __init__(self, path: str):
        try:
            import sentencepiece
        except ImportError:
            raise ValueError(f"--tokenizer {path}: sentencepiece is not installed: ./setup.sh speech") from None
        if not Path(path).is_file():
            raise ValueError(f"--tokenizer {path}: no such file, takes chars or a sentencepiece .model file")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError):
            raise ValueError(f"--tokenizer {path}: not a sentencepiece .model file") from None
        self.num_tokens = self._model.vocab_size()

    def encode(self, text: str) -> list[int]:
        """The ids of a normalised text. Raises ValueError for other characters."""
        ids = self._model.encode(text, add_bos=False, add_eos=False)
        if self._model.unk_id() in ids:
            raise ValueError(f"characters outside the vocabulary of --tokenizer: {text[:40]!a}")
        return ids


def open_tokenizer(name: str, vocab: int) -> Chars | Pieces:
    """The tokenizer of --tokenizer. Raises ValueError that names --tokenizer or --vocab."""
    tokenizer = Chars() if name == "chars" else Pieces(name)
    if tokenizer.num_tokens > vocab - 1:
        raise ValueError(
            f"--tokenizer {name} has {tokenizer.num_tokens} tokens and the blank needs one more class: --vocab {vocab} "
            f"is too small, take {tokenizer.num_tokens + 1} or more"
        )
    return tokenizer
