"""What a gain on one GPU becomes where many wait for each other: the step of a whole cluster, simulated from records.

    make scale MODEL=gpt3       or    python -m benchmarks.scale results --model gpt3

A rank's times are those of timed steps in the records, less the optimizer: each rank of the cluster draws a run (a host
and a GPU) and one of its steps. The ranks of a tensor-parallel group wait for the slowest in every chunk, stages wait
for each other as the schedule has it (common/schedule.py), and replicas wait for the slowest one at the end. A step's
record does not say where in the step its time went, so there are two answers, and the truth lies between them:

    spread    all chunks and microbatches of a step are slower alike
    burst     a step's time beyond the run's 10th percentile falls on one chunk and microbatch, as an interruption does

The interval is a bootstrap over runs, 95 %, from the lower end of one to the upper end of the other. Not simulated:
time on the wire, the optimizer, and what eight ranks of one host do to each other.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks import frame, published
from common import schedule
from common.config import Parser

NUM_BOOT, SEED = 20, 0
LEGEND = (
    "runs: of eager + of the variant, on so many hosts or sessions. spread: a step's delay lies on all its "
    "microbatches alike; burst: on one of them. 95 %: over runs, of both."
)
SPREADS = ("spread", "burst")
# Of a chunk's forward and backward pass.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A cluster: its parallelism, chunks a stage, microbatches, and the ratio that was published for it."""

    gpus: int
    tp: int
    pp: int
    dp: int
    chunks: int
    microbatches: int
    published: float | None = None

    def __post_init__(self):
        assert self.gpus == self.tp * self.pp * self.dp, self


def _published(model, where):
    return next(ratio for row in published.PUBLISHED if row.model == model for ratio, at in row.speedups if at == where)


# NVIDIA's configurations of MLPerf v4.1: config_DGXH100_32x8x32x4x8_mbs2 and config_DGXH100_1452x8x6x4x6_mbs1_cg.
SCALES = {
    "gpt3": (
        Scale(gpus=256, tp=4, pp=8, dp=8, chunks=6, microbatches=128, published=_published("gpt3", "256 GPUs")),
        Scale(gpus=11_616, tp=4, pp=6, dp=484, chunks=8, microbatches=6, published=_published("gpt3", "11,616 GPUs")),
    )
}


# ------------------------------------------------------------------------------------------------
# The simulation


def actions(scale: Scale) -> list[tuple[int, int, tuple | None, tuple]]:
    """(stage, position in its order, what it waits for, itself) of every step of every stage, in an order in which each
    comes after what it waits for. What: (stage, step, microbatch)."""
    times = schedule.timeline(scale.pp, scale.chunks, scale.microbatches)
    found = []
    for stage, own in enumerate(times):
        numbered = schedule.numbered(schedule.order(scale.pp, stage, scale.chunks, scale.microbatches))
        for position, ((start, _), (step, microbatch)) in enumerate(zip(own, numbered, strict=True)):
            origin = schedule.origin(scale.pp, scale.chunks, stage, step)
            found.append((start, stage, position, origin and (*origin, microbatch), (stage, step, microbatch)))
    return [action[1:] for action in sorted(found, key=lambda action: action[:3])]


def cluster_steps(scale: Scale, runs, spread: str, num_steps: int, rng, plan=None) -> numpy.ndarray:
    """ms of `num_steps` steps of the cluster. runs: of each run the ms of its steps. plan: `actions(scale)`."""
    shape = (num_steps * scale.dp, scale.pp, scale.tp)
    drawn_ms, base_ms = _draw(runs, shape, rng)
    if spread == "spread":
        base_ms, extra_ms, place = drawn_ms, None, None
    else:
        base_ms = numpy.minimum(base_ms, drawn_ms)
        extra_ms, place = drawn_ms - base_ms, rng.integers(0, 2 * scale.chunks * scale.microbatches, shape)
    each_ms = base_ms / (scale.chunks * scale.microbatches)
    ended: dict[tuple, numpy.ndarray] = {}
    last = [numpy.zeros(shape[0]) for _ in range(scale.pp)]
    for stage, position, waits_for, name in plan or actions(scale):
        share = FORWARD_SHARE if name[1] > 0 else 1 - FORWARD_SHARE
        took = share * each_ms[:, stage]
        if extra_ms is not None:
            took = took + numpy.where(place[:, stage] == position, extra_ms[:, stage], 0.0)
        start = last[stage] if waits_for is None else numpy.maximum(last[stage], ended.pop(waits_for))
        ended[name] = last[stage] = start + took.max(axis=1)
    return numpy.maximum.reduce(last).reshape(num_steps, scale.dp).max(axis=1)


def _draw(runs, shape, rng):
    """(ms of a step, 10th percentile of its run) for each rank and step."""
    which = rng.integers(0, len(runs), shape)
    drawn, low = numpy.empty(shape), numpy.empty(shape)
    for index, steps_ms in enumerate(runs):
        mine = which == index
        drawn[mine] = rng.choice(steps_ms, mine.sum())
        low[mine] = numpy.quantile(steps_ms, 0.1)
    return drawn, low


def ratios(scale: Scale, eager, graph, num_steps: int, num_boot: int = NUM_BOOT) -> dict:
    """{"spread" and "burst": eager's mean step over graph's, "low" and "high": 95 %, of both} at this scale.

    eager, graph: of each run the ms of its steps.
    """
    plan, rng = actions(scale), numpy.random.default_rng(SEED)

    def ratio(spread, base, other):
        means = [cluster_steps(scale, runs, spread, num_steps, rng, plan).mean() for runs in (base, other)]
        return means[0] / means[1]

    def resampled(runs):
        return [runs[index] for index in rng.integers(0, len(runs), len(runs))]

    found = {spread: ratio(spread, eager, graph) for spread in SPREADS}
    boots = [ratio(spread, resampled(eager), resampled(graph)) for spread in SPREADS for _ in range(num_boot)]
    low, high = numpy.quantile(boots, (0.025, 0.975)) if boots else (numpy.nan, numpy.nan)
    return found | {"low": float(low), "high": float(high)}


