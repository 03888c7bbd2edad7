"""Records, traces and sweeps made by hand, for the tests of figures."""

import gzip
import itertools
import json
import math

from benchmarks.frame import family
from common import record as records
from tests.table_records import schema_1

_runs = itertools.count()


def make(variant="eager", number=1, step_ms=10.0, num_steps=50, scatter=0.004, **changes):
    """A sound CUDA record, no two with the same steps; changes: top-level keys, or dicts that update a group."""
    record = records.blank(
        model="gpt3", preset="bench", variant=variant, round=number, status="pass", device="cuda", message=""
    )
    record["env"].update(
        gpu_name="NVIDIA H200", gpu_uuid="GPU-0", boot_id="boot", source_hash="abc", run_hash="run", num_gpus=1
    )
    record["env"].update(torch="2.13.0")
    record["env"].update(cuda="13.0", driver="580.1", git_sha="0123456789abcdef", git_dirty=False)
    record["extra"].update(traits={}, eagers=["eager"])
    eager = variant.startswith("eager")
    strategies = {"partial": "UNet forward, UNet backward", "graph": "full iteration"}
    record["capture"].update(
        strategy="none" if eager else strategies.get(variant, "layer"),
        warmup_s=1.0,
        compile_s=40.0 if family(variant) == "compile" else 0.0,
        capture_s=0.0 if eager else 0.5,
        num_graphs=0 if eager else 2,
    )
    if number:
        own = scatter * (1 + 1e-7 * next(_runs))
        times = [step_ms * (1 + own * math.sin(7.0 * index + number)) for index in range(num_steps)]
        times += [2 * step_ms - ms for ms in times]
        replays = len(times) * {"eager": 0, "graph": 1}.get(variant, 0 if eager else 8)
        record["steps"].update(gpu_ms=times, batch=[0] * len(times), wall_ms=sum(times))
        record["capture"].update(num_replays=replays, expected_replays=replays)
        record.update(statistic_ms=step_ms, busy_ms=0.8 * step_ms, issue_ms=0.9 * step_ms if eager else 0.1 * step_ms)
        pool = 0 if eager else 3 * 2**30
        record["memory"].update(peak_reserved_bytes=20 * 2**30 + pool, graph_pool_bytes=pool)
    for key, value in changes.items():
        record[key].update(value) if isinstance(value, dict) else record.__setitem__(key, value)
    return record


def put(folder, *found):
    for record in found:
        records.write(folder / records.file_name(record["variant"], record["round"], record.get("attempt", 1)), record)
    return folder


def session(speedups, noise=0.002, num_rounds=5, step_ms=10.0, **changes):
    """Rounds of eager and of each variant in `speedups` (variant -> speed-up), with scatter between the rounds."""
    found = []
    wobbles = [(-1) ** number * (1 + number / 10) for number in range(1, num_rounds + 1)]
    for number in range(1, num_rounds + 1):
        wobble = noise * (wobbles[number - 1] - sum(wobbles) / num_rounds)
        found.append(make("eager", number, step_ms, **changes))
        found += [
            make(variant, number, step_ms / (speedup * (1 + wobble)), **changes)
            for variant, speedup in speedups.items()
        ]
    return found


def both(base_ms, graph_ms, issue_ms, busy_ms, rounds=(1,), model="gpt3", predicted=None, **changes):
    """Rounds of eager and graph of one session; predicted: what the queue model says of each."""
    said = [{"extra": {"queue_model": {"step_ms": ms}}} if ms else {} for ms in predicted or (None, None)]
    found = []
    for number in rounds:
        found.append(
            make("eager", number, base_ms, model=model, issue_ms=issue_ms, busy_ms=0.5 * busy_ms, **said[0], **changes)
        )
        found.append(make("graph", number, graph_ms, model=model, issue_ms=1.0, busy_ms=busy_ms, **said[1], **changes))
    return found


def failed(variant, status, message="", **changes):
    return make(variant, 0, status=status, message=message, **changes)


def trace_file(folder, variant, gap_us=5.0, streams=1, num=60):
    events = [
        {
            "name": "k",
            "cat": "kernel",
            "ph": "X",
            "ts": (100.0 + gap_us) * index,
            "dur": 100.0,
            "pid": 0,
            "tid": index % streams,
        }
        for index in range(num)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    data = gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0)
    (folder / f"{variant}.r1.trace.json.gz").write_bytes(data)


def gpt3(root, graph=1.05, **options):
    folder = put(root / "h200x1" / "gpt3-bench", *session({"graph": graph}, **options))
    trace_file(folder, "eager", 20.0)
    trace_file(folder, "graph", 2.0)
    return folder


