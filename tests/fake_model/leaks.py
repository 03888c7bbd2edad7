"""Prints how much higher the peak of a run is that leaks than that of one that does not, and what it leaked, in bytes.

python -m tests.fake_model.leaks FOLDER
"""

import json
import sys
from pathlib import Path

import torch

from tests.measured import Config, Measured, Variant

NUM_STEPS, LEAKED_BYTES = 400, 2**20
kept = []


def leak(index):
    kept.append(torch.ones(LEAKED_BYTES // 4))


def peak(before):
    config = Config(min_steps=NUM_STEPS)
    record = Measured(lambda state: Variant(state, before), Path(sys.argv[1]), str, config=config).record
    return record["memory"]["peak_allocated_bytes"]


if __name__ == "__main__":
    plain = peak(lambda index: None)
    print(json.dumps([peak(leak) - plain, LEAKED_BYTES * len(kept)]))
