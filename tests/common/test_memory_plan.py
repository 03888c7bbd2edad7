import json
import os
import random
import re
import subprocess
import sys

import pytest

from common import memory_plan
from common.memory_plan import GIB, MemoryPlan, choose, kept_by_layers, reserved_bytes

MIB = 2**20
NAMES = ("q", "o", "f")


# --- what layers keep


def test_groups_are_of_the_last_layers():
    def kept(keep, num_layers):
        return ["".join(sorted(names)) for names in kept_by_layers(keep, NAMES, num_layers)]

    assert kept("all", 2) == kept("auto", 2) == ["foq"] * 2 and kept("least", 2) == ["", ""]
    assert kept("2 q f, 1 all", 4) == ["", "fq", "fq", "foq"]
    # Of fewer layers the last ones.
    assert kept("2 q f, 1 all", 2) == ["fq", "foq"] and kept("2 q f, 1 all", 1) == ["foq"]
    assert kept("1 q,1000000000000 o", 2) == ["o", "o"] and kept("0 q", 1) == [""]


@pytest.mark.parametrize("keep", ["", "most", "2", "2 g", "q 2", "-1 q", "1 q,", "1 all q", "1.5 q"])
def test_what_is_no_group_is_one_line_with_the_items(keep):
    with pytest.raises(ValueError, match=rf"^--keep {re.escape(keep)}: takes auto, all, least.* items are q, o, f$"):
        kept_by_layers(keep, NAMES, 3)


@pytest.mark.parametrize(
    "total_gb, budget, chosen",
    [
        (150, 100, "all"),
        (150, 99, "2 q"),
        (150, 60, "2 q"),
        # The choice for the smaller card, where another program takes memory.
        (150, 59, "1 q"),
        (150, 29, "least"),
        # Of a larger card nothing is taken, though it is predicted to fit.
        (141, 99, "2 q"),
        (140, 99, "1 q"),
        (80, 30, "1 q"),
        (79, 99, "least"),
        (79, 100, "all"),
    ],
)
def test_the_first_choice_that_fits_is_taken(total_gb, budget, chosen):
    predicted = {"all": 100, "2 q": 60, "1 q": 30, "least": 10}
    cards = {80: "1 q", 141: "2 q"}
    assert choose("auto", cards, total_gb * 10**9, budget, predicted.__getitem__) == chosen


def test_a_choice_of_the_user_is_taken_or_refused_with_the_bytes():
    assert choose("2 q", {80: "1 q"}, 0, 60 * GIB, lambda keep: 60 * GIB) == "2 q"
    with pytest.raises(ValueError, match=r"^--keep 2 q: 60.5 GiB are predicted, 60.0 GiB are free: keep less$"):
        choose("2 q", {80: "1 q"}, 0, 60 * GIB, lambda keep: 60 * GIB + GIB // 2)


# --- what a user and a record see


def test_the_table_says_how_many_layers_keep_each_item():
    plan = MemoryPlan(
        {"q": 16 * MIB, "o": 20 * MIB, "f": 40 * MIB, "unused": 0}, kept_by_layers("2 q o, 1 all", NAMES, 4), 1000 * MIB
    )
    assert plan.bytes == (1000 + 3 * 36 + 40) * MIB
    lines = plan.text().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [re.split(r"  +", line.strip()) for line in lines] == [
        ["layers that", "keep it", "compute it again", "GiB"],
        ["q, o", "3", "1", "0.11"],
        ["f", "1", "3", "0.04"],
        ["fixed", "0.98"],
        ["predicted", "1.12"],
    ]


# --- torch's caching allocator


ALLOCATIONS = {
    "nothing is allocated for no bytes": ([0, 0], 0),
    "4096 blocks of 512 bytes fill a small segment": ([1] * 4097, 4),
    "1 MiB is small": ([MIB] * 2, 2),
    "a small one does not go into a large segment": ([3 * MIB, MIB], 22),
    "below 10 MiB two share a segment": ([10 * MIB - 512] * 2, 20),
    "rounded up to 2 MiB": ([10 * MIB + 1] * 2, 24),
    # 12 - 10.5 MiB exceeds 1 MiB and is split off; 12 - 11.5 MiB is not.
    "the rest of a large segment serves": ([10 * MIB + 512 * 1024, 1280 * 1024], 12),
    "a rest of up to 1 MiB does not": ([11 * MIB + 512 * 1024, MIB + 512], 32),
    # Free are 6 MiB of the first segment and 1.75 MiB of the second, which the 1.5 MiB take.
    "the smallest block that fits": ([7 * MIB, 7 * MIB, 10 * MIB + 256 * 1024, 1536 * 1024, 6 * MIB], 20 + 12),
    "six of 3 MiB, the last with the rest": ([3 * MIB] * 7, 40),
}


@pytest.mark.parametrize("case", ALLOCATIONS)
def test_segments_of_allocations(case):
    sizes, mib = ALLOCATIONS[case]
    assert reserved_bytes(sizes) == mib * MIB


@pytest.mark.parametrize("size", [700, MIB, 3 * MIB, 37_000_001])
def test_the_share_of_one_allocation_is_what_many_of_them_take(size):
    many = 4096
    share = reserved_bytes([size] * many) / many
    assert memory_plan.share_bytes(size) == pytest.approx(share, rel=2e-3, abs=1)


@pytest.mark.gpu
def test_a_gpus_allocator_reserves_what_is_predicted():
    generator = random.Random(11)
    sizes = [generator.choice((700, 65536, 700_000, 3 * MIB, 7 * MIB, 11_000_000, 37_000_001)) for _ in range(200)]
    listed = [sizes, *(case for case, _ in ALLOCATIONS.values())]
    # A fresh process: in this one other tests have left segments with free blocks.
    program = """
import json, sys
import torch

answers = []
for sizes in json.load(sys.stdin):
    kept = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    answers.append(torch.cuda.memory_reserved())
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
print(json.dumps(answers))
"""
    default = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, input=json.dumps(listed), capture_output=True, text=True, check=True, env=default)
    assert json.loads(answer.stdout) == [reserved_bytes(case) for case in listed]
