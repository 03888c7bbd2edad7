"""Failed captures in plain words: CUDA's errors 900 to 908 and PyTorch's own, by their texts; host graphs' by reason.

PyTorch raises all of them as RuntimeError, so nothing but the text tells them apart. CUDA's texts are those of the
runtime of CUDA 13.0. PyTorch's are those of its CUDAGraph.cpp, CUDAGeneratorImpl.cpp, autograd engine, optimizers and
make_graphed_callables, some as NVIDIA's "CUDA Graph Best Practice for PyTorch" and issues quote them.
"""

import re

from graph_worth.capture import host_graph_rules as rules

# (cause, what to do)
_READS = "the step reads a value of the GPU on the host", "keep it on the GPU and read it after the step"
_SHAPE = "a shape depends on values", "torch.where or a mask in the place of boolean indexing"
_RANDOM = (
    "the random state was read or set in the capture, as activation checkpointing does",
    "seed before; checkpoint(..., preserve_rng_state=False), or graphsafe_get_state and graphsafe_set_state",
)
_GENERATOR = (
    "a random generator was used that the graph does not know",
    "hand it over with what training changes; in code of your own: graph.register_generator_state(generator)",
)
_MEMORY = (
    "memory that the graph reads has been given back or has moved since the capture",
    "keep every tensor that the step reads alive and where it was, workspaces of libraries too",
)
_COLLECTIVE = (
    "a collective was not ready for the capture",
    "run it once before, on the stream of the capture; before PyTorch 2.2 with NCCL_ASYNC_ERROR_HANDLING=0",
)
# Reason of a host graph -> (cause, what to do)
_OF_RULES = {
    rules.READS: _READS,
    rules.LENGTHS: _READS,
    rules.SHAPE: _SHAPE,
    rules.NEW: (
        "the step makes a tensor from data of the host: a copy from memory that is not pinned",
        "make it once in build and copy into it before the step",
    ),
    rules.RANDOM: _RANDOM,
    rules.UNKNOWN_GENERATOR: _GENERATOR,
    rules.RESIZES: _MEMORY,
    rules.GONE: _MEMORY,
    rules.MOVED: _MEMORY,
    rules.COLLECTIVE: _COLLECTIVE,
}
# (pattern of a text of torch or CUDA, cause, what to do), the first that matches counts
_KNOWN = (
    # --- PyTorch's own, which say more than CUDA's
    (
        r"capturable is False",
        "the optimizer keeps its number of steps on the host",
        "AdamW(..., fused=True, capturable=True), or leave the optimizer out of the graph",
    ),
    (
        r"not supported for capturable=False",
        "a learning rate or a beta in a tensor needs an optimizer that runs on the GPU alone",
        "fused=True, or capturable=True",
    ),
    (
        r"capturable=True, params.* must be on supported devices",
        "the optimizer's state lies on the CPU, as after load_state_dict of a file",
        "move the state to the GPU before the capture",
    ),
    (r"increase offset for a CUDA generator not in capture mode", *_GENERATOR),
    (
        r"Offset increment outside graph capture",
        "random numbers were drawn outside of a capture that has not ended: on another stream, or after it had failed",
        "the first error counts; draw on the stream of the capture",
    ),
    (r"CUDAGeneratorImpl::\w+ during CUDA graph capture|set_state_index method during capturing", *_RANDOM),
    (
        r"not compatible with \.grad\(\)|Checkpointing is not compatible",
        "reentrant checkpointing inside of a part that is captured by itself",
        "checkpoint(..., use_reentrant=False)",
    ),
    (
        r"Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        "the step copies between the GPU and memory of the host that is not pinned",
        "make such tensors on the GPU in build; copy batches before the step",
    ),
    (
        r"stale reference to the default stream|AccumulateGrad node's stream does not match",
        "gradients are added on the stream of an earlier forward pass, which is still referred to",
        "warm up on the stream of the capture, build DDP under it, and keep no loss from before",
    ),
    (
        r"captures_underway|only one capture may be underway",
        "another capture of this process was still running, or has failed before",
        "capture one after the other, and begin a new process after a failed one",
    ),
    (
        r"input tensor deallocate during graph +recording",
        "blocks compiled with mode='reduce-overhead' run again in a non-reentrant checkpoint, which keeps their inputs",
        "compile around the checkpoint, the whole module, or compile such blocks with mode='default'",
    ),
    (
        # The second text is that of torch 2.13.
        r"pending, uninvoked backwards|outputs from a previous step still require backward",
        "torch.compile replays none of its graphs while an earlier forward pass waits for its backward pass",
        "torch.no_grad() around passes without a backward; torch.compiler.cudagraph_mark_step_begin() before a step",
    ),
    (
        r"gradient tensor output of CUDAGraphs that has been overwritten",
        "a gradient that is added up was allocated by a graph of torch.compile, and its next replay overwrites it",
        "zero_grad() before each backward pass; or make .grad in an eager step, and keep it: set_to_none=False",
    ),
    (
        r"output of CUDAGraphs that has been overwritten",
        "an output was read after the next replay",
        "clone() it before, or torch.compiler.cudagraph_mark_step_begin() at the start of each step",
    ),
    # --- CUDA's
    (
        r"operation not permitted when stream is capturing|StreamCaptureUnsupported|\berror 900\b",
        "a call waited for the GPU or asked it, or a side stream did not begin with the capture (CUDA error 900)",
        "look for synchronize(), .item(), query(), pinned allocations, and side streams without wait_stream",
    ),
    (
        r"previous error during capture|StreamCaptureInvalidated|\berror 901\b",
        "an earlier call, perhaps of another thread, had already ended the capture (CUDA error 901)",
        "the first error counts; a DataLoader's pin_memory thread needs capture_error_mode='thread_local'",
    ),
    (
        r"merge of separate capture sequences|StreamCaptureMerge|\berror 902\b",
        "an event joined two captures (CUDA error 902)",
        "capture one after the other",
    ),
    (
        r"not ended in the same stream|must end on the same stream|StreamCaptureUnmatched|\berror 903\b",
        "the capture was ended on another stream than it began on (CUDA error 903)",
        "leave each torch.cuda.stream that the step enters",
    ),
    (
        r"unjoined work|StreamCaptureUnjoined|\berror 904\b",
        "work on a side stream was not joined before the capture ended (CUDA error 904)",
        "let the step's stream wait for it: torch.cuda.current_stream().wait_stream(side)",
    ),
    (
        r"dependency created on uncaptured work|StreamCaptureIsolation|\berror 905\b",
        "the capture waits for work from before it, on another stream (CUDA error 905)",
        "wait for that work before the step, or do it inside",
    ),
    (
        r"would make the legacy stream depend|StreamCaptureImplicit|\berror 906\b",
        "something ran on the default stream: gradients of a forward pass there, DDP made there (CUDA error 906)",
        "do everything under torch.cuda.stream(side), from build and the warm-up on",
    ),
    (
        r"event last recorded in a capturing stream|CapturedEvent|\berror 907\b",
        "an event of the capture was waited for or timed on the host (CUDA error 907)",
        "record and read events outside of the step",
    ),
    (
        r"thread-local capture sequence from another thread|StreamCaptureWrongThread|\berror 908\b",
        "another thread ended the capture than began it (CUDA error 908)",
        "begin and end a capture in one thread",
    ),
    # --- values, shapes, memory, ranks
    (r"_local_scalar_dense|\.item\(\)", *_READS),
    (r"nonzero|data-dependent", *_SHAPE),
    (
        r"out of memory",
        "the graph's memory does not fit beside what is there",
        "capture smaller parts or fewer shapes; graphs keep the memory of their activations",
    ),
    (r"illegal memory access|misaligned address", *_MEMORY),
    (r"\bNCCL\b|ProcessGroup|c10d", *_COLLECTIVE),
)


def explained(message: str, reason: str = "") -> tuple[str, str]:
    """Return (cause, what to do) for the message and the reason of a failed capture; two empty texts if unknown."""
    if reason in _OF_RULES:
        return _OF_RULES[reason]
    for pattern, cause, remedy in _KNOWN:
        if re.search(pattern, message, re.IGNORECASE):
            return cause, remedy
    return "", ""
