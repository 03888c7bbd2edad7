"""common/memory: what is free, and what an out-of-memory error said."""

import pytest
import torch

from graph_worth.machine import memory

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


def test_bytes_around_two_blocks_are_before_the_first_and_after_the_last(monkeypatch):
    now = {"allocated": 1, "reserved": 2}
    peak = dict(now)

    def take(allocated, reserved):
        now.update(allocated=allocated, reserved=reserved)
        peak.update({name: max(peak[name], now[name]) for name in now})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.update(now))
    for name in now:
        monkeypatch.setattr(torch.cuda, f"memory_{name}", lambda name=name: now[name])
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda name=name: peak[name])
    facts = {}
    take(100, 100)  # a peak of before
    take(1, 2)
    with memory.noted(facts):
        take(7, 9)
        take(3, 4)
    with memory.noted(facts):
        take(6, 8)
        take(5, 6)
    assert facts == {
        "before": {"allocated": 1, "reserved": 2},
        "peak": {"allocated": 7, "reserved": 9},
        "after": {"allocated": 5, "reserved": 6},
    }


def test_without_a_gpu_no_bytes_are_noted():
    facts = {}
    if not torch.cuda.is_available():
        with memory.noted(facts):
            torch.empty(8)
        assert facts == {}


@pytest.mark.gpu
def test_torchs_allocator_is_noted_on_a_gpu():
    facts = {}
    with memory.noted(facts):
        kept = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    size = facts["after"]["allocated"] - facts["before"]["allocated"]
    assert size == kept.nbytes and facts["peak"]["allocated"] - facts["before"]["allocated"] == 192 << 20
    assert facts["peak"]["reserved"] >= facts["peak"]["allocated"]
