"""rnnt/evaluation: times of both decoders, the word error rate, and what is printed of them."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch

from rnnt import evaluation
from rnnt.config import PRESETS
from rnnt.greedy_decoder import EagerDecoder
from rnnt.state import State
from rnnt.synthetic import Synthetic
from rnnt.train import load_batch

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]


@pytest.fixture(scope="module")
def trained():
    out = State(TINY, CPU)
    out.reset()
    return out


def test_both_decoders_are_timed_on_one_batch(trained):
    before = [parameter.clone() for parameter in trained.parameters]
    found = evaluation.measure(trained)
    assert found["labels_equal"] and found["num_utterances"] == TINY.batch and found["num_labels"] > 0
    for name in ("eager", "graph"):
        assert 0 < found[f"{name}_loop_ms"] < found[f"{name}_whole_ms"]
        rate = TINY.batch / found[f"{name}_whole_ms"] * 1e3
        assert found[f"{name}_utterances_per_s"] == pytest.approx(rate)
    assert found["loop_speedup"] == pytest.approx(found["eager_loop_ms"] / found["graph_loop_ms"])
    assert trained.model.training
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters, before, strict=True))


class Speech:
    """Two batches of speech, the second one filled up with a row that has no text."""

    num_batches = 2

    def __init__(self, decoded):
        self.source = Synthetic(replace(TINY, data="lengths"), 0, 1, torch.bfloat16, 1, pinned=False)
        self.decoded, self.served = decoded, 0

    def next(self):
        batch = self.source.next()
        self.texts = self.decoded[self.served][: 2 - self.served]
        self.served += 1
        return batch

    def reset(self):
        """Read once."""

    def close(self):
        self.source.close()


def say(trained):
    """What the model makes of Speech's batches, as text."""
    source = Speech([[""] * 2] * 2)
    decoder = EagerDecoder(trained.model.eval(), TINY.batch)
    tokenizer = evaluation.open_tokenizer("chars", TINY.vocab)
    out = []
    with torch.no_grad():
        for _ in range(2):
            batch = source.next()
            f, lengths = trained.model.encoder(batch.features, batch.feature_lengths)
            out.append([tokenizer.decode(labels) for labels in decoder.decode(f, lengths)])
    trained.model.train()
    return out


def word_error_rate(trained):
    evaluator = evaluation.SpeechEvaluator(trained)
    found = evaluator.word_error_rate()
    evaluator.close()
    return found


def test_word_error_rate_is_of_rows_with_texts(trained, monkeypatch):
    said = say(trained)
    num_words = sum(len(text.split()) for text in [*said[0], said[1][0]])
    assert num_words > 0
    monkeypatch.setattr(trained, "open_source", lambda *_, training: Speech(said))
    found = word_error_rate(trained)
    assert found == {"num_words": num_words, "eager": 0.0, "graph": 0.0, "labels_equal": True}
    # One word more in a text is one error.
    longer = [[said[0][0] + " more", said[0][1]], said[1]]
    monkeypatch.setattr(trained, "open_source", lambda *_, training: Speech(longer))
    found = word_error_rate(trained)
    assert found["num_words"] == num_words + 1
    assert found["eager"] == found["graph"] == pytest.approx(1 / (num_words + 1))


@pytest.mark.parametrize(("label", "reason"), [("blank", "no label was found"), (3, "largest number of labels")])
def test_times_that_say_little_of_speech_are_said_to(trained, monkeypatch, label, reason):
    bias = trained.model.joint.linear.bias
    kept = bias.detach().clone()

    @contextlib.contextmanager
    def averaged():
        with torch.no_grad():
            bias[trained.blank if label == "blank" else label] = 1e4
        yield
        with torch.no_grad():
            bias.copy_(kept)

    monkeypatch.setattr(trained, "averaged", averaged)
    for name in ("EagerDecoder", "GraphDecoder"):
        # Fewer than the toy's frames have room for.
        monkeypatch.setattr(evaluation, name, functools.partial(getattr(evaluation, name), max_symbols=20))
    found = evaluation.measure(trained)
    counts = {"blank": (0, 0), 3: (20 * TINY.batch, TINY.batch)}[label]
    assert (found["num_labels"], found["num_cut_off"]) == counts
    report = {"padding": {}, "steps_per_shape": {}, "useful_flops_per_step": 1.0, "executed_flops_per_step": 2.0}
    assert reason in evaluation.unlike_speech(found)
    assert reason in "\n".join(evaluation.lines({"buckets": report, "decode": found}))
    assert evaluation.unlike_speech(found | {"num_labels": 5, "num_cut_off": 0}) is None


def test_lines_say_where_labels_differ(trained):
    load_batch(trained, 0, trained.plan.fit)
    report = trained.tally.report(lambda frames, tokens: 1e12 * frames, lambda frames, tokens: frames)
    decode = evaluation.measure(trained)
    wer = {"num_words": 10, "eager": 0.1, "graph": 0.2, "labels_equal": False}
    text = "\n".join(evaluation.lines({"buckets": report, "decode": decode, "wer": wer}))
    assert "labels equal\n" in text and text.endswith("10.00 % wrong, 20.00 % graphed, labels DIFFER")
    count = f"labels     {decode['num_labels']} in {TINY.batch} utterances, "
    assert decode["num_labels"] > 0 and count in text
    assert "frames " in text and "executed" in text and text.isascii()
