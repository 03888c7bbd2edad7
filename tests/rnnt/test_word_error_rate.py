"""rnnt/decoding.py: errors of words, and their rate over rows that have texts."""

from dataclasses import replace

import pytest
import torch

from rnnt import decoding as module
from rnnt.config import PRESETS
from rnnt.data.synthetic import Synthetic
from rnnt.decoding import GreedyDecoder, word_error_rate, word_errors
from rnnt.speech.transcripts import open_tokenizer
from rnnt.state import State

TINY = PRESETS["tiny"]


class Speech:
    """Two batches, the second one filled up with a row that has no text."""

    num_batches = 2

    def __init__(self, texts):
        self.source = Synthetic(replace(TINY, data="lengths"), 0, 1, torch.bfloat16, 1, pinned=False)
        self.batches_of_texts = iter(texts)

    def next(self):
        self.texts = next(self.batches_of_texts)
        return self.source.next()

    def close(self):
        self.source.close()


@torch.no_grad()
def decoded(state):
    """The labels of Speech's batches as text."""
    source, tokenizer = Speech([[""]] * 2), open_tokenizer("chars", TINY.vocab)
    decoder = GreedyDecoder(state.model.eval(), TINY.batch, 12)
    batches = [source.next() for _ in range(2)]
    found = [decoder.decode(*state.model.encoder(batch.features, batch.feature_lengths)) for batch in batches]
    state.model.train()
    return [[tokenizer.decode(labels) for labels in rows] for rows in found]


def test_the_rate_is_of_rows_with_texts_and_training_stays_as_it_was(monkeypatch):
    state = State(TINY, torch.device("cpu"))
    state.reset()
    (first, second), (third, _) = decoded(state)
    num_words = sum(len(text.split()) for text in (first, second, third))
    assert num_words > 0
    before, draws = [parameter.clone() for parameter in state.parameters], torch.get_rng_state()
    # One word more in a text is one error.
    for more, num_errors in (("", 0), (" more", 1)):
        texts = [[first + more, second], [third]]
        monkeypatch.setattr(state, "open_source", lambda *_, training, texts=texts: Speech(texts))
        found = word_error_rate(state)
        assert found == (pytest.approx(num_errors / (num_words + num_errors)), num_words + num_errors)
    assert state.model.training and torch.equal(torch.get_rng_state(), draws)
    assert all(map(torch.equal, state.parameters, before))
    # The averaged weights are decoded.
    for average in state.lamb.ema:
        average.neg_()
    assert word_error_rate_of(monkeypatch, state, [[first, second], [third]]) > 0
    # And no more utterances than the benchmark has.
    monkeypatch.setattr(module, "MAX_UTTERANCES", TINY.batch)
    monkeypatch.setattr(state, "open_source", lambda *_, training: Speech([["one two"]]))
    assert word_error_rate(state)[1] == 2


def word_error_rate_of(monkeypatch, state, texts):
    monkeypatch.setattr(state, "open_source", lambda *_, training: Speech(texts))
    return word_error_rate(state)[0]


@pytest.mark.parametrize(
    ("wanted", "found", "number"),
    [
        ("", "", 0),
        ("a b c", "a b c", 0),
        ("a b c", "", 3),
        ("", "a", 1),
        ("a b c", "b c d", 2),
        ("a b b c", "a x c", 2),
    ],
)
def test_word_errors_are_the_fewest_edits(wanted, found, number):
    assert word_errors(wanted, found) == number
