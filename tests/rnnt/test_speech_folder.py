"""rnnt/speech/folder: which utterances of a folder can be trained on, and why the others cannot."""

import math

import numpy as np
import pytest

from rnnt.speech import folder as speech_folder
from rnnt.speech import transcripts
from tests.helpers.speech_files import encode, tone, write_speech

soundfile = pytest.importorskip("soundfile", reason="soundfile is not installed: ./setup.sh speech")


def scan(folder, max_frames=641, max_tokens=125, perturbed=True):
    return speech_folder.Corpus(folder, transcripts.Chars(), max_frames, max_tokens, perturbed)


def reasons(found):
    return {one.name: one.reason for one in found.dropped}


def test_utterances_have_their_own_transcripts(tmp_path):
    write_speech(tmp_path, [(1.0, "FIRST ONE"), (1.5, "SECOND ONE")])
    write_speech(tmp_path, [(2.0, "OTHER  SPEAKER")], speaker="2")
    found = scan(tmp_path)
    assert [(one.name, one.num_samples, one.text) for one in found.utterances] == [
        ("1/7/1-7-0000", 16000, "first one"),
        ("1/7/1-7-0001", 24000, "second one"),
        ("2/7/2-7-0000", 32000, "other speaker"),
    ]
    assert transcripts.Chars().decode(found.utterances[0].tokens) == "first one"


def test_links_are_followed_and_no_folder_read_twice(tmp_path):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "speech"
    write_speech(elsewhere, [(1.0, "FIRST ONE")])
    write_speech(folder, [(1.5, "SECOND ONE")], speaker="2")
    (folder / "linked").symlink_to(elsewhere)
    (folder / "2" / "up").symlink_to(folder)
    (folder / "same").symlink_to(elsewhere)
    found = scan(folder)
    assert [one.text for one in found.utterances] == ["second one", "first one"]
    assert {drop.name for drop in found.dropped} == {"2/up", "same"}


def test_flat_folder_and_wav(tmp_path):
    (tmp_path / "a.wav").write_bytes(encode(tone(1.0), kind="WAV"))
    (tmp_path / "b.FLAC").write_bytes(encode(tone(2.0)))
    (tmp_path / "all.trans.txt").write_text("a hello\nb there\n")
    found = scan(tmp_path)
    assert [(one.name, one.num_samples, one.text) for one in found.utterances] == [
        ("a", 16000, "hello"),
        ("b", 32000, "there"),
    ]


@pytest.mark.parametrize("kind", ["FLAC", "WAV"])
@pytest.mark.parametrize(("channels", "rate", "num_samples"), [(1, 16000, 12345), (2, 44100, 54321), (1, 8000, 1)])
def test_headers_tell_what_libsndfile_does(tmp_path, kind, channels, rate, num_samples):
    path = tmp_path / "x"
    path.write_bytes(encode(np.random.default_rng(0).uniform(-0.5, 0.5, (num_samples, channels)), rate, kind))
    known = soundfile.info(str(path))
    assert speech_folder.read_header(path) == (known.frames, known.samplerate) == (num_samples, rate)


def wav_with_a_chunk_before_its_data():
    content = encode(tone(1.0), kind="WAV")
    place = content.index(b"data")
    return content[:place] + b"LIST" + (3).to_bytes(4, "little") + b"abc\0" + content[place:]


def test_wav_chunks_before_the_data_are_passed_over(tmp_path):
    path = tmp_path / "x.wav"
    path.write_bytes(wav_with_a_chunk_before_its_data())
    assert speech_folder.read_header(path) == (16000, 16000)


