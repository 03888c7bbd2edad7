"""A corpus of made speech in LibriSpeech's layout: sentences from a small grammar, spoken by espeak-ng, as FLAC.

    python -m rnnt.make_corpus --out speech                            as the repository's own, 60 utterances
    python -m rnnt.make_corpus --out speech --utterances 5000 --seconds 1 16

Needs espeak-ng (Debian: apt install espeak-ng) and soundfile (./setup.sh speech). The same arguments give the same
sentences and lengths wherever they are run, and the same audio wherever espeak-ng is of the same version. The folder
appears when all of it is made.

FOLDER/<100 + voice>/1/<100 + voice>-1-0000.flac and .trans.txt: a speaker for each voice, 16 kHz, 16 bits. Samples stay
below 2 % of full scale: features are normalised and do not notice, and FLAC needs 40 % less than for loud speech.
"""

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from common.config import Parser, mistakes_in_one_line

SAMPLE_RATE = 16000
# English voices that come with espeak-ng, some with another larynx (+f and +m).
VOICES = ("en-us", "en-gb", "en-us+f2", "en-gb-x-rp+f4", "en-gb-scotland+m3", "en-us+m7")
WORDS_PER_MINUTE = 150
PEAK = 0.02
# --max-tokens of the benchmark is 125. Longer recordings than those of 8 s say more, and need more of them: 15 to 18
# characters are said in a second.
MAX_CHARACTERS, MAX_CHARACTERS_S = 120, 8
MORE_CHARACTERS_PER_S = 20
MAX_TRIES = 200

# ------------------------------------------------------------------------------------------------
# Sentences

_TABLE = """
people     baker captain doctor farmer fisherman girl boy king painter sailor teacher miller
things     apple basket boat candle drum hammer key lantern letter mirror piano ladder wagon kettle
qualities  old young red blue green small heavy quiet happy golden broken silver
places     harbor garden market mountain river village kitchen tower bridge forest island station
deeds      carries finds sells paints repairs hides borrows polishes watches brings
moves      walks runs travels wanders hurries sails
ways       toward beyond around across near behind
times      today tomorrow again slowly early quickly always
moments    morning evening winter summer night
links      and but while because
"""
WORDS = {name: words.split() for name, words in (line.split(maxsplit=1) for line in _TABLE.strip().splitlines())}
ANSWERS = (
    "nobody knows why",
    "everyone laughs",
    "the music stops",
    "we wait here",
    "it doesn't matter",
    "don't be late",
)


class Grammar:
    """Sentences of simple words from a numpy generator; clauses are added until there are enough words."""

    def __init__(self, generator: np.random.Generator):
        self.generator = generator

    def sentence(self, num_words: int) -> str:
        """About num_words words, lower case, without punctuation."""
        words = []
        while len(words) < num_words:
            if words:
                words += [self._word("links")]
            words += self._clause(num_words - len(words)).split()
        return " ".join(words)

    def _clause(self, room):
        if room <= 3:
            return self._one((" ".join(("the", self._word("people"), self._word("moves"))), *ANSWERS))
        parts = [self._noun("people")]
        if self.generator.random() < 0.6:
            parts += [self._word("deeds"), self._noun("things")]
        else:
            parts += [self._word("moves"), self._word("ways"), self._noun("places")]
        if room > 8:
            parts.append(self._one(("in the " + self._word("moments"), self._word("times"))))
        return " ".join(parts)

    def _noun(self, kind):
        quality = self._word("qualities") + " " if self.generator.random() < 0.5 else ""
        return f"the {quality}{self._word(kind)}"

    def _word(self, kind):
        return self._one(WORDS[kind])

    def _one(self, choices):
        return choices[self.generator.integers(len(choices))]


# ------------------------------------------------------------------------------------------------
# Speech


def speak(sentence: str, voice: str) -> np.ndarray:
    """float64 samples at 16 kHz, the largest at PEAK. ValueError where espeak-ng does not know the voice."""
    command = ["espeak-ng", "-v", voice, "-s", str(WORDS_PER_MINUTE), "--stdout", sentence]
    answer = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    if answer.returncode or not answer.stdout:
        message = answer.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"--voices {voice}: espeak-ng: {message[-1] if message else 'made no sound'}")
    samples, rate = _read_wav(answer.stdout)
    # irfft leaves out what lies above half the new rate: nothing is folded back.
    num_out = round(len(samples) * SAMPLE_RATE / rate)
    samples = np.fft.irfft(np.fft.rfft(samples), num_out)
    return samples * (PEAK / np.abs(samples).max())


