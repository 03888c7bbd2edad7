"""Folders of speech in LibriSpeech's layout: the utterances to train on, and why others are dropped.

    SPEAKER/CHAPTER/SPEAKER-CHAPTER-0000.flac          16 kHz
    SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt          lines of SPEAKER-CHAPTER-0000 THE WORDS OF THIS RECORDING

Folders may have any depth: a transcript is for audio files beside it. Only the headers of audio are read here. Needs
soundfile: ./setup.sh speech.
"""

import concurrent.futures
import functools
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile

from graph_worth.text import printable
from rnnt.config import Config
from rnnt.speech import transcripts

SAMPLE_RATE = 16000
HOP = 160
STACK = 3
FASTEST, SLOWEST = 0.85, 1.15
MIN_S = 0.1
AUDIO = ".flac"
TRANSCRIPT = ".trans.txt"
# Of a chapter, and of all of LibriSpeech's 281,241 utterances it would be 53 MB.
MOST_TRANSCRIPT_BYTES = 64 * 2**20


class Utterance(NamedTuple):
    """A recording and its transcript."""

    path: str
    num_samples: int
    text: str
    tokens: tuple[int, ...]


# ------------------------------------------------------------------------------------------------
# Lengths


def num_frames(num_samples: int) -> int:
    """Frames of 10 ms of a 16 kHz signal: windows are centred at multiples of 160 samples, the first at 0."""
    return 1 + num_samples // HOP


def spliced(frames: int) -> int:
    """Frames of 30 ms from frames of 10 ms."""
    return -(-frames // STACK)


def resampled(num_samples: int, scale: float) -> int:
    """Samples after resampling. scale: new rate over old, which DALI takes as float32."""
    return -int(-num_samples * float(np.float32(scale)) // 1)


def read_header(path) -> int:
    """Samples of a FLAC file, from its header alone. Raises ValueError with the reason."""
    _require_file(path)
    try:
        header = soundfile.info(path)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"cannot be read: {error.error_string}") from None
    if header.samplerate != SAMPLE_RATE:
        raise ValueError(f"{header.samplerate} Hz, speech takes {SAMPLE_RATE}: resample it")
    # A length that the header does not tell is a number beyond all lengths.
    if not MIN_S <= header.frames / SAMPLE_RATE < 2**20:
        raise ValueError(f"{header.frames / SAMPLE_RATE:.3g} s of audio, takes {MIN_S} s and more")
    return header.frames


def _require_file(path):
    # A pipe would be waited for.
    if not os.path.isfile(path):
        raise ValueError("not a regular file")


def require_decodable(path) -> None:
    """ValueError that names a FLAC file that cannot be decoded."""
    try:
        soundfile.read(path)
    except soundfile.LibsndfileError as error:
        raise ValueError(printable(f"--data: {path} cannot be decoded: {error.error_string}")) from None


# ------------------------------------------------------------------------------------------------
# A folder


@functools.lru_cache(maxsize=1)
def scan(config: Config) -> tuple[list[Utterance], list[str]]:
    """(utterances of --data to train on, reasons of those dropped), both in the order of their names.

    Raises ValueError that names --data where no utterance is left, --tokenizer where it cannot be opened.
    """
    folder = Path(config.data)
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    encode = transcripts.open_tokenizer(config.tokenizer, config.vocab).encode
    pairs, reasons = _pairs(folder)

    def examine(pair):
        path, text = pair
        try:
            num_samples, tokens = read_header(path), tuple(encode(text))
            frames = spliced(num_frames(resampled(num_samples, SLOWEST if config.speed_perturbation else 1.0)))
            if frames > config.max_frames:
                raise ValueError(f"up to {frames} frames of 30 ms, {config.max_frames} fit: raise --max-frames")
            if len(tokens) > config.max_tokens:
                raise ValueError(f"{len(tokens)} tokens, {config.max_tokens} fit: raise --max-tokens")
        except ValueError as error:
            return printable(f"{path.relative_to(folder)}: {error}")
        return Utterance(str(path), num_samples, text, tokens)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        results = list(threads.map(examine, pairs))
    utterances = [result for result in results if isinstance(result, Utterance)]
    reasons += [result for result in results if isinstance(result, str)]
    if not utterances:
        why = f"none can be trained on, the first is {reasons[0]}" if reasons else f"no *{AUDIO} with a *{TRANSCRIPT}"
        raise ValueError(f"--data {folder}: {why}")
    return utterances, reasons


def _pairs(folder):
    """([(path, normalised transcript)] of all audio that has a transcript, reasons of the rest)."""
    recordings, texts, reasons = [], {}, []
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() == AUDIO:
            recordings.append(path)
        elif path.name.endswith(TRANSCRIPT):
            try:
                _require_file(path)
                if path.stat().st_size > MOST_TRANSCRIPT_BYTES:
                    raise ValueError(f"larger than {MOST_TRANSCRIPT_BYTES >> 20} MiB")
                lines = path.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, ValueError) as error:
                reasons.append(printable(f"{path.relative_to(folder)}: cannot be read: {error}"))
                continue
            for line in filter(str.strip, lines):
                stem, *words = line.split(maxsplit=1)
                texts[path.parent / stem] = transcripts.normalise("".join(words))
    pairs = [(path, texts[path.with_suffix("")]) for path in recordings if texts.get(path.with_suffix(""))]
    have_text = {path for path, _ in pairs}
    reasons += [printable(f"{path.relative_to(folder)}: no transcript") for path in recordings if path not in have_text]
    return pairs, reasons