def test_each_fault_is_named_and_the_rest_trained_on(tmp_path):
    wav = encode(tone(1.0), kind="WAV")
    write_speech(
        tmp_path,
        [
            (1.0, "good one"),
            (1.0, None),
            (1.0, ""),
            (1.0, "number 7"),
            (b"", "empty file"),
            (b"fLaC" + bytes(8), "damaged header"),
            (b"this is text, not audio", "no audio"),
            (wav[: len(wav) // 2], "half of it"),
            (encode(np.zeros(0), kind="WAV"), "nothing in it"),
            (0.05, "a click"),
            (3.0, "too long"),
            (1.0, "x" * 21),
            (2.0, "good two"),
            (3.0, "x" * 22),
            (0.1, "a dozen tokens"),
        ],
    )
    place = tmp_path / "1" / "7"
    with open(place / "1-7.trans.txt", "a") as file:
        file.write("1-7-0099 no audio\n")
    found = scan(tmp_path, max_frames=80, max_tokens=20)
    assert [one.text for one in found.utterances] == ["good one", "good two"]
    expected = {
        1: "no transcript",
        2: "empty transcript",
        3: "characters outside the vocabulary: '7'",
        4: "empty file",
        5: "damaged FLAC header",
        6: "neither FLAC nor WAV",
        7: "cut off, 16,022 bytes are missing",
        8: "no samples in it",
        9: "0.050 s of audio, less than 0.1 s",
        10: "3.0 s resampled by up to 1.15 are 116 frames of 30 ms and 80 fit: raise --max-frames",
        11: "21 tokens and 20 fit: raise --max-tokens",
        13: "3.0 s resampled by up to 1.15 are 116 frames of 30 ms and 80 fit: raise --max-frames",
        14: "14 tokens in 11 frames of 10 ms",
        99: "a transcript and no audio",
    }
    seen = reasons(found)
    assert seen.keys() == {f"1/7/1-7-{number:04d}" for number in expected}
    for number, reason in expected.items():
        assert reason in seen[f"1/7/1-7-{number:04d}"]


def test_two_recordings_or_two_transcripts_are_no_pair(tmp_path):
    write_speech(tmp_path, [(1.0, "one"), (1.0, "two"), (1.0, "three")])
    place = tmp_path / "1" / "7"
    (place / "1-7-0000.wav").write_bytes(encode(tone(1.0), kind="WAV"))
    (place / "more.trans.txt").write_text("1-7-0001 something else\n")
    found = scan(tmp_path)
    assert [one.text for one in found.utterances] == ["three"]
    assert reasons(found)["1/7/1-7-0000"] == "two recordings: 1-7-0000.flac and 1-7-0000.wav"
    assert reasons(found)["1/7/1-7-0001"] == "has two transcripts"


def test_other_sample_rates_are_told(tmp_path):
    write_speech(tmp_path, [(1.0, "one"), (encode(tone(1.0, rate=8000), 8000), "two")])
    found = scan(tmp_path)
    assert [(one.text, one.num_samples, one.sample_rate) for one in found.utterances] == [
        ("one", 16000, 16000),
        ("two", 8000, 8000),
    ]


def test_longest_utterance_is_that_of_the_benchmark(tmp_path):
    # 16.7 s are 1671 frames of 10 ms; the benchmark's bucket of 641 frames holds them slowed down by 1.15.
    write_speech(tmp_path, [(encode(np.full(267200, 0.1)), "fits"), (encode(np.full(267200 + 500, 0.1)), "does not")])
    assert [one.text for one in scan(tmp_path, 641).utterances] == ["fits"]
    assert len(scan(tmp_path, 641, perturbed=False).utterances) == 2


@pytest.mark.parametrize("scale", [1.0, 0.85, 1.15, 1.1234, 16000 / 44100])
def test_resampled_length_is_rounded_up(scale):
    for num_samples in (1, 999, 16000, 267200):
        assert speech_folder.resampled(num_samples, scale) == math.ceil(num_samples * float(np.float32(scale)))


def test_folders_without_speech_name_the_flag(tmp_path):
    with pytest.raises(ValueError, match="--data .*nowhere: no such folder"):
        scan(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--data .*file: not a folder"):
        scan(tmp_path / "file")
    with pytest.raises(ValueError, match=r"no audio \(\*.flac, \*.wav\) in it"):
        scan(tmp_path)


def test_nothing_left_names_the_flag_to_raise(tmp_path):
    write_speech(tmp_path, [(2.0, "too long"), (0.2, "too many tokens")])
    none = "none of 2 utterances can be trained on; the first is 1/7/1-7-0000: "
    with pytest.raises(ValueError, match=f"{none}.* raise --max-frames$"):
        scan(tmp_path, max_frames=20, max_tokens=5)
    with pytest.raises(ValueError, match=f"{none}8 tokens and 5 fit: raise --max-tokens$"):
        scan(tmp_path, max_tokens=5)


def test_transcripts_may_have_tabs_and_a_byte_order_mark(tmp_path):
    write_speech(tmp_path, [(1.0, None), (1.0, None), (1.0, None)])
    content = "\ufeff1-7-0000\tFIRST ONE\r\n\r\n  1-7-0001 \t second one\n1-7-0002\n"
    (tmp_path / "1/7/1-7.trans.txt").write_bytes(content.encode())
    found = scan(tmp_path)
    assert [one.text for one in found.utterances] == ["first one", "second one"]
    assert reasons(found) == {"1/7/1-7-0002": "empty transcript"}
