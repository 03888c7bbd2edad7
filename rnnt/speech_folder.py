"""Folders of speech in LibriSpeech's layout: which utterances they hold, and which of them cannot be trained on.

    SPEAKER/CHAPTER/SPEAKER-CHAPTER-0000.flac (or .wav)
    SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt          a line each: SPEAKER-CHAPTER-0000 THE WORDS THAT ARE SAID

Any depth of folders will do, none too: a transcript speaks of the audio files beside it. Audio is not decoded here:
headers tell lengths and sample rates, which is what 280,000 files need to be sorted out in seconds, without an audio
library. What only decoding shows is found where batches are made (rnnt/speech.py).
"""

import concurrent.futures
import os
import struct
from pathlib import Path
from typing import NamedTuple

from rnnt import transcripts

REPOSITORY = Path(__file__).resolve().parent / "corpus"
SAMPLE_RATE = 16000
HOP = 160
STACK = 3
FASTEST, SLOWEST = 0.85, 1.15
MIN_S = 0.1
AUDIO = (".flac", ".wav")
# LibriSpeech has 292,000 recordings and 5,800 transcripts.
MAX_NAMES = 2_000_000
TRANSCRIPT = ".trans.txt"


class Utterance(NamedTuple):
    """One recording and what is said in it. num_samples: at its own sample_rate, in Hz."""

    name: str
    path: str
    num_samples: int
    sample_rate: int
    text: str
    tokens: tuple[int, ...]


class Dropped(NamedTuple):
    """What is not read and why. name: of an utterance or file, below the folder."""

    name: str
    reason: str

    def __str__(self):
        return f"{self.name}: {self.reason}"


class BadAudio(Exception):
    """An utterance that cannot be trained on; its text is the reason. flags: to raise for it."""

    def __init__(self, reason, *flags):
        super().__init__(reason)
        self.flags = flags


# ------------------------------------------------------------------------------------------------
# Lengths


def num_frames(num_samples: int) -> int:
    """Frames of 10 ms of a 16 kHz signal: windows are centred at multiples of the hop, the first at 0."""
    return 1 + num_samples // HOP


