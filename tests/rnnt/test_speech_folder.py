"""rnnt/speech/folder: which utterances of a folder can be trained on, and why the others cannot."""

import os

import numpy as np
import pytest

pytest.importorskip("soundfile", reason="soundfile is not installed: ./setup.sh speech")

from rnnt.config import Config
from rnnt.speech import folder as speech_folder
from tests.helpers.speech_files import encode, tone, write_speech


def scan(folder, **fields):
    speech_folder.scan.cache_clear()
    return speech_folder.scan(Config(data=str(folder), **fields))


def test_utterances_have_their_own_transcripts(tmp_path):
    write_speech(tmp_path, [(1.0, "FIRST ONE"), (1.5, "SECOND ONE")])
    write_speech(tmp_path, [(2.0, "OTHER  SPEAKER")], speaker="2")
    (tmp_path / "flat.FLAC").write_bytes(encode(tone(0.5)))
    (tmp_path / "all.trans.txt").write_bytes(b"\xef\xbb\xbfflat\tHELLO\r\n\n../1/7/1-7-0000 not here\n")
    utterances, dropped = scan(tmp_path)
    assert [(os.path.relpath(one.path, tmp_path), one.num_samples, one.text) for one in utterances] == [
        ("1/7/1-7-0000.flac", 16000, "first one"),
        ("1/7/1-7-0001.flac", 24000, "second one"),
        ("2/7/2-7-0000.flac", 32000, "other speaker"),
        ("flat.FLAC", 8000, "hello"),
    ]
    assert not dropped and utterances[3].tokens == (8, 5, 12, 12, 15)


def test_each_fault_is_named_and_the_rest_trained_on(tmp_path):
    unknown_length = bytearray(encode(tone(1.0)))
    unknown_length[21] &= 0xF0
    unknown_length[22:26] = bytes(4)
    said = [
        (1.0, "good one"),
        (1.0, None),
        (1.0, ""),
        (1.0, "number 7"),
        (b"", "empty file"),
        (b"fLaC" + bytes(8), "damaged header"),
        (bytes(unknown_length), "no length"),
        (encode(tone(1.0, rate=8000), 8000), "other rate"),
        (0.05, "a click"),
        (3.0, "too long"),
        (1.0, "x" * 21),
        (2.0, "good two"),
    ]
    place = write_speech(tmp_path, said) / "1" / "7"
    os.mkfifo(place / "pipe.flac")
    (place / "1-7.trans.txt").open("a").write("pipe a pipe\n")
    (place / "bad.trans.txt").write_bytes(b"\xff")
    utterances, dropped = scan(tmp_path, max_frames=80, max_tokens=20)
    assert [one.text for one in utterances] == ["good one", "good two"]
    reasons = dict(reason.removeprefix("1/7/").removeprefix("1-7-").split(": ", 1) for reason in dropped)
    expected = {
        "0001.flac": "no transcript",
        "0002.flac": "no transcript",
        "0003.flac": "characters outside the vocabulary: '7'",
        "0004.flac": "cannot be read: ",
        "0005.flac": "cannot be read: ",
        "0006.flac": "s of audio, takes 0.1 s and more",
        "0007.flac": "8000 Hz, speech takes 16000: resample it",
        "0008.flac": "0.05 s of audio, takes 0.1 s and more",
        "0009.flac": "up to 116 frames of 30 ms, 80 fit: raise --max-frames",
        "0010.flac": "21 tokens, 20 fit: raise --max-tokens",
        "pipe.flac": "not a regular file",
        "bad.trans.txt": "cannot be read: ",
    }
    assert reasons.keys() == expected.keys()
    assert all(part in reasons[name] for name, part in expected.items()), reasons


def test_longest_utterance_is_that_of_the_benchmark(tmp_path):
    # 16.7 s are 1671 frames of 10 ms; the benchmark's bucket of 641 frames holds them slowed down by 1.15.
    write_speech(tmp_path, [(encode(np.full(267200, 0.1)), "fits"), (encode(np.full(267200 + 500, 0.1)), "does not")])
    assert [one.text for one in scan(tmp_path)[0]] == ["fits"]
    assert len(scan(tmp_path, speed_perturbation=False)[0]) == 2


def test_folders_without_speech_name_the_flag(tmp_path):
    with pytest.raises(ValueError, match="--data .*nowhere: no such folder"):
        scan(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--data .*file: not a folder"):
        scan(tmp_path / "file")
    with pytest.raises(ValueError, match=r"--data .*: no \*.flac with a \*.trans.txt"):
        scan(tmp_path)
    write_speech(tmp_path, [(2.0, "too long")])
    with pytest.raises(ValueError, match="none can be trained on, the first is 1/7/1-7-0000.flac: .* --max-frames"):
        scan(tmp_path, max_frames=20)
