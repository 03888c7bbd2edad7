"""speech/utterances.py: the sequence of batches of speech, what is dropped on the way, and that no pair is wrong."""

import concurrent.futures
import sys
import threading
import time

import pytest
import torch

from rnnt.config import PRESETS, Config
from rnnt.speech.transcripts import LETTERS
from rnnt.state import State
from tests.helpers.speech_files import encode, tone, write_speech

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed: ./setup.sh dali")

from rnnt.speech import utterances as speech

CPU = torch.device("cpu")
# Every other utterance is longer, so that a batch has padding.
NUM = 11


def transcript(number):
    """A different one for each utterance, and of a different length."""
    return "abcdefghijk"[number] * (number + 1)


def frames_of(number):
    """Frames of 30 ms of unchanged speech: 1 + (4800 + 960 i) / 160 of 10 ms."""
    return -(-(31 + 6 * number) // 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eleven utterances; number i says its letter i + 1 times and lasts 0.3 + 0.06 i seconds."""
    said = [(0.3 + 0.06 * number, transcript(number)) for number in range(NUM)]
    return write_speech(tmp_path_factory.mktemp("speech"), said)


@pytest.fixture
def opened():
    """opened(folder, ...) opens a source, which is closed after the test."""
    sources = []

    def open_one(folder, rank=0, world_size=1, seed=1, dtype=torch.float32, device=CPU, **fields):
        config = Config(data=str(folder), **{"batch": 2, "workers": 1, **fields})
        sources.append(speech.Speech(config, device, rank, world_size, dtype, seed))
        return sources[-1]

    yield open_one
    for source in sources:
        source.close()


def spoken(batch):
    """The transcripts of a batch, from its tokens."""
    rows = zip(batch.tokens, batch.token_lengths.tolist(), strict=True)
    return ["".join(LETTERS[number] for number in row[:length]) for row, length in rows]


def numbers(batch):
    return [len(said) - 1 for said in spoken(batch)]


def equal(first, second):
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def assert_pairs(batch):
    """Each transcript is that of its audio, whose length is its own."""
    for number, frames in zip(numbers(batch), batch.feature_lengths.tolist(), strict=True):
        assert frames == frames_of(number)


# ------------------------------------------------------------------------------------------------
# The sequence


def test_a_batch_has_the_shapes_that_a_step_takes(opened, folder):
    source = opened(folder, dtype=torch.bfloat16)
    for _ in range(3):
        batch = source.next()
        frames, tokens = batch.shape
        assert batch.features.shape == (frames, 2, 256) and batch.features.dtype == torch.bfloat16
        assert batch.tokens.dtype == torch.int64
        assert batch.feature_lengths.dtype == batch.token_lengths.dtype == torch.int32
        assert frames == batch.feature_lengths.max() <= source.max_frames
        assert tokens == batch.token_lengths.max() <= source.max_tokens
        assert all(said == transcript(len(said) - 1) for said in spoken(batch))
        for row in range(2):
            assert not batch.features[batch.feature_lengths[row] :, row].any()
            assert not batch.tokens[row, batch.token_lengths[row] :].any()
            # All of it but what SpecAugment masks.
            assert (batch.features[: batch.feature_lengths[row], row, :240] != 0).float().mean() > 0.3


def test_reset_gives_the_same_batches_bit_for_bit(opened, folder):
    source = opened(folder)
    first = [source.next() for _ in range(8)]
    source.reset()
    assert all(equal(batch, source.next()) for batch in first)
    # Asked for first, batch 3 is the same.
    assert equal(opened(folder).make(3), first[3])


def test_epochs_are_shuffled_and_shared_by_the_ranks(opened, folder):
    source = opened(folder)
    assert source.num_samples == NUM and source.num_batches == 5
    epochs = [[number for _ in range(5) for number in numbers(source.next())] for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == 10 == len(set(epoch))
    assert epochs[0] != epochs[1] != epochs[2]
    assert numbers(opened(folder, seed=2).next()) != epochs[0][:2]
    ranks = [opened(folder, rank=rank, world_size=2) for rank in range(2)]
    shared = [number for _ in range(2) for rank in ranks for number in numbers(rank.next())]
    assert shared == epochs[0][:8] and [rank.num_batches for rank in ranks] == [2, 2]


def test_speed_changes_from_batch_to_batch_unless_told_not_to(opened, folder):
    source, speeds = opened(folder, batch=11), []
    for batch in (source.next(), source.next()):
        own = torch.tensor([(31 + 6 * number) / 3 for number in numbers(batch)])
        assert ((0.85 * own - 1 <= batch.feature_lengths) & (batch.feature_lengths <= 1.15 * own + 1)).all()
        speeds.append(dict(zip(numbers(batch), (batch.feature_lengths / own).tolist(), strict=True)))
    assert max(abs(speeds[0][number] - speeds[1][number]) for number in range(NUM)) > 0.05
    source = opened(folder, batch=11, speed_perturbation=False)
    batch = source.next()
    assert_pairs(batch)
    assert source.max_frames == max(batch.feature_lengths)


def test_mel_bands_are_masked_unless_told_not_to(opened, folder):
    def num_masked(**fields):
        batch = opened(folder, batch=11, **fields).next()
        return int(batch.features[..., :80].eq(0).all(0).any(1).sum())

    assert num_masked() > 0 == num_masked(spec_augment=False)


def test_batches_are_made_ahead_by_a_thread_that_close_ends(opened, folder):
    before = threading.active_count()
    source = opened(folder)
    source.next()
    assert len(concurrent.futures.wait(source._pending, timeout=120).done) == speech.AHEAD
    assert threading.active_count() > before
    source.close()
    source.close()
    assert threading.active_count() <= before


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_cpu(opened, folder):
    source, reference = opened(folder, device=torch.device("cuda", 0)), opened(folder)
    first = [source.next() for _ in range(4)]
    for batch in first:
        expected = reference.next()
        assert batch.features.is_cuda and not any(tensor.is_cuda for tensor in batch[1:])
        assert all(tensor.is_pinned() for tensor in batch[1:]) and equal(batch[1:], expected[1:])
        assert (batch.features.cpu() - expected.features).abs().max() < 0.05
    source.reset()
    assert all(equal(batch, source.next()) for batch in first)


@pytest.mark.gpu
def test_graphs_can_be_captured_while_batches_are_made(opened, folder):
    source = opened(folder, batch=8, device=torch.device("cuda", 0))
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


def test_a_file_that_cannot_be_decoded_ends_the_run_and_is_named(opened, tmp_path):
    write_speech(tmp_path, [(0.4, "one"), (encode(tone(0.7))[:4000], "two"), (0.4, "three"), (0.4, "four")])
    source = opened(tmp_path, batch=4)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^--data: .*1/7/1-7-0001.flac cannot be decoded"):
            source.next()


def test_too_few_end_the_run(opened, tmp_path):
    write_speech(tmp_path, [(0.4, "one"), (0.4, "two"), (0.4, "three"), (0.4, "7")])
    with pytest.raises(ValueError, match=r"3 utterances can be trained on .*1-7-0003.* takes 4: "):
        opened(tmp_path, batch=4)
    with pytest.raises(ValueError, match="--batch 2 on 2 ranks takes 4"):
        opened(tmp_path, batch=2, world_size=2)


def test_many_dropped_are_named_in_part(opened, tmp_path, capsys):
    write_speech(tmp_path, [(0.4, "one"), (0.4, "two"), *[(0.4, "7")] * 13])
    source = opened(tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert len(source.dropped) == 13 and len(said) == 10 and said[9].endswith("--record counts further ones")


def test_missing_packages_are_named_with_the_line_that_installs_them(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "rnnt.speech.utterances", None)
    config = Config(**vars(PRESETS["tiny"]) | {"data": str(folder)})
    with pytest.raises(
        ValueError, match=r"^--data .*: speech takes soundfile and nvidia-dali .*: ./setup.sh speech dal"
    ):
        State(config, CPU)
