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

from graph_worth import mark, section, variant
from graph_worth.parallel import collectives
from moe.exchange import require_capturable
from moe.state import State
from moe.train import forward_and_backward


@variant(
    "eager_static",
    kind="eager",
    help="eager with fixed numbers of rows between ranks; an overflow runs the pass again without them",
    parity="bitwise",
    traits={"extra_work": "sends padding, and reads after each pass whether rows were left out"},
)
class EagerStatic:
    """Kernels launched one by one."""

    def __init__(self, state: State, capture):
        self.state, self.exchange = state, state.exchange
        capture.strategy = "none, rows in static buffers"
        # A rerun launches other kernels than a pass with static buffers: both are warm then.
        capture.warm_up(lambda state, index: self._step(index, self._both_passes))
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
        forward_and_backward(self.state)
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
                forward_and_backward(self.state)
                self.reruns.append((begin, self._now()))

    def static_pass(self):
        """Forward and backward of all microbatches, and the rows of the fullest buffer of all ranks."""
        with self.exchange.static_buffers():
            self.exchange.most_rows.zero_()
            forward_and_backward(self.state)
            collectives.all_reduce_max_(self.exchange.most_rows)

    def run_static(self):
        self.static_pass()

    def counted(self) -> dict:
        """Steps, reruns, their mean ms, and the rows of the fullest buffer over its capacity, since the last call."""
        if self.reruns and self.state.device.type == "cuda":
            torch.cuda.synchronize(self.state.device)
        on_cpu = self.state.device.type == "cpu"
        rerun_times = [(end - begin) * 1e3 if on_cpu else begin.elapsed_time(end) for begin, end in self.reruns]
        mean = statistics.mean(rerun_times) if rerun_times else None
        counted = {"steps": self.num_steps, "reruns": len(rerun_times), "rerun_ms": mean, "used": round(self.used, 4)}
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

    def close(self) -> dict:
        return self.counted()


@variant(
    "graph_static",
    kind="graph",
    help="forward and backward of all microbatches with their exchange in one graph; reruns as eager_static",
    graphs=1,
    parity="bitwise",
)
class GraphedStatic(EagerStatic):
    """A pass is one replay, with the communication of the ranks in it; clipping and Adam are eager."""

    def __init__(self, state: State, capture):
        require_capturable(state.exchange.size, "iteration")
        super().__init__(state, capture)
        capture.strategy = "forward and backward of all microbatches, rows in static buffers"
        pool = capture.pool()
        with capture.capturing():
            self.graph, _ = pool.capture(self.static_pass, state.static)

    def run_static(self):
        with section("replay"):
            self.graph.replay()
