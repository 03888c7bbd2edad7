"""Folders of speech in LibriSpeech's layout: the utterances to train on, and the reasons why others are dropped.

    SPEAKER/CHAPTER/SPEAKER-CHAPTER-0000.flac (or .wav)
    SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt          lines of SPEAKER-CHAPTER-0000 THE WORDS OF THIS RECORDING

Folders may have any depth: a transcript is for audio files beside it. Only the headers of audio are read here, which
takes seconds for 280,000 files and no audio library. Faults that only decoding shows are found in
rnnt/speech/source.py.
"""

import collections
import concurrent.futures
import os
import struct
from pathlib import Path
from typing import NamedTuple

from rnnt.speech import transcripts

SAMPLE_RATE = 16000
HOP = 160
STACK = 3
FASTEST, SLOWEST = 0.85, 1.15
MIN_S = 0.1
AUDIO = (".flac", ".wav")
TRANSCRIPT = ".trans.txt"


class Utterance(NamedTuple):
    """A recording and its transcript. num_samples: at its own sample_rate, in Hz."""

    name: str
    path: str
    num_samples: int
    sample_rate: int
    text: str
    tokens: tuple[int, ...]


class Dropped(NamedTuple):
    """An utterance, file or folder below the corpus that is not read, and the reason."""

    name: str
    reason: str

    def __str__(self):
        return f"{self.name}: {self.reason}"


class BadAudio(Exception):
    """An utterance that cannot be trained on; its text is the reason."""


# ------------------------------------------------------------------------------------------------
# Lengths


def num_frames(num_samples: int) -> int:
    """Frames of 10 ms of a 16 kHz signal: windows are centred at multiples of 160 samples, the first at 0."""
    return 1 + num_samples // HOP


