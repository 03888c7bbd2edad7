"""Greedy decoding of a batch of utterances by replays of one CUDA graph, and the word error rate of speech.

    decoder = GreedyDecoder(model, batch=8, frames=321)
    decoder.decode(f, lengths)          [[20, 8, 5], ...], the labels of each utterance

Each utterance stands at a frame, with the prediction network's output g after its last label. A step takes the
likeliest class of the joint. A label is kept, and the prediction network reads it. The blank moves the utterance to its
next frame, and so does the last label that a frame may have. An utterance past its last frame stands still.

A step needs no value on the host, so a graph holds `unrolled` steps. Between two replays the host reads if any
utterance is left; steps after the end change nothing.

Source: MLPerf training v3.1, NVIDIA's rnnt/decoder.py, which gives the same labels.
"""

import torch
import torch.nn.functional as F

from graph_worth import Pool
from rnnt.speech.transcripts import open_tokenizer

# LibriSpeech's dev-clean, which the benchmark is evaluated on, has as many.
MAX_UTTERANCES = 2703
MAX_SYMBOLS = 300
SEED = 0


class GreedyDecoder:
    """decode(f, lengths) for up to `batch` utterances of up to `frames` frames.

    The graph reads the model's weights where they are, so it follows changes in place. Dropout is never applied. Make
    the decoder on the stream that it will run on, not the default one.
    """

    @torch.no_grad()
    def __init__(self, model, batch, frames, max_symbols=300, max_symbols_per_frame=30, unrolled=8):
        """max_symbols, max_symbols_per_frame: most labels of an utterance and of a frame; as in the benchmark."""
        self.prediction, self.joint = model.prediction, model.joint.linear
        self.max_symbols, self.max_symbols_per_frame, self.unrolled = max_symbols, max_symbols_per_frame, unrolled
        weight, layers = self.joint.weight, self.prediction.layers
        device, self.blank = weight.device, len(weight) - 1
        self.f = weight.new_zeros(batch, frames, weight.shape[1])
        self.h, self.c = weight.new_zeros(2, len(layers), batch, layers[0].hidden_size)
        self.g = weight.new_zeros(batch, weight.shape[1])
        # For each utterance: its frames, the frame it stands at, its labels so far, those of them at this frame.
        self.lengths, self.frame, self.total, self.added = torch.zeros(4, batch, dtype=torch.int64, device=device)
        self.labels = torch.zeros(batch, max_symbols, dtype=torch.int64, device=device)
        self.rows, self.places = torch.arange(batch, device=device), torch.arange(max_symbols, device=device)
        # Libraries choose their kernels in this eager run.
        self._start()
        self._steps()
        self.pool = Pool(device)
        self.graph, _ = self.pool.capture(self._steps, (self.f, self.lengths))

    @torch.no_grad()
    def decode(self, f, lengths) -> list[list[int]]:
        """Labels of each utterance. f [B, T2, J] from the encoder; lengths int32 [B], its frames, 0 to T2.

        Raises ValueError for more utterances or frames than the graph holds.
        """
        (num_utterances, num_frames), (batch, frames) = f.shape[:2], self.f.shape[:2]
        if num_utterances > batch or num_frames > frames:
            raise ValueError(
                f"{num_utterances} utterances of {num_frames} frames, the decoder's graph holds {batch} of {frames}: "
                "raise its batch or frames"
            )
        self.f[:num_utterances, :num_frames].copy_(f)
        self.lengths.zero_()
        self.lengths[:num_utterances].copy_(lengths)
        self._start()
        while self._active().any():
            self.graph.replay()
        rows = zip(self.labels.tolist(), self.total.tolist(), strict=True)
        return [labels[:total] for labels, total in rows][:num_utterances]

    def close(self) -> None:
        """Release the graph's memory."""
        self.pool.release()

    def _start(self):
        for tensor in (self.frame, self.total, self.added, self.h, self.c):
            tensor.zero_()
        # Before the first label the prediction network reads a row of zeros.
        self._read(torch.zeros_like(self.h[0]), torch.ones_like(self.frame, dtype=torch.bool))

    def _active(self):
        return (self.frame < self.lengths) & (self.total < self.max_symbols)

    def _steps(self):
        for _ in range(self.unrolled):
            self._step()

    def _step(self):
        active = self._active()
        at_frame = self.f[self.rows, self.frame.clamp(max=self.f.shape[1] - 1)]
        label = self.joint(F.relu(at_frame + self.g)).argmax(1)
        emits = active & (label != self.blank)
        is_next = emits[:, None] & (self.places == self.total[:, None])
        self.labels.copy_(torch.where(is_next, label[:, None], self.labels))
        self.total.add_(emits)
        self.added.add_(emits)
        moves = active & (~emits | (self.added == self.max_symbols_per_frame))
        self.frame.add_(moves)
        self.added.masked_fill_(moves, 0)
        # The embedding has no row for the blank, and what it would give is not kept.
        self._read(self.prediction.embedding(label.clamp(max=self.blank - 1)), emits)

    def _read(self, x, emits):
        """The prediction network reads x [batch, H] for the utterances where `emits` is true."""
        for layer, h, c in zip(self.prediction.layers, self.h, self.c, strict=True):
            for old, new in zip((h, c), torch.lstm_cell(x, (h, c), *layer.all_weights[0]), strict=True):
                old.copy_(torch.where(emits[:, None], new, old))
            x = h
        self.g.copy_(self.prediction.linear(x))


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
    reference_words, hypothesis_words = reference.split(), hypothesis.split()
    above = list(range(len(hypothesis_words) + 1))
    for row, reference_word in enumerate(reference_words, 1):
        current = [row]
        for column, hypothesis_word in enumerate(hypothesis_words, 1):
            replaced = above[column - 1] + (reference_word != hypothesis_word)
            current.append(min(above[column] + 1, current[-1] + 1, replaced))
        above = current
    return above[-1]
