"""Static buffers for the exchange of rows, with overflow and rerun: `eager_static` and `graph_static`.

A rank sends each rank the same number of rows in every layer: `--rank-capacity-factor` times those of a balanced
router. So nothing is read on the host within a pass, and one graph holds forward and backward of all microbatches with
their exchange:

    for step in range(num_steps):
        replay: most_rows = 0, forward and backward, most_rows = max over ranks(most_rows)
        if most_rows > capacity:                        # read once a step; all ranks read the same
            forward_and_backward(state)                 # again, eager and dropless: main_grad is written anew
        clip(main_grad), adam(main_grad)                # nothing was applied before

`most_rows` counts the rows that a router chose for one rank in one layer. No row is dropped: a step trains what the
eager dropless one trains. Without ranks no row is left out, and the variants show what the buffers cost. Megatron
calls the factor moe_expert_rank_capacity_factor.
"""

import statistics
import time

import torch

from common.capture.pool import Pool
from common.measuring.marks import mark, section
from common.training.parallel import collectives
from common.variant import Capture, warm_up
from moe.exchange import require_capturable
from moe.state import State


class EagerStatic:
    """`eager_static`: kernels launched one by one. passes: `forward_and_backward` of train.py."""

    def __init__(self, state: State, passes):
        self.state, self.passes, self.exchange = state, passes, state.exchange
        self.capture = Capture(strategy="none, rows in static buffers")
        # A rerun launches other kernels than a pass with static buffers: both are warm then.
        warm_up(state, self.capture, lambda state, index: self._step(index, self._both_passes))
        self._forget()

    def step(self, index: int):
        self._step(index, self._pass_or_rerun)

    def _step(self, index, run):
        self.state.begin_step(index)
        run()
        with section("optimizer"):
            self.state.update()
        self.state.end_step(index)

    def _both_passes(self):
        self.passes(self.state)
        self.static_pass()

    def _pass_or_rerun(self):
        self.run_static()
        self.num_steps += 1
        mark()
        used = self.exchange.most_rows.item() / self.exchange.capacity  # the host waits for the pass
        self.used = max(self.used, used)
        if used > 1:
            with section("rerun"):
                begin = self._now()
                self.passes(self.state)
                self.reruns.append((begin, self._now()))

    def static_pass(self):
        """Forward and backward of all microbatches, and the rows of the fullest buffer of all ranks."""
        with self.exchange.static_buffers():
            self.exchange.most_rows.zero_()
            self.passes(self.state)
            collectives.all_reduce_max_(self.exchange.most_rows)

    def run_static(self):
        self.static_pass()

    def replays_of(self, index: int) -> int:
        return 0

    def counted(self) -> dict:
        """Steps, reruns, their mean ms, and the rows of the fullest buffer over its capacity, since the last call."""
        if self.reruns and self.state.device.type == "cuda":
            torch.cuda.synchronize(self.state.device)
        each = [self._ms(begin, end) for begin, end in self.reruns]
        mean = statistics.mean(each) if each else None
        counted = {"steps": self.num_steps, "reruns": len(each), "rerun_ms": mean, "used": round(self.used, 4)}
        self._forget()
        return counted

    def _forget(self):
        self.num_steps, self.reruns, self.used = 0, [], 0.0

    def _now(self):
        if self.state.device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, begin, end):
        return (end - begin) * 1e3 if self.state.device.type == "cpu" else begin.elapsed_time(end)

    def close(self) -> dict:
        return self.counted()


class GraphedStatic(EagerStatic):
    """`graph_static`: a pass is one replay, with the communication of the ranks in it; clipping and Adam are eager."""

    def __init__(self, state: State, passes):
        require_capturable(state.exchange.size, "iteration")
        super().__init__(state, passes)
        self.pool = Pool(state.device)
        self.capture.strategy = "forward and backward of all microbatches, rows in static buffers"
        self.capture.pools.append(self.pool)
        with self.capture.timed("capture_s"):
            self.graph, _ = self.pool.capture(self.static_pass, state.static)

    def run_static(self):
        with section("replay"):
            self.graph.replay()

    def replays_of(self, index: int) -> int:
        return 1

    def close(self) -> dict:
        self.pool.release()
        return super().close()