def spliced(frames: int) -> int:
    """Frames of 30 ms from frames of 10 ms."""
    return -(-frames // STACK)


def resampled(num_samples: int, scale: float) -> int:
    """Samples after resampling. scale: new rate over old; DALI's rule."""
    # DALI takes the scale as float32.
    scale = struct.unpack("f", struct.pack("f", scale))[0]
    return -int(-num_samples * scale // 1)


def require_room(frames: int, num_tokens: int) -> None:
    """Raises BadAudio where a transcript has more tokens than its audio has frames of 10 ms.

    Nobody speaks a quarter as fast, so the transcript is of other audio.
    """
    if num_tokens > frames:
        raise BadAudio(f"{num_tokens} tokens in {frames} frames of 10 ms")


# ------------------------------------------------------------------------------------------------
# Headers


def read_header(path) -> tuple[int, int]:
    """(num_samples, sample_rate) of a FLAC or WAV file, from its header alone. Raises BadAudio."""
    try:
        with open(path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes == 0:
                raise BadAudio("empty file")
            head = file.read(42)
            if head[:4] == b"fLaC":
                return _flac_header(head)
            if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
                return _wav_header(file, num_bytes)
    except OSError as error:
        raise BadAudio(f"cannot be read: {error.strerror}") from None
    raise BadAudio("neither FLAC nor WAV")


def _flac_header(head):
    # RFC 9639, 8.2: the first block is STREAMINFO. From byte 18 on: 20 bits rate, 3 channels, 5 depth, 36 length.
    if len(head) < 42 or head[4] & 0x7F:
        raise BadAudio("damaged FLAC header")
    bits = int.from_bytes(head[18:26], "big")
    rate, num_samples = bits >> 44, bits & (1 << 36) - 1
    if not rate:
        raise BadAudio("damaged FLAC header")
    if not num_samples:
        raise BadAudio("no samples in it, or a FLAC header that does not say how many")
    return num_samples, rate


def _wav_header(file, num_bytes):
    place, rate, frame_bytes = 12, 0, 0
    while place + 8 <= num_bytes:
        head = os.pread(file.fileno(), 24, place)
        size = int.from_bytes(head[4:8], "little")
        if head[:4] == b"fmt " and len(head) == 24:
            rate, _, frame_bytes = struct.unpack("<IIH", head[12:22])
        if head[:4] == b"data":
            if not rate or not frame_bytes:
                break
            # Decoders take what is there without a word, which would pair half a recording with its whole transcript.
            if place + 8 + size > num_bytes:
                raise BadAudio(f"cut off, {place + 8 + size - num_bytes:,} bytes are missing")
            if size < frame_bytes:
                raise BadAudio("no samples in it")
            return size // frame_bytes, rate
        place += 8 + size + size % 2
    raise BadAudio("damaged WAV header")


# ------------------------------------------------------------------------------------------------
# A folder


class Corpus:
    """The utterances of a folder that can be trained on, in the order of their names.

    Args:
        folder: of --data.
        tokenizer: see rnnt/speech/transcripts.py.
        max_frames: longest utterance, in frames of 30 ms, after the largest resampling factor if `perturbed`.
        max_tokens: longest transcript.
        perturbed: True if training changes the speed.

    `dropped`: list of Dropped. `named`: names of those that stderr tells of (rnnt/speech/source.py).

    Raises:
        ValueError: names --data where no utterance is left.
    """

    def __init__(self, folder, tokenizer, max_frames: int, max_tokens: int, perturbed: bool):
        self.folder, self.tokenizer = Path(folder), tokenizer
        if not self.folder.is_dir():
            raise ValueError(f"--data {folder}: {'not a folder' if self.folder.exists() else 'no such folder'}")
        self.max_frames, self.max_tokens, self.largest_factor = max_frames, max_tokens, SLOWEST if perturbed else 1.0
        self.utterances: list[Utterance] = []
        self.dropped: list[Dropped] = []
        self.named: set[str] = set()
        pairs = self._pairs()
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            for (name, _, _), found in zip(pairs, threads.map(self._examine, pairs), strict=True):
                self._drop(name, found) if isinstance(found, BadAudio) else self.utterances.append(found)
        if not self.utterances:
            reason = f"no audio ({', '.join('*' + extension for extension in AUDIO)}) in it"
            if self.dropped:
                number = f"{len(self.dropped):,}"
                reason = f"none of {number} utterances can be trained on; the first is {self.dropped[0]}"
            raise ValueError(f"--data {folder}: {reason}")

    def _drop(self, name, reason):
        self.dropped.append(Dropped(str(name), str(reason)))

    def _pairs(self):
        """[(name, path, transcript)] of all audio that has one transcript; the rest is dropped."""
        pairs, visited = [], set()
        for place, folders, files in os.walk(self.folder, followlinks=True):
            below = Path(place).relative_to(self.folder)
            # Links may lead back up, or twice to one folder.
            if os.path.realpath(place) in visited:
                folders.clear()
                self._drop(below, "leads to a folder that is read already")
                continue
            visited.add(os.path.realpath(place))
            folders.sort()
            texts, recordings = collections.defaultdict(list), collections.defaultdict(list)
            for file in sorted(file for file in files if not file.startswith(".")):
                stem, extension = os.path.splitext(file)
                if file.endswith(TRANSCRIPT):
                    self._read_transcript(Path(place, file), texts)
                elif extension.lower() in AUDIO:
                    recordings[stem].append(file)
            for stem in sorted(recordings.keys() | texts.keys()):
                reason = _why_no_pair(stem, recordings[stem], texts[stem])
                if reason:
                    self._drop(below / stem, reason)
                else:
                    pairs.append((str(below / stem), os.path.join(place, recordings[stem][0]), texts[stem][0]))
        return pairs

    def _read_transcript(self, path, texts):
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            self._drop(path.relative_to(self.folder), f"cannot be read: {reason}")
            return
        for line in filter(str.strip, lines):
            stem, *words = line.split(maxsplit=1)
            texts[stem].append("".join(words))

    def _examine(self, pair):
        """An Utterance, or BadAudio."""
        try:
            return self._utterance(*pair)
        except BadAudio as error:
            return error
        except transcripts.UnknownText as error:
            return BadAudio(str(error))

    def _utterance(self, name, path, text):
        num_samples, rate = read_header(path)
        seconds = num_samples / rate
        if seconds < MIN_S:
            raise BadAudio(f"{seconds:.3f} s of audio, less than {MIN_S} s")
        text = transcripts.normalise(text)
        if not text:
            raise BadAudio("empty transcript")
        tokens = tuple(self.tokenizer.encode(text))
        require_room(num_frames(resampled(num_samples, SAMPLE_RATE / rate)), len(tokens))
        factor = self.largest_factor
        frames = spliced(num_frames(resampled(num_samples, factor * SAMPLE_RATE / rate)))
        if frames > self.max_frames:
            slowed = f" resampled by up to {factor}" if factor != 1.0 else ""
            fit = f"{frames} frames of 30 ms and {self.max_frames} fit"
            raise BadAudio(f"{seconds:.1f} s{slowed} are {fit}: raise --max-frames")
        if len(tokens) > self.max_tokens:
            raise BadAudio(f"{len(tokens)} tokens and {self.max_tokens} fit: raise --max-tokens")
        return Utterance(name, path, num_samples, rate, text, tokens)


def _why_no_pair(stem, recordings, texts):
    if not recordings:
        return "a transcript and no audio"
    if len(recordings) > 1:
        return f"two recordings: {' and '.join(recordings)}"
    if not texts:
        return f"no transcript (a line {stem} ... in a *{TRANSCRIPT} beside it)"
    return "has two transcripts" if len(texts) > 1 else ""
