"""Workers that make no step: each answer takes the seconds, by a clock of their own, that nanoGPT's took on an H200.

The times are of results/h200x1/your_step-bench-nanogpt-build: 20261128T125925Z (variants, compilers), 131226Z (starts).
"""

from collections import Counter

from graph_worth.harness import command as stopping
from tests.helpers.made_run import block

START_S, BUILD_S, END_S = 3.0, 2.4, 0.4
STEP_MS = {"eager": 14.5, "graph_step": 7.5, "compile": 13.0, "graph_step_compiled": 5.24, "reduce_overhead": 5.28}
# The first time in a run, and with the compiler's cache.
MADE_S = {"compile": (15.0, 5.7), "graph_step_compiled": (15.0, 6.2), "reduce_overhead": (8.3, 5.7)}
HASH_S, BLOCK_S, PROFILE_S = 0.015, 0.13, 0.9


class Clock:
    """The time, processes, and (what was done, build's process) -> calls, steps and seconds."""

    def __init__(self):
        self.now_s, self.processes, self.compiled = 0.0, [], set()
        self.calls, self.steps, self.seconds, self.asked = Counter(), Counter(), Counter(), Counter()

    def take(self, what, seconds, steps=0):
        self.now_s += seconds
        self.calls[what] += 1
        self.steps[what] += steps
        self.seconds[what] += seconds


def worker_class(clock: Clock, left_bytes=0, signals=None):
    """Return what stands for `WorkerProcess`, by this clock.

    left_bytes: what a variant leaves in torch's memory. signals: (command, variant, how often it was asked)
    -> signal that this process gets then.
    """

    class Modelled:
        def __init__(self, words, environment, log):
            self.begin_s, self.made, self.number = clock.now_s, {}, len(clock.processes)
            self.asked = []
            clock.processes.append(self)

        def wait(self):
            left_s = max(0.0, self.begin_s + START_S - clock.now_s)
            clock.take("start", left_s)
            return left_s

        def end(self, is_at_once=False):
            clock.take("end", END_S)

        def call(self, command, limit_s, waiting=None):
            name = command.get("variant", "")
            self.asked.append((command["do"], name))
            clock.asked[self.asked[-1]] += 1
            number = (signals or {}).get((*self.asked[-1], clock.asked[self.asked[-1]]))
            if number:
                stopping._stop(number, None)
            return {"say": "done"} | getattr(self, f"do_{command['do']}")(command, name)

        def make(self, name, what):
            if name not in self.made:
                first, again = MADE_S.get(name, (0.3, 0.3))
                is_known = name in clock.compiled or (name == "graph_step_compiled" and "compile" in clock.compiled)
                seconds = (
                    0.5 if name == "graph_step_compiled" and "compile" in self.made else again if is_known else first
                )
                clock.take(f"{what}: made", seconds)
                clock.compiled.add(name)
                self.made[name] = seconds
            is_graph = int(name.startswith("graph"))
            return {"graphs": is_graph, "promised_graphs": is_graph, "promised_replays": is_graph}

        def train(self, name, what, steps, more_s=0.0):
            clock.take(what, steps * STEP_MS[name] / 1e3 + more_s, steps)
            return {"hashes": [f"h{index}" for index in range(steps)], "losses": [1.0] * steps}

        def do_build(self, command, name):
            clock.take("build", BUILD_S)
            host = {"gpus": [{"name": "NVIDIA H200"}], "versions": {"torch": "2.13"}}
            facts = {"config": {}, "gpus": host["gpus"], "host": host, "period": 8, "least_steps": 10, "unit": "steps"}
            return facts | {"flops_per_step": 0.0, "items_per_step": 0.0}

        def do_parity(self, command, name):
            facts = self.make(name, "parity")
            course = self.train(name, "parity", command["steps"], command["steps"] * HASH_S + 0.15)
            if not command["keep"]:
                del self.made[name]
            return facts | course

        def do_capture(self, command, name):
            return self.make(name, "capture")

        def do_pilot(self, command, name):
            clock.take("pilot", command["steps"] * STEP_MS[name] / 1e3, command["steps"])
            return {"ms": STEP_MS[name], "reset_s": 0.01}

        def do_pace(self, command, name):
            clock.take("pace", 0.05)
            return {"operator_us": 9.0}

        def do_block(self, command, name):
            steps = command["untimed"] + command["timed"] + command["drained"]
            what = "block" if "seed" not in command else "audit" if "number" in command else "repetition"
            self.train(name, what, steps, BLOCK_S)
            more = {} if name.startswith("graph") else {"replays": 0, "expected_replays": 0}
            answer = block(name, 0, 0, ms=[STEP_MS[name]] * command["timed"], first=command.get("first", 0), **more)
            answer |= {"process": self.number, "whole_s": None}
            gone = ("build", "variant", "cycle", "place", "busy")
            return {key: value for key, value in answer.items() if key not in gone}

        def do_profile(self, command, name):
            self.train(name, "profile", command["steps"], PROFILE_S)
            share = float(name.startswith("graph"))
            return {"busy_ms": 5.0, "kernels": 400, "graph_share": share, "steps": command["steps"]}

        def do_course(self, command, name):
            return self.train(name, "course", command["first"] + command["steps"], 0.1)

        def do_alone(self, command, name):
            self.make(name, "alone")
            self.train(name, "alone", command["steps"])
            if not command.get("keep", True):
                del self.made[name]
            sizes = {"peak_reserved_bytes": 2**30, "driver_bytes": 2**31, "left_bytes": left_bytes}
            return {"step_ms": [STEP_MS[name]] * command["steps"], **sizes}

    return Modelled