def rates(folder, variants, preset="full", items=8192, num_rounds=3, gpu="NVIDIA H200", **changes):
    """Rounds of llama2_lora. variants: name -> (useful TFLOP/s, GiB reserved)."""
    flops, found = 3e11 * items, []
    for number in range(1, num_rounds + 1):
        for variant, (tflops, gib) in variants.items():
            record = make(
                variant,
                number,
                flops / tflops / 1e9,
                model="llama2_lora",
                preset=preset,
                flops_per_step=flops,
                items_per_step=items,
                unit="tokens",
                memory={"peak_reserved_bytes": gib * 2**30},
                extra={"traits": {"layer": "te"} if variant.endswith("_te") else {}, "eagers": ["eager"]},
                env={"gpu_name": gpu},
                **changes,
            )
            found.append(record)
    return put(folder, *found)


def lora(root):
    """Llama 2 LoRA at 8192 tokens, with both kinds of layer, in less memory, and on a smaller GPU."""
    lean, te = {"eager": (905.0, 136), "graph": (904.0, 137)}, {"eager_te": (760.0, 130), "graph_te": (761.0, 132)}
    rates(root / "h200x1" / "llama2_lora-full", lean | te)
    rates(root / "h200x1" / "llama2_lora-full-memory-gib-115", {"eager": (827.0, 114), "graph": (826.0, 115)})
    small = {"eager": (714.0, 76), "graph": (716.0, 76)}
    rates(root / "h100x1" / "llama2_lora-full", small, preset="full-l75", gpu="NVIDIA H100 80GB HBM3")


def sweep_file(folder, points, bracket, finding, **changes):
    sweep = {
        "schema": 1,
        "model": "gpt3",
        "preset": "bench",
        "over": "batch",
        "variant": "graph",
        "points": [
            {
                "value": value,
                "folder": f"batch-{value}",
                "speedup": speedup,
                "low": speedup and speedup * (1 - width),
                "high": speedup and speedup * (1 + width),
                "verdict": verdict,
                "ceiling": 1.5,
                "issue_ms": 10.0,
                "busy_ms": 5.0 * value,
                "eager_ms": 12.0,
                "graph_ms": 11.0,
                "status": status,
                "rounds": 5,
            }
            for value, speedup, width, verdict, status in points
        ],
        "crossover": bracket,
        "finding": finding,
        "env": {
            "device": "cuda",
            "gpu_name": "NVIDIA H200",
            "torch": "2.13.0",
            "driver": "580.1",
            "git_sha": "0123456789abcdef",
        },
    }
    sweep.update(changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(sweep))


POINTS = (
    (1, 1.62, 0.01, "faster", "pass"),
    (2, 1.34, 0.008, "faster", "pass"),
    (4, 1.08, 0.006, "faster", "pass"),
    (6, 1.004, 0.008, "unclear", "pass"),
    (8, 0.999, 0.003, "same", "pass"),
    (16, 0.99, 0.004, "slower", "pass"),
    (32, None, 0.0, None, "oom"),
)


def everything(root):
    """A root with what results/ may hold one day: five models, load, compile, failures, GPUs, a sweep."""
    h200 = root / "h200x1"
    gpt3(root, 1.009)
    put(h200 / "gpt3-bench", failed("graph_te", "unsupported", "graph_te needs a GPU and Transformer Engine: make te"))
    # Measured earlier, by code that is no longer there.
    old = schema_1(session({"graph": 2.0}, num_rounds=2, env={"boot_id": "earlier", "git_sha": "fedcba9876543210"}))
    put(h200 / "gpt3-bench", *(record | {"round": record["round"] + 10} for record in old))
    loaded = {"host_load": 16}
    put(h200 / "gpt3-bench-load16", *session({"graph": 1.15}, noise=0.03, **loaded))
    for model, preset, speedups in (
        ("llama2_lora", "bench", {"graph": 1.031, "compile": 1.02, "reduce_overhead": 1.06}),
        ("llama31", "bench", {"graph": 0.981, "graph_te": 0.955}),
        ("rnnt", "full", {"partial": 1.22, "graph": 1.58, "compile": 1.1}),
        ("stable_diffusion", "full", {"eager_sync": 0.93, "partial": 1.004, "graph": 1.012, "compile_graph": 1.3}),
    ):
        folder = put(h200 / f"{model}-{preset}", *session(speedups, model=model, preset=preset))
        for variant in ("eager", *speedups):
            trace_file(folder, variant, 10.0, 2 if variant == "partial" else 1)
    put(h200 / "llama2_lora-bench", failed("graph_overlap", "oom", "CUDA out of memory", model="llama2_lora"))
    for count, speedup in ((2, 1.02), (4, 1.05), (8, 1.09)):
        env = {"world_size": count, "num_gpus": count}
        put(root / f"h200x{count}" / "gpt3-bench", *session({"graph": speedup}, env=env))
    sweep_file(h200 / "sweep-gpt3-batch", POINTS, {"low": 4, "high": 6}, "graphs stop paying between batch 4 and 6")
    return root