def _read_wav(content):
    """(samples, rate) of espeak-ng's output. Its header tells no length, because it is written into a pipe."""
    rate = int.from_bytes(content[24:28], "little")
    begin = content.index(b"data") + 8
    return np.frombuffer(content[begin : begin + (len(content) - begin) // 2 * 2], "<i2").astype(np.float64), rate


def max_characters(seconds: float) -> int:
    """Of a sentence, where the longest recording takes that many seconds."""
    return MAX_CHARACTERS + int(MORE_CHARACTERS_PER_S * max(0.0, seconds - MAX_CHARACTERS_S))


def write(folder: Path, utterances: int, seconds: tuple[float, float], voices: list[str], seed: int):
    """Write the corpus, all of it or nothing; returns (its bytes, characters of its longest transcript).

    Raises ValueError if the folder has something in it, if espeak-ng does not know a voice, and if no sentences of such
    lengths are found.
    """
    place = folder.resolve()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise ValueError(f"--out {folder}: {'not empty' if place.is_dir() else 'a file'}, name another folder")
    for voice in voices:
        speak("yes", voice)
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.") as beside:
        made = Path(beside) / place.name
        answer = _write(made, utterances, seconds, voices, seed)
        # An empty folder gives way.
        made.rename(place)
    return answer


def _write(folder, utterances, seconds, voices, seed):
    said = set()
    num_bytes = 0
    for number in range(utterances):
        place, voice = divmod(number, len(voices))
        speaker = f"{101 + voice}"
        target = folder / speaker / "1"
        target.mkdir(parents=True, exist_ok=True)
        sentence, samples = _utterance([seed, number], seconds, voices[voice], said)
        said.add(sentence)
        name = f"{speaker}-1-{place:04d}"
        content = encode(samples)
        (target / f"{name}.flac").write_bytes(content)
        with open(target / f"{speaker}-1.trans.txt", "a", encoding="ascii") as transcript:
            transcript.write(f"{name} {sentence.upper()}\n")
        num_bytes += len(content)
    return num_bytes, max(map(len, said))


def _utterance(seeds, seconds, voice, said):
    """(sentence, samples) that last as long as drawn, give or take a word, and that nobody has said yet."""
    generator = np.random.default_rng(seeds)
    grammar = Grammar(generator)
    # Short ones are more frequent than long ones.
    wanted = seconds[0] + (seconds[1] - seconds[0]) * generator.random() ** 1.6
    # Two words and a half a second, and a quarter of a second around them.
    num_words = max(2, round(2.5 * (wanted - 0.25)))
    limit = max_characters(seconds[1])
    for _ in range(MAX_TRIES):
        sentence = grammar.sentence(num_words)
        if sentence in said or len(sentence) > limit:
            num_words = max(2, num_words - (len(sentence) > limit))
            continue
        samples = speak(sentence, voice)
        length = len(samples) / SAMPLE_RATE
        if seconds[0] <= length <= seconds[1]:
            return sentence, samples
        num_words = max(2, num_words + (1 if length < seconds[0] else -1))
    raise ValueError(
        f"--seconds {seconds[0]:g} {seconds[1]:g}: no further sentence that takes so long and has {limit} characters "
        "at most is found, widen it"
    )


def encode(samples: np.ndarray) -> bytes:
    """FLAC, 16 bits, of float samples at 16 kHz."""
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


# ------------------------------------------------------------------------------------------------
# Command line


def main(argv=None) -> int:
    """Exit status: 0, 2 after a mistake."""
    parser = Parser(prog="python -m rnnt.make_corpus", description="Make a corpus of speech with espeak-ng.")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--utterances", type=int, default=60, metavar="N", help="how many (60)")
    parser.add_argument(
        "--seconds", type=float, nargs=2, default=(1.0, 8.0), metavar=("MIN", "MAX"), help="their lengths (1 8)"
    )
    parser.add_argument("--voices", nargs="+", default=list(VOICES), metavar="V", help=f"({' '.join(VOICES)})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="same seed, same corpus (0)")
    args = parser.parse_args(argv)
    if args.utterances < 1:
        parser.error(f"--utterances {args.utterances}: takes a number from 1 up")
    if not 0.5 <= args.seconds[0] < args.seconds[1] <= 60:
        parser.error(f"--seconds {args.seconds[0]} {args.seconds[1]}: takes two numbers from 0.5 to 60, MIN below MAX")
    if args.seed < 0:
        parser.error(f"--seed {args.seed}: takes a number from 0 up")
    if not shutil.which("espeak-ng"):
        parser.error("espeak-ng is not installed (Debian: apt install espeak-ng)")
    try:
        import soundfile  # noqa: F401
    except ImportError:
        parser.error("soundfile is not installed: ./setup.sh speech")
    voices = args.voices[: args.utterances]
    try:
        num_bytes, longest = write(Path(args.out), args.utterances, tuple(args.seconds), voices, args.seed)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(
        f"{args.out}: {args.utterances} utterances, {len(voices)} voices, {num_bytes / 1e6:.2f} MB, transcripts of up "
        f"to {longest} characters (see --max-tokens of rnnt.train)"
    )
    return 0


if __name__ == "__main__":
    with mistakes_in_one_line("rnnt", "make_corpus"):
        status = main()
    sys.exit(status)
