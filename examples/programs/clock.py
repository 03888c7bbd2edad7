"""The clock of these programs. It prints a line of JSON, which benchmarks/epochs.py reads."""

import argparse
import json
import time

import torch

from graph_worth.measuring.kernel_trace import Profile, facts, profiled

STEADY_FROM, NUM_HEAT, NUM_PROFILED = 30, 20, 5


class Clock:
    """Times an epoch. The GPU is synchronised before each reading.

    Attributes:
        num_batches: of the epoch. On a GPU the last 25 heat it up and are profiled, and their seconds do not count.
    """

    def __init__(self, models=("",)):
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", choices=models, default=models[0])
        parser.add_argument("--form", choices=("eager", "graphed", "compile"), default="eager")
        parser.add_argument("--steps", type=int, default=100)
        self.model, self.form, self.steps = vars(parser.parse_args()).values()
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        self.num_batches = self.steps + (NUM_HEAT + NUM_PROFILED) * self.on_gpu
        self._count, self._steady_from = 0, min(STEADY_FROM, self.steps // 2)
        self._profile = Profile()
        self._turns = profiled(self._profile, NUM_PROFILED, NUM_HEAT) if self.on_gpu else iter(())

    def _now(self):
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.monotonic()

    def begin(self):
        """Begin the epoch: model and data are there, and nothing has run."""
        self._begin_s = self._steady_s = self._now()

    def step(self):
        """Note that a step was made."""
        self._count += 1
        if self._count == self._steady_from:
            self._steady_s = self._now()
        if self._count == self.steps:
            self._end_s = self._now()
        if self._count >= self.steps:
            next(self._turns, None)
            self._resumed_s = time.monotonic()

    def end(self, losses, replays=0):
        """End the epoch, which has saved its checkpoint, and print what was measured."""
        seconds = self._now() - self._begin_s - (self._resumed_s - self._end_s)
        steady_ms = 1e3 * (self._end_s - self._steady_s) / (self.steps - self._steady_from)
        busy_ms = facts(self._profile.events, NUM_PROFILED)["busy_ms"]
        numbers = {"epoch_s": seconds, "step_ms": steady_ms, "busy_ms": busy_ms, "replays": replays, "losses": losses}
        print(json.dumps(numbers), flush=True)
