"""rnnt/make_corpus: sentences, layout and mistakes, with a stand-in for espeak-ng; and the real one where it is."""

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rnnt import make_corpus, speech_folder, transcripts

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: ./setup.sh speech")

ROOT = Path(__file__).resolve().parent.parent
# Speaks 60 ms a character, at a pitch of the voice's, with the header that espeak-ng writes into a pipe.
FAKE = """#!{python}
import math, struct, sys
voice, sentence = sys.argv[2], sys.argv[-1]
if voice == "nobody":
    sys.exit("Error: The specified espeak-ng voice does not exist.")
count = int(22050 * 0.06 * len(sentence))
pitch = 150 + 20 * len(voice)
samples = [int(9000 * math.sin(2 * math.pi * pitch * k / 22050)) for k in range(count)]
head = b"RIFF" + b"\\xff\\xff\\xff\\x7f" + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 22050, 44100, 2, 16)
sys.stdout.buffer.write(head + b"data" + b"\\xff\\xff\\xff\\x7f" + struct.pack(f"<{{count}}h", *samples))
"""


@pytest.fixture
def fake_espeak(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "espeak-ng"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return path


def make(folder, *arguments):
    return make_corpus.main(["--out", str(folder), *arguments])


def test_corpus_can_be_read_and_is_what_was_asked_for(fake_espeak, tmp_path, capsys):
    folder = tmp_path / "out"
    assert make(folder, "--utterances", "7", "--seconds", "1", "3", "--voices", "a", "bcd") == 0
    assert "7 utterances, 2 voices" in capsys.readouterr().out
    found = speech_folder.Corpus(folder, transcripts.Chars(), 641, 125, True)
    assert len(found.utterances) == 7 and not found.dropped and not found.resampled
    assert [one.name for one in found.utterances][-1] == "102/1/102-1-0002"
    assert len({one.text for one in found.utterances}) == 7
    for one in found.utterances:
        # As long as its own sentence is spoken.
        assert one.num_samples == round(int(22050 * 0.06 * len(one.text)) * 16000 / 22050)
        assert 1 <= one.num_samples / 16000 <= 3
        samples, _ = soundfile.read(one.path)
        assert np.abs(samples).max() == pytest.approx(make_corpus.PEAK, rel=0.02)
        pitch = np.abs(np.fft.rfft(samples[:16000])).argmax()
        assert pitch == pytest.approx(170 if one.name.startswith("101") else 210, abs=2)


def test_no_sentence_comes_twice(fake_espeak, tmp_path):
    make(tmp_path / "out", "--utterances", "20", "--seconds", "0.9", "1.1", "--voices", "a")
    found = speech_folder.Corpus(tmp_path / "out", transcripts.Chars(), 641, 125, True)
    assert len({one.text for one in found.utterances}) == 20


def test_same_seed_makes_the_same_corpus(fake_espeak, tmp_path):
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        make(tmp_path / name, "--utterances", "4", "--seed", seed)
    contents = [
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}
        for name in "abc"
    ]
    assert contents[0] == contents[1] != contents[2]


def test_sentences_are_simple_and_long_enough():
    grammar = make_corpus.Grammar(np.random.default_rng(0))
    known = {word for words in make_corpus.WORDS.values() for word in words}
    known |= {word for answer in make_corpus.ANSWERS for word in answer.split()} | {"the", "in"}
    tokenizer = transcripts.Chars()
    for wanted in range(2, 25):
        words = grammar.sentence(wanted).split()
        assert wanted <= len(words) <= wanted + 9
        assert set(words) <= known
        tokenizer.encode(" ".join(words))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--utterances", "0"], "--utterances 0: takes a number from 1 up"),
        (["--seconds", "3", "2"], "--seconds 3.0 2.0: takes two numbers"),
        (["--seconds", "1", "nan"], "--seconds 1.0 nan: takes two numbers"),
        (["--seed", "-1"], "--seed -1: takes a number from 0 up"),
        (["--voices", "nobody"], "--voices nobody: espeak-ng: Error: The specified"),
        (["--seconds", "7.5", "8"], "--seconds 7.5 8: no further sentence that takes so long and has 120 characters"),
    ],
)
def test_mistakes_are_one_line_and_exit_status_two(fake_espeak, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(make_corpus, "MAX_TRIES", 5)
    with pytest.raises(SystemExit) as stopped:
        make(tmp_path / "out", *arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and message in said and said.count("\n") == 1
    # Nothing is left of what was begun.
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_voices_are_tried_before_anything_is_made(fake_espeak, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_corpus, "_write", None)
    with pytest.raises(SystemExit):
        make(tmp_path / "out", "--voices", "a", "nobody")
    assert "--voices nobody: " in capsys.readouterr().err


def test_only_voices_that_speak_are_counted(fake_espeak, tmp_path, capsys):
    # The fourth is not known, and not needed.
    make(tmp_path / "out", "--utterances", "2", "--voices", "a", "bcd", "efghi", "nobody")
    assert "2 utterances, 2 voices" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["101", "102"]


def test_longer_recordings_may_say_more(fake_espeak, tmp_path, capsys):
    # 12 s are 200 characters of the stand-in.
    make(tmp_path / "out", "--utterances", "1", "--seconds", "10", "12", "--voices", "a")
    (one,) = speech_folder.Corpus(tmp_path / "out", transcripts.Chars(), 641, 250, True).utterances
    assert len(one.text) > 160 and f"up to {len(one.text)} characters" in capsys.readouterr().out
    assert make_corpus.max_characters(8.0) == make_corpus.max_characters(2.0) == 120


def test_folder_with_recordings_is_left_alone(fake_espeak, tmp_path, capsys):
    make(tmp_path / "out", "--utterances", "1")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    with pytest.raises(SystemExit):
        make(tmp_path / "out", "--utterances", "2", "--seed", "3")
    assert "not empty, name another folder" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}


def test_without_espeak_one_line_says_how_to_get_it(tmp_path):
    command = [sys.executable, "-m", "rnnt.make_corpus", "--out", str(tmp_path / "out")]
    answer = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert answer.returncode == 2
    assert answer.stderr.endswith("espeak-ng is not installed (Debian: apt install espeak-ng)\n")
    assert answer.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="no espeak-ng here (Debian: apt install espeak-ng)")
def test_espeak_says_the_repositorys_corpus(tmp_path):
    make(tmp_path, "--utterances", "6")
    for path in sorted(tmp_path.rglob("*.trans.txt")):
        known = (speech_folder.REPOSITORY / path.relative_to(tmp_path)).read_text()
        assert known.startswith(path.read_text())
    # Other versions may speak a little differently.
    for path in tmp_path.rglob("*.flac"):
        ours, theirs = (
            soundfile.info(str(place)).frames for place in (path, speech_folder.REPOSITORY / path.relative_to(tmp_path))
        )
        assert ours == pytest.approx(theirs, rel=0.1)


def test_wav_of_a_pipe_is_read_to_its_end():
    samples = np.arange(-50, 50, dtype="<i2")
    head = b"RIFF\xff\xff\xff\x7fWAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 22050, 44100, 2, 16)
    read, rate = make_corpus._read_wav(head + b"data\xff\xff\xff\x7f" + samples.tobytes() + b"\0")
    assert rate == 22050 and np.array_equal(read, samples)
