"""The word error rate of speech, which MLPerf's RNN-T is evaluated by."""

import torch

from rnnt.decoding.greedy_decoder import GreedyDecoder
from rnnt.speech.transcripts import open_tokenizer

# LibriSpeech's dev-clean, which the benchmark is evaluated on, has as many.
MAX_UTTERANCES = 2703
MAX_SYMBOLS = 300
SEED = 0


@torch.no_grad()
def word_error_rate(state) -> tuple[float, int]:
    """(share of words that are wrong, number of words) of the first MAX_UTTERANCES of --data, without augmentation.

    It decodes with the averaged weights, and leaves weights, random numbers and batches of training as they were.
    """
    config, plan = state.config, state.plan
    tokenizer = open_tokenizer(config.tokenizer, config.vocab)
    source = state.open_source(0, 1, SEED, training=False)
    frames = (max(plan.audio) + 1) // 2
    decoder = GreedyDecoder(state.model, config.batch, frames, max(MAX_SYMBOLS, *plan.text))
    num_errors = num_words = 0
    with state.averaged():
        for _ in range(min(source.num_batches, max(1, MAX_UTTERANCES // config.batch))):
            features, lengths, *_ = source.next()
            f, lengths = state.model.encoder(features.to(state.device), lengths.to(state.device))
            # The last batch may be filled up with rows that have no text.
            for text, labels in zip(source.texts, decoder.decode(f, lengths), strict=False):
                num_words += len(text.split())
                num_errors += word_errors(text, tokenizer.decode(labels))
    decoder.close()
    source.close()
    return num_errors / num_words, num_words


def word_errors(reference: str, hypothesis: str) -> int:
    """The fewest words to insert, delete and replace to get from one text to the other: Levenshtein's distance."""
    wanted, found = reference.split(), hypothesis.split()
    above = list(range(len(found) + 1))
    for row, word in enumerate(wanted, 1):
        current = [row]
        for column, other in enumerate(found, 1):
            current.append(min(above[column] + 1, current[-1] + 1, above[column - 1] + (word != other)))
        above = current
    return above[-1]
