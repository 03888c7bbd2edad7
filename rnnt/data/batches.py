"""Input of a step: batches of utterances from a source, and the static buffers that they are copied to."""

from typing import NamedTuple

import torch


class Batch(NamedTuple):
    """A batch of utterances. All are padded with 0 to T frames and U tokens.

    features: [T, B, F] in the model's dtype. feature_lengths, token_lengths: int32 [B]. tokens: int64 [B, U].
    From a source, T and U are those of the longest, and all is in host memory, except that features may be on the
    device. In the static buffers all is on the device, and batches of one shape are the same memory in every step, so
    that a graph can read them.
    """

    features: torch.Tensor
    feature_lengths: torch.Tensor
    tokens: torch.Tensor
    token_lengths: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(T, U)"""
        return len(self.features), self.tokens.shape[1]


class Inputs:
    """Static buffers for batches of at most max_frames and max_tokens, filled from `source`.

    On CUDA the next batch is copied to one of two staging sets on another stream while a step runs, and from there to
    the buffers on the caller's stream. The host waits for the source only. On the CPU nothing is read ahead.
    """

    def __init__(self, source, size: tuple[int, int, int], max_tokens: int, dtype: torch.dtype, device: torch.device):
        """size: (max_frames, batch, features)."""
        self.source, self.device = source, device
        self.max_tokens = max_tokens
        self._buffers = self._make(size, dtype)
        self._ahead = None
        if device.type == "cuda":
            self._staging = [self._make(size, dtype) for _ in range(2)]
            self._staged, self._consumed = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
            self._stream = torch.cuda.Stream(device)
            # The allocator may have given memory that earlier work of the current stream still uses.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def _make(self, size, dtype):
        """A batch of the largest shape, zero. Tokens are flat, so that each shape is contiguous."""
        features = torch.zeros(size, dtype=dtype, device=self.device)
        tokens = torch.zeros(size[1] * self.max_tokens, dtype=torch.int64, device=self.device)
        lengths = [torch.zeros(size[1], dtype=torch.int32, device=self.device) for _ in range(2)]
        return Batch(features, lengths[0], tokens, lengths[1])

    def load(self, fit=None) -> tuple[Batch, Batch]:
        """Copy the next batch into the buffers, in the order of the current stream; return both.

        fit: fit(T, U) is the shape to pad to with zeros; None: no padding.
        """
        if self.device.type == "cpu":
            original = staged = self._next()
        else:
            if self._ahead is None:
                self._stage(0)
            slot, original = self._ahead
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._staged[slot])
            staged = _beginning(self._staging[slot], *original.shape)
        frames, num_tokens = original.shape
        batch = _beginning(self._buffers, *(fit(frames, num_tokens) if fit else (frames, num_tokens)))
        batch.features[:frames].copy_(staged.features)
        batch.tokens[:, :num_tokens].copy_(staged.tokens)
        if batch.shape[0] > frames:
            batch.features[frames:].zero_()
        if batch.shape[1] > num_tokens:
            batch.tokens[:, num_tokens:].zero_()
        batch.feature_lengths.copy_(staged.feature_lengths)
        batch.token_lengths.copy_(staged.token_lengths)
        if self.device.type == "cuda":
            self._consumed[slot].record(stream)
            self._stage(1 - slot)
        return batch, original

    def dummy_batch(self, frames: int, tokens: int) -> Batch:
        """The buffers as a random batch of this shape, for warm-up and capture; the next `load` overwrites it."""
        batch = _beginning(self._buffers, frames, tokens)
        batch.features.normal_()
        batch.feature_lengths.fill_(frames)
        batch.tokens.zero_()
        batch.token_lengths.fill_(tokens)
        return batch

    def reset(self) -> None:
        """Begin at batch 0 again; a staged batch is thrown away."""
        self._ahead = None
        self.source.reset()

    def skip(self, count: int) -> None:
        """Pass `count` batches over, after a reset."""
        for _ in range(count):
            self.source.next()

    def _next(self):
        batch = self.source.next()
        max_frames, batch_size = self._buffers.features.shape[:2]
        (frames, tokens), size = batch.shape, batch.features.shape[1]
        if size != batch_size or frames > max_frames or tokens > self.max_tokens:
            raise ValueError(
                f"a batch of {size} utterances, {frames} frames and {tokens} tokens, where a step "
                f"takes {batch_size} of at most {max_frames} and {self.max_tokens}: raise --max-frames or --max-tokens"
            )
        return batch

    def _stage(self, slot):
        """Start the copy of the next batch to staging set `slot`, once the device has read the batch there."""
        # In the stream's context, since a source that makes features on the device lets the current stream wait.
        with torch.cuda.stream(self._stream):
            batch = self._next()
            self._stream.wait_event(self._consumed[slot])
            for target, tensor in zip(_beginning(self._staging[slot], *batch.shape), batch, strict=True):
                target.copy_(tensor, non_blocking=True)
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)
            self._staged[slot].record(self._stream)
        self._ahead = slot, batch


def _beginning(batch, frames, tokens):
    batch_size = len(batch.token_lengths)
    flat = batch.tokens[: batch_size * tokens]
    return batch._replace(features=batch.features[:frames], tokens=flat.view(batch_size, tokens))