def spliced(frames: int) -> int:
    """Frames of 30 ms that frames of 10 ms make."""
    return -(-frames // STACK)


def resampled(num_samples: int, scale: float) -> int:
    """Samples after resampling. scale: new rate over old; DALI's rule."""
    # DALI takes the scale as float32.
    scale = struct.unpack("f", struct.pack("f", scale))[0]
    return -int(-num_samples * scale // 1)


def require_room(frames: int, num_tokens: int) -> None:
    """BadAudio where a transcript has more tokens than its audio, at its own speed, has frames of 10 ms.

    Nobody speaks a quarter as fast: audio and transcript are no pair.
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

    folder: what --data names. tokenizer: see rnnt/transcripts.py. max_frames: of 30 ms, after the largest resample
    factor if perturbed. max_tokens: longest transcript. `utterances` is a list of Utterance, `dropped` of Dropped,
    `resampled` the utterances whose sample rate is another than 16 kHz, `named` the dropped that stderr tells of
    (rnnt/speech.py). Raises ValueError that names --data, --max-frames or --max-tokens where nothing is left.
    """

    def __init__(self, folder, tokenizer, max_frames: int, max_tokens: int, perturbed: bool):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"--data {folder}: {'not a folder' if self.folder.exists() else 'no such folder'}")
        self.utterances: list[Utterance] = []
        self.dropped: list[Dropped] = []
        self.named: set[str] = set()
        self._largest_factor = SLOWEST if perturbed else 1.0
        flags = set()
        candidates = self._pairs()
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            headers = threads.map(_try_header, (path for _, path, _ in candidates), chunksize=64)
            for (name, path, words), header in zip(candidates, headers, strict=True):
                try:
                    self.utterances.append(self._checked(name, path, words, header, tokenizer, max_frames, max_tokens))
                except BadAudio as error:
                    flags.update(error.flags)
                    self.dropped.append(Dropped(name, str(error)))
        self.resampled = [one for one in self.utterances if one.sample_rate != SAMPLE_RATE]
        if not self.utterances:
            raise ValueError(f"--data {folder}: {self._nothing_left(flags)}")

    def _pairs(self):
        """[(name, path, transcript)] of all audio with a transcript; what lacks its other half is dropped."""
        pairs = []

        def drop(name, reason):
            self.dropped.append(Dropped(name, reason))

        visited, num_names = set(), 0
        for place, folders, files in os.walk(self.folder, followlinks=True):
            num_names += len(folders) + len(files)
            if num_names > MAX_NAMES:
                raise ValueError(f"--data {self.folder}: more than {MAX_NAMES:,} files: name the corpus")
            # Links may lead back up, or twice to one folder.
            if os.path.realpath(place) in visited:
                folders.clear()
                drop(str(Path(place).relative_to(self.folder)), "leads to a folder that is read already")
                continue
            visited.add(os.path.realpath(place))
            folders.sort()
            below = Path(place).relative_to(self.folder)
            transcripts, repeated = {}, set()
            for file in sorted(files):
                if file.endswith(TRANSCRIPT) and not file.startswith("."):
                    self._read_transcript(Path(place, file), transcripts, repeated, drop)
            recordings = {}
            for file in sorted(files):
                stem, extension = os.path.splitext(file)
                if extension.lower() in AUDIO and not file.startswith("."):
                    recordings.setdefault(stem, []).append(file)
            for stem, found in sorted(recordings.items()):
                name = str(below / stem)
                if len(found) > 1:
                    drop(name, f"{' and '.join(found)}: which of them is not told")
                elif stem in repeated:
                    drop(name, "has two transcripts")
                elif stem not in transcripts:
                    drop(name, f"no transcript (a line {stem} ... in a *{TRANSCRIPT} beside it)")
                else:
                    pairs.append((name, os.path.join(place, found[0]), transcripts[stem]))
            for stem in sorted(transcripts.keys() - recordings.keys()):
                drop(str(below / stem), "a transcript and no audio")
        return pairs

    def _read_transcript(self, path, transcripts, repeated, drop):
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            drop(str(path.relative_to(self.folder)), f"cannot be read: {reason}")
            return
        for line in lines:
            if not line.strip():
                continue
            stem, *words = line.split(maxsplit=1)
            if stem in transcripts:
                repeated.add(stem)
            transcripts[stem] = "".join(words)

    def _checked(self, name, path, words, header, tokenizer, max_frames, max_tokens):
        if isinstance(header, BadAudio):
            raise header
        num_samples, rate = header
        seconds = num_samples / rate
        if seconds < MIN_S:
            raise BadAudio(f"{seconds:.3f} s of audio, less than {MIN_S} s")
        words = transcripts.normalise(words)
        if not words:
            raise BadAudio("empty transcript")
        try:
            tokens = tuple(tokenizer.encode(words))
        except transcripts.UnknownText as error:
            raise BadAudio(str(error)) from None
        require_room(num_frames(resampled(num_samples, SAMPLE_RATE / rate)), len(tokens))
        factor = self._largest_factor
        frames = spliced(num_frames(resampled(num_samples, factor * SAMPLE_RATE / rate)))
        too_long = {}
        if frames > max_frames:
            slowed = f" resampled by up to {factor}" if factor != 1.0 else ""
            too_long["--max-frames"] = f"{seconds:.1f} s{slowed} are {frames} frames of 30 ms and {max_frames} fit"
        if len(tokens) > max_tokens:
            too_long["--max-tokens"] = f"{len(tokens)} tokens and {max_tokens} fit"
        if too_long:
            raise BadAudio(f"{', '.join(too_long.values())}: raise {' and '.join(too_long)}", *too_long)
        return Utterance(name, path, num_samples, rate, words, tokens)

    def _nothing_left(self, flags):
        if not self.dropped:
            return f"no audio ({', '.join('*' + extension for extension in AUDIO)}) in it"
        advice = f", raise {' and '.join(sorted(flags))}" if flags else ""
        return f"none of {len(self.dropped):,} utterances can be trained on{advice}; the first is {self.dropped[0]}"


def _try_header(path):
    try:
        return read_header(path)
    except BadAudio as error:
        return error
