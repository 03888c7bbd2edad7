"""What a training script prints: a card before it builds anything, a table when it has measured."""

import statistics
import sys

from common import memory

LONG_STEP_MS = 400.0


def print_card(record, workload):
    """What runs where, and what the script says of it."""
    env = record["env"]
    where = f"{env['gpu_name']} x{env['num_gpus']}" if record["device"] == "cuda" else f"CPU, {env['cpu']}"
    print(f"{record['model']}/{record['preset']}  {record['variant']}  {where}  torch {env['torch']}")
    for line in [*workload.card, *workload.notes]:
        print(line)
    sys.stdout.flush()


def print_end(record, workload):
    """Capture, some losses, and the table of a run that was timed."""
    capture, status = record["capture"], record["status"]
    if capture["strategy"]:
        seconds = ", ".join(
            f"{name[:-2]} {capture[name]:.2f} s" for name in ("warmup_s", "compile_s", "capture_s") if capture[name]
        )
        print(f"{capture['strategy']}" + (f" | {seconds}" if seconds else ""))
    losses, times = record["numerics"]["loss"], record["steps"]["gpu_ms"]
    for index in range(0, len(losses), max(1, len(losses) // 10)):
        timing = f"  {times[index]:9.2f} ms" if times else ""
        print(f"step {index:4d}{timing}  loss {losses[index]:9.5f}")
    if status != "pass":
        print(f"{status}: {record['message']}")
        return
    if record["statistic_ms"]:
        _print_table(record, workload)


def _print_table(record, workload):
    ms, kind = record["statistic_ms"], record["device"]
    ordered = sorted(record["steps"]["gpu_ms"])
    p95 = statistics.quantiles(ordered, n=20, method="inclusive")[-1] if len(ordered) > 1 else ordered[0]
    unsettled = "steps or clock had not settled" if record["conditions"]["settled"] is False else ""
    rows = [
        ("step", f"{ms:.2f} ms", _statistic(record["steps"]["batch"])),
        # A twentieth of a few long steps is not a step.
        *([("tail", f"{p95 / ms:.3f}", "p95 over step")] if ms <= LONG_STEP_MS else []),
        ("window", _or_dash(record["conditions"]["window_s"], "s"), unsettled),
        ("rate", f"{record['extra']['items_per_s']:,.0f} {record['unit']}/s", ""),
    ]
    if kind == "cuda":
        tflops = record["flops_per_step"] / ms / 1e9
        share = f"{100 * tflops * 1e12 / workload.peak_flops:.1f} % of the named peak" if workload.peak_flops else ""
        rows += [
            ("compute", f"{tflops:.0f} TFLOP/s", share),
            ("issue", _or_dash(record["issue_ms"], "ms"), "host time to issue a step"),
            ("busy", _or_dash(record["busy_ms"], "ms"), "GPU time with a kernel running"),
            ("optimizer", _or_dash(record["optimizer_ms"], "ms"), ""),
            ("reserved", memory.gib(record["memory"]["peak_reserved_bytes"]), "peak"),
        ]
    if record["capture"]["num_graphs"]:
        replays = f"{record['capture']['num_replays']} of {record['capture']['expected_replays']}"
        rows.append(("replays", replays, f"{record['capture']['num_graphs']} graphs"))
        rows.append(("pool", memory.gib(record["memory"]["graph_pool_bytes"]), ""))
    for name, value, note in rows:
        print(f"{name:10s} {value:>16s}  {note}".rstrip())


def _statistic(batch):
    """What the time of a step is, for steps of these kinds of batch; see common/measure.py."""
    num_kinds = len(set(batch))
    return f"median of {len(batch)}" if num_kinds == 1 else f"mean of {num_kinds} kinds' medians, {len(batch)} steps"


def _or_dash(value, unit):
    return "-" if value is None else f"{value:.2f} {unit}"
