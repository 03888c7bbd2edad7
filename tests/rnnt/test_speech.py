"""rnnt/speech/source: the sequence of batches of speech, what is dropped on the way, and that no pair is ever wrong."""

import concurrent.futures
import importlib.util
import sys
import threading
import time

import numpy as np
import pytest
import torch

from rnnt.config import Config
from rnnt.speech import source as speech
from rnnt.speech import transcripts
from tests.helpers.speech_files import encode, encode_float, tone, write_speech

CPU = torch.device("cpu")
# Every other utterance is longer, so that a batch has padding.
NUM = 11
AUDIO = [
    "torch",
    pytest.param(
        "dali",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None,
            reason="nvidia-dali is not installed: ./setup.sh dali",
        ),
    ),
]


def transcript(number):
    """A different one for each utterance, and of a different length."""
    return "abcdefghijk"[number] * (number + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eleven utterances; number i says its letter i + 1 times and lasts 0.3 + 0.06 i seconds."""
    said = [(0.3 + 0.06 * number, transcript(number)) for number in range(NUM)]
    return write_speech(tmp_path_factory.mktemp("speech"), said)


@pytest.fixture
def opened():
    """opened(folder, ...) opens a source, which is closed after the test."""
    sources = []

    def open_one(folder, rank=0, world_size=1, seed=1, training=True, dtype=torch.float32, device=CPU, **fields):
        fields = {"batch": 2, "audio": "torch", "workers": 1, **fields}
        config = Config(data=str(folder), **fields)
        sources.append(speech.open_speech(config, device, rank, world_size, dtype, seed, training))
        return sources[-1]

    yield open_one
    for source in sources:
        source.close()


def spoken(batch):
    """The transcripts of a batch, from its tokens."""
    rows = zip(batch.tokens, batch.token_lengths.tolist(), strict=True)
    return [transcripts.Chars().decode(row[:length].tolist()) for row, length in rows]


def numbers(batch):
    return [len(said) - 1 for said in spoken(batch)]


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


# ------------------------------------------------------------------------------------------------
# One batch


@pytest.mark.parametrize("audio", AUDIO)
def test_batch_has_the_shapes_that_a_step_takes(opened, folder, audio):
    source = opened(folder, audio=audio, dtype=torch.bfloat16)
    for _ in range(3):
        batch = source.next()
        frames, tokens = len(batch.features), batch.tokens.shape[1]
        assert batch.features.shape == (frames, 2, 256) and batch.features.dtype == torch.bfloat16
        assert batch.tokens.dtype == torch.int64 and batch.feature_lengths.dtype == torch.int32
        assert batch.token_lengths.dtype == torch.int32
        assert frames == batch.feature_lengths.max() <= source.max_frames
        assert tokens == batch.token_lengths.max() <= source.max_tokens
        assert source.texts == spoken(batch)
        for row in range(2):
            assert not batch.features[batch.feature_lengths[row] :, row].any()
            assert not batch.tokens[row, batch.token_lengths[row] :].any()
            # All of it but what SpecAugment masks.
            said = batch.features[: batch.feature_lengths[row], row, :240]
            assert (said != 0).float().mean() > 0.3


@pytest.mark.parametrize("audio", AUDIO)
def test_audio_stays_with_its_transcript(opened, folder, audio):
    """Unchanged speech of utterance i is 1 + (4800 + 960 i) / 160 frames of 10 ms long."""
    source = opened(folder, audio=audio, training=False)
    seen = set()
    for _ in range(source.num_batches):
        batch = source.next()
        for number, frames in zip(numbers(batch), batch.feature_lengths.tolist(), strict=True):
            assert frames == -(-(31 + 6 * number) // 3)
            seen.add(number)
    assert seen == set(range(NUM))


def test_both_kinds_of_audio_make_the_same_batches(opened, folder):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed: ./setup.sh dali")
    by_dali, by_torch = opened(folder, audio="dali"), opened(folder, audio="torch")
    for _ in range(3):
        first, second = by_dali.next(), by_torch.next()
        assert equal(first[1:], second[1:])
        assert (first.features - second.features).abs().max() < 0.05
        assert torch.equal(first.features == 0, second.features == 0)


# ------------------------------------------------------------------------------------------------
# The sequence


@pytest.mark.parametrize("audio", AUDIO)
def test_reset_gives_the_same_batches_bit_for_bit(opened, folder, audio):
    source = opened(folder, audio=audio)
    first = [source.next() for _ in range(8)]
    source.reset()
    again = [source.next() for _ in range(8)]
    assert all(equal(*pair) for pair in zip(first, again, strict=True))
    other = opened(folder, audio=audio)
    assert all(equal(batch, other.next()) for batch in first)


def test_epochs_are_shuffled_and_leave_out_what_does_not_fill_a_step(opened, folder):
    source = opened(folder)
    assert source.num_samples == NUM and source.num_batches == 5
    epochs = [[number for _ in range(5) for number in numbers(source.next())] for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == 10 == len(set(epoch))
    assert epochs[0] != epochs[1] != epochs[2]
    assert [numbers(opened(folder, seed=seed).next()) for seed in range(2, 6)] != [epochs[0][:2]] * 4


def test_ranks_share_an_epoch(opened, folder):
    sources = [opened(folder, rank=rank, world_size=2) for rank in range(2)]
    epoch = [number for _ in range(2) for source in sources for number in numbers(source.next())]
    assert len(epoch) == 8 == len(set(epoch))
    # Draws are each rank's own.
    alone = opened(folder)
    assert numbers(alone.make(0)[0]) == numbers(sources[0].make(0)[0])
    assert [source.num_batches for source in sources] == [2, 2]


def test_draws_change_from_batch_to_batch(opened, folder):
    source = opened(folder, batch=11)
    first, second = source.next(), source.next()
    speeds = []
    for batch in (first, second):
        own = torch.tensor([(31 + 6 * number) / 3 for number in numbers(batch)])
        assert ((0.85 * own - 1 <= batch.feature_lengths) & (batch.feature_lengths <= 1.15 * own + 1)).all()
        speeds.append(batch.feature_lengths / own)
    assert (speeds[0] - speeds[1]).abs().max() > 0.05


def test_without_speed_perturbation_lengths_stay(opened, folder):
    source = opened(folder, batch=11, speed_perturbation=False)
    batch = source.next()
    for number, frames in zip(numbers(batch), batch.feature_lengths.tolist(), strict=True):
        assert frames == -(-(31 + 6 * number) // 3)
    assert source.max_frames == max(batch.feature_lengths)


def test_without_spec_augment_nothing_is_masked(opened, folder):
    """A whole mel band of zeros is a mask: speech changes in each."""

    def num_masked(**fields):
        batch = opened(folder, batch=11, **fields).next()
        silent = batch.features[..., :80].eq(0).all(0)
        return int(silent.any(1).sum())

    assert num_masked() > 0
    assert num_masked(spec_augment=False) == 0


def test_evaluation_keeps_what_training_keeps(opened, folder):
    # The longest is 0.9 s: 31 frames of 30 ms, 35 slowed down by 1.15.
    assert [opened(folder, max_frames=34, training=training).num_samples for training in (True, False)] == [10, 10]
    assert opened(folder, max_frames=34, speed_perturbation=False).num_samples == 11


def test_evaluation_is_in_order_unmasked_and_complete(opened, folder):
    source = opened(folder, batch=4, training=False)
    assert source.num_batches == 3
    texts = []
    for _ in range(3):
        batch = source.next()
        assert batch.tokens.shape[0] == 4
        assert spoken(batch)[: len(source.texts)] == source.texts
        texts.append(source.texts)
        for row in range(4):
            assert (batch.features[: batch.feature_lengths[row] - 1, row, :240] != 0).all()
    assert [len(said) for said in texts] == [4, 4, 3]
    assert [said for batch in texts for said in batch] == [transcript(number) for number in range(NUM)]
    # Another pass, whatever the seed.
    first = source.next()
    assert equal(first, opened(folder, batch=4, training=False, seed=9).next())


@pytest.mark.parametrize("audio", AUDIO)
def test_evaluation_hears_silence_as_training_does(opened, tmp_path, audio):
    """Digital zeros between words: without dither their logarithm would lie far below all that was trained on."""
    sound = 0.1 * tone(1.0)
    sound[6000:10000] = 0
    write_speech(tmp_path, [(encode(sound), "a")])
    fields = {"batch": 1, "audio": audio, "speed_perturbation": False, "spec_augment": False}
    trained = opened(tmp_path, **fields).next()
    evaluated = opened(tmp_path, training=False, **fields).next()
    assert trained.feature_lengths.tolist() == evaluated.feature_lengths.tolist()
    # Of features with variance 1.
    assert float((trained.features - evaluated.features)[..., :240].square().mean().sqrt()) < 0.3


def test_evaluation_of_ranks_is_each_utterance_once(opened, folder):
    said = []
    for rank in range(2):
        source = opened(folder, batch=4, rank=rank, world_size=2, training=False)
        for _ in range(source.num_batches):
            source.next()
            said += source.texts
    assert sorted(said) == sorted(transcript(number) for number in range(NUM))


def test_batches_are_made_ahead(opened, folder):
    source = opened(folder)
    source.next()
    assert len(concurrent.futures.wait(source._pending, timeout=10).done) == speech.AHEAD


def test_close_ends_the_thread(opened, folder):
    before = threading.active_count()
    source = opened(folder, workers=2)
    source.next()
    assert threading.active_count() > before
    source.close()
    source.close()
    # The threads that decode end with the extractor.
    assert threading.active_count() <= before + 2


@pytest.mark.gpu
@pytest.mark.parametrize("audio", AUDIO)
def test_batches_on_a_gpu_are_those_of_the_cpu(opened, folder, audio):
    source = opened(folder, audio=audio, device=torch.device("cuda", 0))
    reference = opened(folder, audio=audio)
    first = [source.next() for _ in range(4)]
    for batch in first:
        expected = reference.next()
        assert batch.features.is_cuda and not any(tensor.is_cuda for tensor in batch[1:])
        assert all(tensor.is_pinned() for tensor in batch[1:]) and equal(batch[1:], expected[1:])
        assert (batch.features.cpu() - expected.features).abs().max() < 0.05
    source.reset()
    assert all(equal(batch, source.next()) for batch in first)


@pytest.mark.gpu
@pytest.mark.parametrize("audio", AUDIO)
def test_graphs_can_be_captured_while_batches_are_made(opened, folder, audio):
    source = opened(folder, audio=audio, batch=8, device=torch.device("cuda", 0))
    x = torch.ones(1000, device="cuda")
    for _ in range(20):
        source.next()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = x * 2
            time.sleep(0.02)
        graph.replay()
        assert y.sum().item() == 2000


# ------------------------------------------------------------------------------------------------
# What cannot be trained on


def damaged(seconds):
    content = bytearray(encode(tone(seconds)))
    middle = len(content) // 2
    content[middle : middle + 60] = bytes(60)
    return bytes(content)


@pytest.fixture
def with_bad(tmp_path):
    """The folder of eleven with four that only decoding shows to be bad: 1, 4, 6 and 9."""
    said = [(0.3 + 0.06 * number, transcript(number)) for number in range(NUM)]
    said[1] = damaged(0.4), transcript(1)
    said[4] = encode(np.zeros(8000)), transcript(4)
    said[6] = encode(tone(0.7))[:4000], transcript(6)
    said[9] = encode(np.full(8000, 0.3)), transcript(9)
    return write_speech(tmp_path, said)


@pytest.mark.parametrize("audio", AUDIO)
@pytest.mark.parametrize("training", [True, False])
def test_bad_files_are_named_counted_and_never_seen(opened, with_bad, audio, training, capsys):
    source = opened(with_bad, audio=audio, batch=4, training=training, speed_perturbation=False)
    for _ in range(6):
        batch = source.next()
        assert batch.tokens.shape[0] == 4
        for number, frames in zip(numbers(batch), batch.feature_lengths.tolist(), strict=True):
            assert number not in (1, 4, 6, 9)
            assert frames == -(-(31 + 6 * number) // 3)
        assert not {transcript(number) for number in (1, 4, 6, 9)} & set(source.texts)
    assert source.num_samples == 7
    reasons = {one.name: one.reason for one in source.dropped}
    assert reasons.keys() == {f"1/7/1-7-{number:04d}" for number in (1, 4, 6, 9)}
    assert reasons["1/7/1-7-0004"] == reasons["1/7/1-7-0009"] == "nothing but silence"
    assert reasons["1/7/1-7-0001"].startswith("cannot be decoded: ")
    assert reasons["1/7/1-7-0006"].startswith("cannot be decoded: ")
    assert capsys.readouterr().err.count("data: dropped 1/7/1-7-000") == 4


def replaced(seconds, place, value):
    """A WAV of floats, some of which are replaced."""
    samples = tone(seconds)
    samples[place] = value
    return encode_float(samples)


@pytest.mark.parametrize("audio", AUDIO)
def test_absurd_samples_are_named_and_never_seen(opened, tmp_path, audio):
    absurd = {
        1: (slice(0, 1), np.nan),
        2: (slice(4000, 4001), np.nan),
        3: (slice(-1, None), np.nan),
        4: (slice(None), np.nan),
        5: (slice(4000, 4001), -np.inf),
        6: (slice(None), np.inf),
        7: (slice(4000, 4010), 1e30),
        8: (slice(4000, 4001), -8.5),
    }
    said = [(replaced(0.5, *absurd[number]) if number in absurd else 0.5, transcript(number)) for number in range(10)]
    # Beyond full scale, and yet sound.
    said[9] = replaced(0.5, slice(4000, 4001), 7.5), transcript(9)
    source = opened(write_speech(tmp_path, said), audio=audio)
    for _ in range(8):
        batch = source.next()
        assert sorted(numbers(batch)) == [0, 9] and batch.features.isfinite().all()
    reasons = {one.name: one.reason for one in source.dropped}
    assert reasons.keys() == {f"1/7/1-7-{number:04d}" for number in absurd}
    assert all("full scale is 1" in reason for reason in reasons.values())
    assert all("nan" in reasons[f"1/7/1-7-{number:04d}"] for number in (1, 2, 3, 4))
    assert reasons["1/7/1-7-0008"].startswith("samples from -8.5 to ")


def click(seconds):
    """Silence but for ten samples."""
    samples = np.zeros(round(16000 * seconds))
    samples[len(samples) // 2 :][:10] = 0.5
    return encode(samples)


@pytest.mark.parametrize("audio", AUDIO)
def test_clicks_in_silence_are_no_speech(opened, tmp_path, audio):
    quiet = np.concatenate((np.zeros(16000), tone(0.6), np.zeros(16000)))
    said = [(0.5, "one"), (click(8), "two"), (click(1.3), "a" * 100), (encode(quiet), "four"), (click(1.3), "five")]
    source = opened(write_speech(tmp_path, said), audio=audio, training=False, batch=5)
    first = source.next()
    assert source.texts == ["one", "four", "five"]
    reasons = {one.name: one.reason for one in source.dropped}
    assert reasons.keys() == {"1/7/1-7-0001", "1/7/1-7-0002"}
    assert reasons["1/7/1-7-0001"].endswith(" of 8.01 s are left without silence")
    assert reasons["1/7/1-7-0002"].startswith("100 tokens in ")
    source.reset()
    assert equal(first, source.next())


def test_evaluation_says_nothing_again(opened, with_bad, capsys):
    with open(with_bad / "1/7/1-7.trans.txt", "a") as file:
        file.write("1-7-0099 no audio\n")
    for training in (True, False):
        source = opened(with_bad, training=training)
        for _ in range(6):
            source.next()
        assert len(source.dropped) == 5
    said = capsys.readouterr().err
    assert said.count("dropped") == 5 and said.count("1-7-0099") == said.count("1-7-0006") == 1


def test_evaluation_takes_what_training_has_scanned(opened, folder, monkeypatch):
    opened(folder, batch=3)
    monkeypatch.setattr(speech, "Corpus", None)
    assert opened(folder, batch=3, training=False).num_samples == NUM


def test_sequence_with_bad_files_depends_on_the_files_alone(opened, with_bad):
    source = opened(with_bad)
    first = [source.next() for _ in range(8)]
    source.reset()
    # All bad ones are known by now.
    assert all(equal(batch, source.next()) for batch in first)
    # Asked for first, batch 3 is the same.
    assert equal(opened(with_bad).make(3)[0], first[3])


def test_evaluation_with_bad_files_says_each_good_one_once(opened, with_bad):
    source = opened(with_bad, batch=4, training=False)
    said = []
    for _ in range(source.num_batches):
        source.next()
        said += source.texts
    assert said == [transcript(number) for number in range(NUM) if number not in (1, 4, 6, 9)]


def test_file_that_vanishes_is_dropped(opened, tmp_path):
    write_speech(tmp_path, [(0.4, "one"), (0.4, "two"), (0.4, "three")])
    source = opened(tmp_path, batch=2)
    (tmp_path / "1/7/1-7-0001.flac").unlink()
    for _ in range(3):
        assert "two" not in spoken(source.next())
    assert [str(one) for one in source.dropped] == ["1/7/1-7-0001: cannot be read: No such file or directory"]


def test_too_few_good_utterances_name_the_flags(opened, tmp_path):
    write_speech(tmp_path, [(0.4, "one"), (encode(np.zeros(8000)), "two"), (0.4, "three")])
    with pytest.raises(ValueError, match="3 utterances can be trained on, --batch 4 takes 4: .* smaller --batch"):
        opened(tmp_path, batch=4)
    source = opened(tmp_path, batch=3)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"2 utterances can be trained on \(the first dropped: 1/7/1-7-0001: noth"):
            source.next()
    with pytest.raises(ValueError, match="--batch 2 on 2 ranks takes 4"):
        opened(tmp_path, batch=2, world_size=2)


def test_many_dropped_are_named_in_part_and_counted_in_whole(opened, tmp_path, capsys):
    write_speech(tmp_path, [(0.4, "one"), (0.4, "two"), *[(0.4, "7")] * 13])
    source = opened(tmp_path)
    source.next()
    source.close()
    said = capsys.readouterr().err.splitlines()
    assert len(source.dropped) == 13 and len(said) == 11
    assert said[9].endswith("further ones are counted only") and said[10] == "data: 13 dropped in all"


@pytest.mark.parametrize("audio", AUDIO)
def test_other_sample_rates_are_resampled_and_said_once(opened, tmp_path, audio, capsys):
    write_speech(tmp_path, [(encode(tone(0.5, rate=8000), 8000), "one"), (encode(tone(0.5)), "two"), (0.5, "three")])
    opened(tmp_path, audio=audio, batch=3)
    source = opened(tmp_path, audio=audio, batch=3, training=False)
    batch = source.next()
    assert batch.feature_lengths.tolist() == [17, 17, 17]
    # The same tone, so alike where 8000 Hz have something to say.
    first, second = (batch.features[:, row, :40].flatten() for row in (0, 1))
    assert torch.corrcoef(torch.stack((first, second)))[0, 1] > 0.5
    said = capsys.readouterr().err
    assert said.count("resampled to 16000 Hz") == 1 and "1 of 3 utterances" in said and "with 8000 Hz" in said


def test_missing_dali_names_flag_and_install_line(opened, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "rnnt.speech.dali_pipeline", None)
    with pytest.raises(ValueError, match=r"--audio dali: .* ./setup.sh dali, or --audio torch"):
        opened(folder, audio="dali")
