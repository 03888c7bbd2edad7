"""common/memory: what is free, and what an out-of-memory error said."""

import pytest
import torch

from common.machine import memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# torch's own words (c10/cuda/CUDACachingAllocator.cpp), one line.
OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 79.15 GiB of which {free} is free. "
    "Process 4242 has 77.94 GiB memory in use. Of the allocated memory 77.02 GiB is allocated by PyTorch, with 2.00 "
    "MiB allocated in private pools (e.g., CUDA Graphs), and 414.53 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management"
)


def pretend_gpu(monkeypatch, **numbers):
    for name, value in numbers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)


@pytest.mark.parametrize(("asked", "free"), [("2.00 GiB", "1.20 GiB"), ("512 bytes", "0 bytes")])
def test_an_out_of_memory_error_is_one_line_with_bytes_asked_and_free(asked, free):
    error = torch.OutOfMemoryError(OUT_OF_MEMORY.format(asked=asked, free=free))
    assert memory.explain_oom(error, CUDA) == f"out of memory: asked for {asked}, {free} free"


def test_other_words_are_kept_and_the_free_memory_is_asked_for(monkeypatch):
    pretend_gpu(monkeypatch, mem_get_info=(3 << 29, 80 << 30))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.\nsecond line")
    expected = "out of memory: CUDA out of memory. Tried to allocate more than 1EB memory."
    assert memory.explain_oom(error, CUDA) == expected + ", 1.50 GiB free"
    assert memory.explain_oom(error, CPU) == expected
    assert memory.explain_oom(torch.OutOfMemoryError(), CUDA) == "out of memory: OutOfMemoryError, 1.50 GiB free"


def test_a_batch_that_needs_more_than_is_free_is_refused(monkeypatch):
    pretend_gpu(monkeypatch, mem_get_info=(1000, 80 << 30))
    memory.require_batch(2, 1000, CUDA)
    memory.require_batch(2, 1001, CPU)
    with pytest.raises(torch.OutOfMemoryError, match="--batch 2 needs 1,001 bytes, 1,000 are free: lower --batch"):
        memory.require_batch(2, 1001, CUDA)
