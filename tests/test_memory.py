"""common/memory: the record's four numbers, and what an out-of-memory error said."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import memory, record
from common.capture import Pool

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.mark.parametrize(
    ("asked", "free"),
    [
        ("2.00 GiB", "1.20 GiB"),
        ("20.00 MiB", "9.44 MiB"),
        ("1.00 KiB", "1.50 KiB"),
        ("2.00 GiB", "0 bytes"),
        ("512 bytes", "0 bytes"),
    ],
)
def test_an_out_of_memory_error_is_one_line_with_bytes_asked_and_free(asked, free):
    error = torch.OutOfMemoryError(OUT_OF_MEMORY.format(asked=asked, free=free))
    assert memory.explain_oom(error, CUDA) == f"out of memory: asked for {asked}, {free} free"


def test_other_words_are_kept_and_the_free_memory_is_asked_for(monkeypatch):
    pretend_gpu(monkeypatch, mem_get_info=(3 << 29, 80 << 30))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than 1EB memory.\nsecond line")
    expected = "out of memory: CUDA out of memory. Tried to allocate more than 1EB memory."
    assert memory.explain_oom(error, CUDA) == expected + ", 1.50 GiB free"
    assert memory.explain_oom(error, CPU) == expected


def test_an_error_without_a_text_is_explained_too(monkeypatch):
    pretend_gpu(monkeypatch, mem_get_info=(3 << 29, 80 << 30))
    line = memory.explain_oom(torch.OutOfMemoryError(), CUDA)
    assert line.startswith("out of memory") and line.endswith("1.50 GiB free")


def test_the_account_on_the_cpu():
    pools = [Pool(CPU), Pool(CPU)]
    x = torch.zeros(1000)
    for pool in pools:
        pool.capture(lambda: x + 1)
    big = torch.ones(512 << 20, dtype=torch.uint8)
    num_bytes = big.nbytes
    del big  # the peak is over the life of the process
    account = memory.account(CPU, pools, memory.Peaks(CPU))
    assert set(account) == set(record.TEMPLATE["memory"])
    assert account["graph_pool_bytes"] == 2 * 4000
    assert num_bytes < account["peak_allocated_bytes"] < 1 << 40
    assert account["peak_reserved_bytes"] is None and account["device_used_bytes"] is None, "not measured is not zero"
    assert memory.account(CPU, [], memory.Peaks(CPU))["graph_pool_bytes"] == 0


def test_the_peak_on_the_cpu_is_not_that_of_the_process_that_started_it():
    """Linux hands the starting process's peak down to getrusage; a small run of a large harness must not show it."""
    big = torch.ones(800 << 20, dtype=torch.uint8)
    code = (
        "import torch; from common import memory; cpu = torch.device('cpu'); "
        "print(memory.account(cpu, [], memory.Peaks(cpu)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0 < int(re.search(r"'peak_allocated_bytes': (\d+)", answer.stdout)[1]) < big.nbytes


def test_the_account_on_a_gpu(monkeypatch):
    pretend_gpu(
        monkeypatch, mem_get_info=(30 << 30, 80 << 30), max_memory_allocated=41 << 30, max_memory_reserved=45 << 30
    )
    assert memory.account(CUDA, [], memory.Peaks(CUDA)) == {
        "peak_allocated_bytes": 41 << 30,
        "peak_reserved_bytes": 45 << 30,
        "graph_pool_bytes": 0,
        "device_used_bytes": 50 << 30,
    }
    assert memory.free_bytes(CUDA) == 30 << 30


def test_what_the_measurement_alone_needs_is_no_peak_of_the_variant(monkeypatch):
    """The peak before the block and after it count, what the block itself reaches does not."""
    now = {"peak": 20 << 30, "emptied": 0}

    def reset(device=None):
        now["peak"] = 22 << 30

    pretend_gpu(monkeypatch, mem_get_info=(30 << 30, 80 << 30))
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: now["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: now.update(emptied=now["emptied"] + 1))
    peaks = memory.Peaks(CUDA)
    with peaks.set_aside():
        now["peak"] = 70 << 30
    assert now["emptied"] == 1
    assert memory.account(CUDA, [], peaks)["peak_reserved_bytes"] == 22 << 30
    now["peak"] = 10 << 30
    assert memory.account(CUDA, [], peaks)["peak_allocated_bytes"] == 20 << 30, "the peak before still counts"


def test_what_the_cpu_does_not_have():
    assert memory.free_bytes(CPU) is None
    assert memory.allocator_events(CPU) == {}


def test_allocator_retries(monkeypatch):
    pretend_gpu(monkeypatch, memory_stats={"num_alloc_retries": 3, "num_ooms": 1, "active.all.peak": 7})
    assert memory.allocator_events(CUDA) == {"num_alloc_retries": 3, "num_ooms": 1}


def test_gib():
    assert memory.gib(None) == "-"
    assert memory.gib(0) == "0.00 GiB"
    assert memory.gib(3 << 29) == "1.50 GiB"
