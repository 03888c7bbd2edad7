"""A profile made up event by event, for tests of what reads profiles."""

from common import launches
from common.trace import Profile

ORIGIN_NS = 1_795_328_640_000_000_000
# The trace's clock is this much ahead of the host's, us.
AHEAD_US = 7.0


class Trace:
    """Host calls and GPU work of steps, in us from the first wait for the GPU on."""

    def __init__(self):
        self.events, self.stamps_ns, self.now, self.correlation = [], [], -1.0, 100
        self.gpu_end = 0.0
        self.first_ns = self.wait_for_gpu()

    def event(self, name, category, start_us, duration_us, correlation, tid=1):
        self.events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": start_us + AHEAD_US,
                "dur": duration_us,
                "tid": tid,
                "args": {"correlation": correlation},
            }
        )

    def call(self, name, duration_us=2.0, tid=1):
        self.correlation += 1
        kind = "cuda_driver" if name.startswith("cuL") else "cuda_runtime"
        self.event(name, kind, self.now, duration_us, self.correlation, tid)
        self.now += duration_us
        return self.correlation

    def wait_for_gpu(self):
        self.call("cudaDeviceSynchronize", 1.0)
        return ORIGIN_NS + round(1e3 * self.now)

    def stamp(self):
        self.stamps_ns[-1].append(ORIGIN_NS + round(1e3 * self.now))

    def launch(self, kernels_us, name="cudaLaunchKernel", gap_us=1.5, tid=1, category="kernel"):
        correlation = self.call(name, tid=tid)
        for us in kernels_us:
            start = max(self.now, self.gpu_end + gap_us)
            self.event("gemm", category, start, us, correlation, tid=7)
            self.gpu_end = start + us
        self.now += 3.0

    def profile(self):
        self.now = max(self.now, self.gpu_end)
        last_ns = self.wait_for_gpu()
        # Ending the profiler waits once more.
        self.now += 40.0
        self.wait_for_gpu()
        return Profile(self.events, 0.0, 1.0, (self.first_ns, last_ns))

    def steps(self):
        return launches.queue_steps(self.profile(), self.stamps_ns)
