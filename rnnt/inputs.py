"""Static inputs for batches of any length: one set of buffers, of which a batch or a bucket is the beginning."""

from typing import NamedTuple

import torch


class Views(NamedTuple):
    """What a step reads, on the device: features [T, B, F], tokens int64 [B, U] and int32 lengths [B].

    Views of one shape are the same memory in every step, so that a graph can read them.
    """

    features: torch.Tensor
    feature_lengths: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor


class Inputs:
    """Buffers for batches of at most max_frames and max_tokens, filled from `source` one batch ahead of the step.

    On CUDA a batch goes to one of two staging sets on a stream of its own while the step before runs, and from there to
    the buffers on the caller's stream. Only the device waits: the host never does, but for the source, and T and U are
    known to it from the batch's sizes. On the CPU a batch is copied into the buffers and nothing is read ahead.
    """

    def __init__(self, source, size: tuple[int, int, int], max_tokens: int, dtype: torch.dtype, device: torch.device):
        """size: (max_frames, batch, features)."""
        self.source, self.device = source, device
        self.max_tokens, self.batch_size = max_tokens, size[1]
        self._buffers = self._make(size, dtype)
        self._ahead = None
        if device.type == "cuda":
            self._staging = [self._make(size, dtype) for _ in range(2)]
            self._staged = [torch.cuda.Event() for _ in range(2)]
            self._consumed = [torch.cuda.Event() for _ in range(2)]
            self._stream = torch.cuda.Stream(device)
            # The allocator may have given memory that earlier work of the current stream still uses.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _make(self, size, dtype):
        """Views of the largest shape, zero. Tokens are kept flat, so that each shape is contiguous."""
        features = torch.zeros(size, dtype=dtype, device=self.device)
        tokens = torch.zeros(size[1] * self.max_tokens, dtype=torch.int64, device=self.device)
        lengths = [torch.zeros(size[1], dtype=torch.int32, device=self.device) for _ in range(2)]
        return Views(features, lengths[0], tokens, lengths[1])

    def views(self, frames: int, tokens: int) -> Views:
        """The buffers as a batch of this shape."""
        return _of_shape(self._buffers, frames, tokens)

    def load(self, fit=None):
        """(the next batch as `Views`, the batch itself, the shape of the views), in the order of the current stream.

        fit(T, U): the shape to pad to, by zeros in time and token 0; None: the batch as it is.
        """
        if self.device.type == "cpu":
            batch = staged = self._next()
        else:
            if self._ahead is None:
                self._stage(0)
            place, batch = self._ahead
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._staged[place])
            staged = _of_shape(self._staging[place], *_shape(batch))
        frames, num_tokens = _shape(batch)
        shape = fit(frames, num_tokens) if fit else (frames, num_tokens)
        views = self.views(*shape)
        views.features[:frames].copy_(staged.features)
        views.tokens[:, :num_tokens].copy_(staged.tokens)
        if shape[0] > frames:
            views.features[frames:].zero_()
        if shape[1] > num_tokens:
            views.tokens[:, num_tokens:].zero_()
        views.feature_lengths.copy_(staged.feature_lengths)
        views.token_lengths.copy_(staged.token_lengths)
        if self.device.type == "cuda":
            self._consumed[place].record(stream)
            self._stage(1 - place)
        return views, batch, shape

    def fill(self, frames: int, tokens: int) -> Views:
        """A made-up batch that fills this shape, for warm-up and capture; the next `load` overwrites it."""
        views = self.views(frames, tokens)
        views.features.normal_()
        views.feature_lengths.fill_(frames)
        views.tokens.zero_()
        views.token_lengths.fill_(tokens)
        return views

    def reset(self) -> None:
        """Begin at batch 0 again; what is staged is thrown away."""
        # Copies on the way are overwritten in order: all are on one stream.
        self._ahead = None
        self.source.reset()

    def _next(self):
        batch = self.source.next()
        frames, tokens = _shape(batch)
        max_frames, batch_size = self._buffers.features.shape[:2]
        if batch.features.shape[1] != batch_size or frames > max_frames or tokens > self.max_tokens:
            raise ValueError(
                f"a batch of {batch.features.shape[1]} utterances, {frames} frames and {tokens} tokens, where a step "
                f"takes {batch_size} of at most {max_frames} and {self.max_tokens}: raise --max-frames or --max-tokens"
            )
        return batch

    def _stage(self, place):
        """Start copying the source's next batch to staging set `place`, once the device has read what is there."""
        # A source that makes features on the device lets the stream wait that asks for them.
        with torch.cuda.stream(self._stream):
            batch = self._next()
            self._stream.wait_event(self._consumed[place])
            for target, tensor in zip(_of_shape(self._staging[place], *_shape(batch)), batch, strict=True):
                target.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            self._staged[place].record(self._stream)
        self._ahead = place, batch


def _shape(batch):
    return len(batch.features), batch.tokens.shape[1]


def _of_shape(views, frames, tokens):
    batch_size = len(views.token_lengths)
    flat = views.tokens[: batch_size * tokens]
    return Views(views.features[:frames], views.feature_lengths, flat.view(batch_size, tokens), views.token_lengths)
