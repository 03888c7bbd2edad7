"""rnnt/decoding: times of both decoders, the word error rate, and what is printed of them."""

from dataclasses import replace

import pytest
import torch

from rnnt import decoding, state
from rnnt.config import PRESETS
from rnnt.decoder import EagerDecoder
from rnnt.state import State
from rnnt.synthetic import Synthetic

CPU = torch.device("cpu")
TINY = PRESETS["tiny"]


@pytest.fixture(scope="module")
def trained():
    out = State(TINY, CPU)
    out.reset()
    return out


def test_both_decoders_are_timed_on_one_batch(trained):
    before = [parameter.clone() for parameter in trained.parameters]
    found = decoding.measure(trained)
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

    def close(self):
        self.source.close()


def say(trained):
    """What the model makes of Speech's batches, as text."""
    source = Speech([[""] * 2] * 2)
    decoder = EagerDecoder(trained.model.eval(), TINY.batch)
    tokenizer = decoding.open_tokenizer("chars", TINY.vocab)
    out = []
    with torch.no_grad():
        for _ in range(2):
            batch = source.next()
            f, lengths = trained.model.encoder(batch.features, batch.feature_lengths)
            out.append([tokenizer.decode(labels) for labels in decoder.decode(f, lengths)])
    trained.model.train()
    return out


def test_word_error_rate_is_of_rows_with_texts(trained, monkeypatch):
    said = say(trained)
    num_words = sum(len(text.split()) for text in [*said[0], said[1][0]])
    assert num_words > 0
    monkeypatch.setattr(state, "open_source", lambda *_, training: Speech(said))
    found = decoding.word_error_rate(trained)
    assert found == {"num_words": num_words, "eager": 0.0, "graph": 0.0, "labels_equal": True}
    # One word more in a text is one error.
    longer = [[said[0][0] + " more", said[0][1]], said[1]]
    monkeypatch.setattr(state, "open_source", lambda *_, training: Speech(longer))
    found = decoding.word_error_rate(trained)
    assert found["num_words"] == num_words + 1
    assert found["eager"] == found["graph"] == pytest.approx(1 / (num_words + 1))


def test_lines_say_where_labels_differ(trained):
    trained.begin_step(0, trained.plan.fit)
    report = trained.tally.report(lambda frames, tokens: 1e12 * frames)
    decode = decoding.measure(trained)
    wer = {"num_words": 10, "eager": 0.1, "graph": 0.2, "labels_equal": False}
    text = "\n".join(decoding.lines({"buckets": report, "decode": decode, "wer": wer}))
    assert "labels equal\n" in text and text.endswith("10.00 % wrong, 20.00 % graphed, labels DIFFER")
    assert "frames " in text and "executed" in text and text.isascii()
