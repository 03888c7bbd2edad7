r"""A run as MLPerf logs it: `:::MLLOG` lines, one JSON object each, for tools that read such logs.

    init_start  submission_*  seed  global_batch_size  opt_* ...  tracked_stats{warmup_time, ...}  init_stop
    run_start  block_start  tracked_stats{train_step_time, throughput, reduced_train_loss} ...  block_stop
    eval_start  eval_accuracy  eval_stop  run_stop{status}

Building, warm-up and capture lie between init_start and init_stop. A log is no submission and claims no compliance:
models are scaled down, nothing is trained to a quality target, no division is named. What a log of ours keeps to stands
in mllog_rules.yaml, for the official checker:

    python -m mlperf_logging.compliance_checker --usage training --ruleset 5.1.0 \
        --config $PWD/graph_worth/script/mllog_rules.yaml run.mllog

Nothing is written while it trains. The lines of steps are written afterwards, with the times at which the steps ended:
the wall clock at the first step's start plus the step times, stretched so that the last step ends where the wall time
of training does.
"""

import itertools
import sys
import time
from pathlib import Path

from graph_worth.files import json_line
from graph_worth.folders import CODE

TOKEN = ":::MLLOG"
START, END, POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"
MAX_STEP_LINES = 200


class Log:
    """Lines of one run. path: a file, or "-" for stdout."""

    def __init__(self, path: str):
        self.samples_per_step = 0
        # One clock for all lines, so that a wall clock that is set meanwhile cannot disorder them.
        self.origin_s = time.time() - time.monotonic()
        self._end_s: float | None = None
        self.file = sys.stdout
        if path != "-":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "w")  # noqa: SIM115

    def begin(self, result: dict) -> None:
        """Say what runs, before anything is built."""
        env = result["env"]
        platform = f"{env['num_gpus']} x {env['gpu_name']}" if result["device"] == "cuda" else f"CPU, {env['cpu']}"
        self._event(START, "init_start")
        self._event(POINT, "submission_benchmark", result["model"], preset=result["preset"], variant=result["variant"])
        self._event(POINT, "submission_org", "none, this is not a submission")
        self._event(POINT, "submission_platform", platform)

    def say(self, values: dict) -> None:
        """Say how it trains, a line for each of MLPerf's keys; global_batch_size, of all ranks, counts samples."""
        self.samples_per_step = values.get("global_batch_size", self.samples_per_step)
        for key, value in values.items():
            self._event(POINT, key, value)

    def end_init(self, capture) -> None:
        """Say what came before training. warmup_time (s) has compile_time and capture_time in it."""
        parts = {"compile_time": capture.compile_s, "capture_time": capture.capture_s}
        total_s = capture.warmup_s + sum(parts.values())
        times = {name: round(seconds, 6) for name, seconds in {"warmup_time": total_s, **parts}.items()}
        self._event(POINT, "tracked_stats", times, step=0)
        self._event(END, "init_stop")

    def steps(self, step_ms: list[float], losses: list[float], start_s: float, wall_s: float) -> None:
        """Say how steps went: a line each, or at most MAX_STEP_LINES, each with the mean over the steps since the last.

        Args:
            step_ms: of each step.
            losses: of steps 0, 1, ...; where there are fewer than steps, the last one is the last step's.
            start_s: time.monotonic() when the first step began.
            wall_s: seconds from then to the end of the last step.
        """
        num_steps = len(step_ms)
        ends_ms = list(itertools.accumulate(step_ms))
        stretch = wall_s / ends_ms[-1]  # s of wall clock per ms of steps
        by_step = dict(enumerate(losses[:-1])) | {num_steps - 1: losses[-1]}
        self._event(START, "run_start", at_s=start_s)
        self._event(START, "block_start", at_s=start_s, samples_count=0)
        last, every = 0, -(-num_steps // MAX_STEP_LINES)
        for count in [*range(every, num_steps, every), num_steps]:
            seconds = sum(step_ms[last:count]) / (count - last) / 1e3
            value = {"train_step_time": round(seconds, 7), "throughput": round(self.samples_per_step / seconds, 3)}
            if count - 1 in by_step:
                value["reduced_train_loss"] = by_step[count - 1]
            at_s = start_s + stretch * ends_ms[count - 1]
            self._event(POINT, "tracked_stats", value, at_s=at_s, step=count, **self._samples(count))
            last = count
        self._end_s = start_s + wall_s
        self._event(END, "block_stop", at_s=self._end_s, **self._samples(num_steps))

    def evaluation(self, loss: float, num_steps: int, start_s: float) -> None:
        """One that began at start_s (time.monotonic()) and has just ended. loss: the mean, which is log perplexity."""
        self._end_s = time.monotonic()
        samples = self._samples(num_steps)
        self._event(START, "eval_start", at_s=start_s, **samples)
        self._event(POINT, "eval_accuracy", loss, at_s=self._end_s, **samples)
        self._event(END, "eval_stop", at_s=self._end_s, **samples)

    def finish(self, result: dict) -> None:
        """Write run_stop, at the time when training ended."""
        status = {"status": "success"}
        if result["status"] != "pass":
            status = {"status": "aborted", "reason": f"{result['status']}: {result['message']}"}
        self._event(END, "run_stop", at_s=self._end_s, **status)
        if self.file is not sys.stdout:
            self.file.close()

    def _samples(self, num_steps):
        return {"samples_count": num_steps * self.samples_per_step}

    def _event(self, event_type, key, value=None, at_s=None, **metadata):
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename).relative_to(CODE).as_posix()
        line = {
            "namespace": "",
            "time_ms": int((self.origin_s + (time.monotonic() if at_s is None else at_s)) * 1e3),
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": {"file": file, "lineno": caller.f_lineno, **metadata},
        }
        print(TOKEN, json_line(line), file=self.file, flush=True)