def expected_skew_ms(runs, num_ranks: int, rng, num_draws: int = 20_000) -> float:
    """Median of slowest less fastest of `num_ranks` ranks that draw their steps alone."""
    drawn, _ = _draw(runs, (num_draws, num_ranks), rng)
    return float(numpy.median(drawn.max(axis=1) - drawn.min(axis=1)))


# ------------------------------------------------------------------------------------------------
# Records


def runs_of(found, variant: str, loaded: bool) -> list[numpy.ndarray]:
    """ms of forward and backward passes of each timed run of one process, its optimizer taken off."""
    chosen = [
        record
        for record in found
        if record["variant"] == variant
        and bool(record["host_load"]) == loaded
        and record["env"]["world_size"] == 1
        and record["optimizer_ms"] is not None
    ]
    return [numpy.array(record["steps"]["gpu_ms"]) - record["optimizer_ms"] for record in chosen]


def rows(found, model: str, variant: str, num_steps: int, num_boot: int = NUM_BOOT) -> list[dict]:
    """One GPU, then each cluster; on a quiet host, then beside busy processes. "ratios" is None without records."""
    result = []
    for host, loaded in (("quiet", False), ("busy", True)):
        eager, graph = runs_of(found, "eager", loaded), runs_of(found, variant, loaded)
        boots = {
            record["env"].get("boot_id") or record["session"] for record in found if bool(record["host_load"]) == loaded
        }
        row = {"host": host, "published": None, "ratios": None, "count": f"{len(eager)} + {len(graph)}, {len(boots)}"}
        if not (eager and graph):
            result.append(row | {"gpus": None})
            continue
        alone = float(numpy.concatenate(eager).mean() / numpy.concatenate(graph).mean())
        result.append(row | {"gpus": 1, "ratios": dict.fromkeys(SPREADS, alone)})
        for scale in SCALES[model]:
            got = ratios(scale, eager, graph, max(2, num_steps // scale.dp), num_boot)
            result.append(row | {"gpus": scale.gpus, "ratios": got, "published": scale.published})
    return result


def table(found: list[dict]) -> list[str]:
    """Lines of a Markdown table of `rows`."""
    lines = ["| GPUs | host | runs, hosts | eager over graph: spread | burst | 95 % | published |"]
    lines.append("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for row in found:
        cells = [f"{row['gpus']:,}" if row["gpus"] else "-", row["host"], row["count"] if row["gpus"] else "no record"]
        got = row["ratios"] or {}
        cells += [f"{got[spread]:.3f}x" if got else "-" for spread in SPREADS]
        cells.append(f"{got['low']:.3f} to {got['high']:.3f}" if "low" in got else "-")
        cells.append(f"{row['published']:.3f}x" if row["published"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def skews(found) -> list[str]:
    """For each variant with runs of two ranks: the skew that single ranks' steps let expect beside the measured one."""
    lines, rng = [], numpy.random.default_rng(SEED)
    for variant in sorted({record["variant"] for record in found}):
        alone = runs_of(found, variant, False)
        measured = [record["rank_skew_ms"] for record in found if record["variant"] == variant and record["ranks"]]
        measured = [skew for skew in measured if skew is not None]
        if alone and measured:
            expected = expected_skew_ms(alone, 2, rng)
            lines.append(f"{variant}: skew of two ranks {numpy.median(measured):.2f} ms, expected {expected:.2f} ms")
    return lines or ["skew: no record of two ranks beside records of one"]


def main(argv=None) -> int:
    """Print the table of a model and draw it. Exit status 2 for what cannot be simulated, said in one line."""
    parser = Parser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", help="folder of results")
    parser.add_argument("--model", required=True, metavar="NAME", help=f"one of {', '.join(SCALES)}")
    parser.add_argument("--preset", default="bench", metavar="NAME", help="whose records are a rank's (bench)")
    parser.add_argument("--variant", default="graph", metavar="NAME", help="what stands against eager (graph)")
    parser.add_argument("--steps", type=int, default=400, metavar="N", help="replica steps to simulate (400)")
    args = parser.parse_args(argv)
    if args.model not in SCALES:
        parser.error(f"--model {args.model}: no cluster is known of it, take one of {', '.join(SCALES)}")
    try:
        runs = frame.read(args.results)
    except FileNotFoundError as error:
        parser.error(str(error))
    found = [
        record
        for record in frame.timed(frame.records_of(runs.frame))
        if (record["model"], record["preset"]) == (args.model, args.preset) and record["device"] == "cuda"
    ]
    if not runs_of(found, "eager", False):
        parser.error(f"no timed eager runs of {args.model}/{args.preset} with their optimizer's time in {args.results}")
    made = rows(found, args.model, args.variant, args.steps)
    print("\n".join([*table(made), "", LEGEND, *skews(found)]))
    try:
        from benchmarks.figures import scale as figure
    except ModuleNotFoundError as error:
        print(f"no figure: no {error.name} here, ./setup.sh plots installs it")
        return 0
    folder = Path(args.results) / "figures" / "more"
    print(f"figure: {figure.draw(made, args.model, args.variant, found, folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
