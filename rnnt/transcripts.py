"""Transcripts: normalising them, text to tokens and back, and the word error rate. No torch here.

tokenizer = open_tokenizer("chars", vocab=1024)
tokenizer.encode("the red boat")             [20, 8, 5, 0, 18, ...]; UnknownText where it has no token for it
tokenizer.decode([20, 8, 5])                 "the"
word_errors("the red boat", "the bed boat")         1
"""

from pathlib import Path

LETTERS = " abcdefghijklmnopqrstuvwxyz'"


class UnknownText(Exception):
    """A transcript that the tokenizer cannot write; its text is the reason."""


def normalise(text: str) -> str:
    """Lower case, words one space apart."""
    return " ".join(text.lower().split())


class Chars:
    """One token per character: space, a to z, apostrophe are 0 to 27."""

    num_tokens = len(LETTERS)

    def __init__(self):
        self._ids = {letter: number for number, letter in enumerate(LETTERS)}

    def encode(self, text: str) -> list[int]:
        """The ids of a normalised text. Raises UnknownText."""
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise UnknownText(f"characters outside the vocabulary: {''.join(unknown[:10])!a}")
        return [self._ids[letter] for letter in text]

    def decode(self, ids) -> str:
        """Normalised text, as words are compared. What a decoder hears need not have one space between words."""
        return normalise("".join(LETTERS[number] if number < self.num_tokens else "" for number in ids))


class Pieces:
    """The pieces of a sentencepiece .model file, without begin and end of a sentence."""

    def __init__(self, path: str):
        try:
            import sentencepiece
        except ImportError:
            raise ValueError(
                f"--tokenizer {path}: sentencepiece is not installed: ./setup.sh speech, or --tokenizer chars"
            ) from None
        if not Path(path).is_file():
            raise ValueError(f"--tokenizer {path}: no such file, takes chars or a sentencepiece .model file")
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError):
            raise ValueError(f"--tokenizer {path}: not a sentencepiece .model file") from None
        self.num_tokens = self._model.vocab_size()
        if self._characters().isupper():
            raise ValueError(
                f"--tokenizer {path}: its pieces are in capitals, and transcripts are lower-cased before it sees them: "
                "train it on lower-cased text"
            )

    def encode(self, text: str) -> list[int]:
        """The ids of a normalised text. Raises UnknownText."""
        ids = self._model.encode(text, add_bos=False, add_eos=False)
        if self._model.unk_id() in ids:
            unknown = sorted(set(text) - set(self._characters()) - {" "})
            if unknown:
                raise UnknownText(f"characters outside the vocabulary: {''.join(unknown[:10])!a}")
            words = [word for word in dict.fromkeys(text.split()) if self._model.unk_id() in self._model.encode(word)]
            raise UnknownText(f"words outside the vocabulary: {' '.join(words[:5])!a}")
        return ids

    def _characters(self):
        model = self._model
        special = (model.is_unknown, model.is_control, model.is_byte, model.is_unused)
        ordinary = (number for number in range(self.num_tokens) if not any(test(number) for test in special))
        return "".join(model.id_to_piece(number) for number in ordinary)

    def decode(self, ids) -> str:
        """Normalised text, as words are compared; ids that are no piece say nothing."""
        return normalise(self._model.decode([int(number) for number in ids if number < self.num_tokens]))


def open_tokenizer(name: str, vocab: int) -> Chars | Pieces:
    """What --tokenizer names. vocab: classes of the model, of which the last is the blank.

    Raises ValueError that names --tokenizer or --vocab.
    """
    tokenizer = Chars() if name == "chars" else Pieces(name)
    if tokenizer.num_tokens > vocab - 1:
        raise ValueError(
            f"--tokenizer {name} has {tokenizer.num_tokens} tokens and the blank needs one more class: --vocab {vocab} "
            f"is too small, take {tokenizer.num_tokens + 1} or more"
        )
    return tokenizer


# ------------------------------------------------------------------------------------------------
# Word error rate


def word_errors(reference: str, hypothesis: str) -> int:
    """The fewest words to insert, delete and replace to get from one to the other (Levenshtein's distance)."""
    said, heard = reference.split(), hypothesis.split()
    above = list(range(len(heard) + 1))
    for row, word in enumerate(said, 1):
        current = [row]
        for column, other in enumerate(heard, 1):
            current.append(min(above[column] + 1, current[-1] + 1, above[column - 1] + (word != other)))
        above = current
    return above[-1]
