"""What the messages of a failed capture mean, in plain words: CUDA's errors 900 to 908, and PyTorch's own."""

import re

# (pattern, cause, what to do), the first that matches counts
_KNOWN = (
    (
        r"operation not permitted when stream is capturing|StreamCaptureUnsupported|\berror 900\b",
        "a call waited for the GPU or used the default stream during the capture (CUDA error 900)",
        "make doctor lists host reads; look for synchronize(), .item() and copies from unpinned memory",
    ),
    (
        r"previous error during capture|StreamCaptureInvalidated|\berror 901\b",
        "an earlier call had already ended the capture (CUDA error 901)",
        "the first error counts: it is above this one",
    ),
    (
        r"StreamCaptureMerge|\berror 902\b",
        "two captures were joined by an event (CUDA error 902)",
        "capture one after the other",
    ),
    (
        r"StreamCaptureUnmatched|\berror 903\b",
        "the capture was ended on another stream than it began on (CUDA error 903)",
        "end a capture on its own stream",
    ),
    (
        r"unjoined work|StreamCaptureUnjoined|\berror 904\b",
        "work on a side stream was not joined before the capture ended (CUDA error 904)",
        "let the step's stream wait for it: torch.cuda.current_stream().wait_stream(side)",
    ),
    (
        r"dependency created on uncaptured work|StreamCaptureIsolation|\berror 905\b",
        "the capture waits for work from before it, on another stream (CUDA error 905)",
        "warm up on the stream of the capture; with DDP make the model under that stream, too",
    ),
    (
        r"would make the legacy stream depend|StreamCaptureImplicit|\berror 906\b",
        "something ran on the default stream, which waits for all others (CUDA error 906)",
        "do everything under torch.cuda.stream(side), from the warm-up on",
    ),
    (
        r"not permitted on an event last recorded in a capturing stream|CapturedEvent|\berror 907\b",
        "an event of the capture was waited for or timed on the host (CUDA error 907)",
        "record and read events outside of the step",
    ),
    (
        r"WrongThread|\berror 908\b",
        "another thread took part in the capture (CUDA error 908)",
        'capture_error_mode="thread_local", and no CUDA call of another thread in the step',
    ),
    (
        r"capturable is False|capturable=False",
        "the optimizer keeps its number of steps on the host",
        "AdamW(..., capturable=True), or leave the optimizer out of the graph",
    ),
    (
        r"Offset increment outside graph capture|generator.*(not registered|capture)|get the state of CUDA RNG",
        "a random generator was used that the graph does not know",
        "graph.register_generator_state(generator) before the capture",
    ),
    (
        r"Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned",
        "the step copies from memory of the host that is not pinned",
        "pin it, or copy before the step into a tensor on the GPU",
    ),
    (
        r"reads a value on the host|_local_scalar_dense|\.item\(\)",
        "the step reads a value of the GPU on the host",
        "keep it on the GPU and read it after the step",
    ),
    (
        r"shape that depends on values|nonzero|data-dependent",
        "a shape depends on values",
        "torch.where or a mask in the place of boolean indexing",
    ),
    (
        r"out of memory",
        "the graph's memory does not fit beside what is there",
        "capture smaller parts or fewer shapes; graphs keep the memory of their activations",
    ),
    (
        r"illegal memory access|misaligned address",
        "a replay read memory that has been given back since the capture",
        "keep every tensor that the step reads alive and where it was, workspaces of libraries too",
    ),
    (
        r"NCCL|ProcessGroup|c10d",
        "a collective was not ready for the capture",
        "run it once before, on the stream of the capture; TORCH_NCCL_ASYNC_ERROR_HANDLING=0 with old versions",
    ),
)


def explained(message: str) -> tuple[str, str]:
    """Return (cause, what to do) for the message of a failed capture; two empty texts for an unknown one.

    Args:
        message: of a CaptureError or of torch.
    """
    for pattern, cause, remedy in _KNOWN:
        if re.search(pattern, message, re.IGNORECASE):
            return cause, remedy
    return "", ""
