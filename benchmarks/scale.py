"""What a gain on one GPU becomes where many wait for each other: the step of a whole cluster, simulated from records.

    make scale MODEL=gpt3       or    python -m benchmarks.scale results --model gpt3

A rank's times are those of timed steps in the records, less the optimizer: each rank of the cluster draws a run (a host
and a GPU) and one of its steps, and where the records have them (extra.microbatches) one step of its section pass,
whose forward and backward passes of microbatches have the same shares of the step. The ranks of a tensor-parallel group
wait for the slowest in every chunk, stages wait for each other as the schedule has it (common/schedule.py), and
replicas wait for the slowest one at the end. A cluster's stage makes other numbers of passes than the rank that was
measured: the first tenth of its forward passes takes what the first tenth of the rank's took, and so on. Where in a
measured pass, or in a step without passes, its time went is not known, so there are two answers, and the truth lies
between them:

    spread    all that makes up what was measured is slower alike
    burst     what is beyond the run's 10th percentile falls on one chunk and microbatch, as an interruption does

Runs without times of microbatches are used where one of both variants has no other ones; the table says which were. The
interval is a bootstrap over runs, 95 %, from the lower end of one to the upper end of the other. Not simulated: time on
the wire, the optimizer, and what eight ranks of one host do to each other. Records of several ranks show how far off
that is: their step and skew are printed beside those simulated for just so many ranks.
"""

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy

from benchmarks import frame, published
from common import schedule
from common.config import Parser

NUM_BOOT, SEED = 20, 0
VARIANT, NUM_STEPS = "graph", 400
LEGEND = (
    "runs: of eager + of the variant, on so many hosts or sessions. times: of microbatches, or of whole steps where "
    "the records of either lack them. spread: a delay lies on all that a time is of alike; burst: on one microbatch of "
    "a chunk. 95 %: over runs, of both."
)
SPREADS = ("spread", "burst")
# Of a chunk's forward and backward pass, where a step's time is all that is known.
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


@dataclass(frozen=True)
class Run:
    """Times of a run of one process.

    steps_ms: of its timed steps, without the optimizer. shares: of each step of its section pass the part of it that
    each forward pass took, then each backward pass, [steps, 2 x passes]; [1, 1] where only steps are known. rest_ms: of
    a step beside its passes, with the optimizer. optimizer_ms: of it the optimizer, 0 where that is not known.
    """

    steps_ms: numpy.ndarray
    shares: numpy.ndarray = field(default_factory=lambda: numpy.ones((1, 1)))
    rest_ms: float = 0.0
    optimizer_ms: float = 0.0

    @property
    def num_passes(self) -> int:
        """Forward passes of a step, 0 where they are not known."""
        return self.shares.shape[1] // 2

    @property
    def of_steps(self) -> "Run":
        """What was known without its passes."""
        return Run(self.steps_ms, rest_ms=self.optimizer_ms, optimizer_ms=self.optimizer_ms)

    @property
    def passes_ms(self) -> float:
        """Mean time of all passes of a step."""
        return float(self.steps_ms.mean() * self.shares.sum(axis=1).mean())


def weights(scale: Scale, stage: int, num_passes: int) -> numpy.ndarray:
    """Which part of each measured time falls on each step of a stage's order, [steps of the order, times].

    num_passes: of a `Run`, all of which have as many.
    """
    order = schedule.order(scale.pp, stage, scale.chunks, scale.microbatches)
    count = scale.chunks * scale.microbatches
    if not num_passes:
        return numpy.array([[(FORWARD_SHARE if step > 0 else 1 - FORWARD_SHARE) / count] for step in order])
    here, there = numpy.arange(count)[:, None], numpy.arange(num_passes)
    # Of a measured pass and one of the cluster: by how much they overlap, both cut into equal parts of one step.
    begins, ends = numpy.maximum(here * num_passes, there * count), (here + 1) * num_passes
    parts = numpy.clip(numpy.minimum(ends, (there + 1) * count) - begins, 0, None) / count
    found = numpy.zeros((len(order), 2 * num_passes))
    is_forward = numpy.array(order) > 0
    found[is_forward, :num_passes], found[~is_forward, num_passes:] = parts, parts
    return found


def cluster_steps(scale: Scale, runs, spread: str, num_steps: int, rng, plan=None) -> numpy.ndarray:
    """ms of `num_steps` steps of the cluster. runs: `Run`s of equal num_passes. plan: `actions(scale)`."""
    shape = (num_steps * scale.dp, scale.pp, scale.tp)
    drawn_ms, base_ms = _draw(runs, shape, rng)
    parts = [weights(scale, stage, runs[0].num_passes) for stage in range(scale.pp)]
    if spread == "spread":
        base_ms, extra_ms, place = drawn_ms, None, None
    else:
        base_ms = numpy.minimum(base_ms, drawn_ms)
        extra_ms, place = drawn_ms - base_ms, numpy.empty(drawn_ms.shape, numpy.int32)
        for stage, own in enumerate(parts):
            for time in range(own.shape[1]):
                place[:, stage, :, time] = rng.choice(len(own), (shape[0], scale.tp), p=own[:, time])
    of_position = [[numpy.flatnonzero(row) for row in own] for own in parts]
    ended: dict[tuple, numpy.ndarray] = {}
    last = [numpy.zeros(shape[0]) for _ in range(scale.pp)]
    for stage, position, waits_for, name in plan or actions(scale):
        took = numpy.zeros((shape[0], scale.tp))
        for time in of_position[stage][position]:
            took += parts[stage][position, time] * base_ms[:, stage, :, time]
            if extra_ms is not None:
                took += numpy.where(place[:, stage, :, time] == position, extra_ms[:, stage, :, time], 0.0)
        start = last[stage] if waits_for is None else numpy.maximum(last[stage], ended.pop(waits_for))
        ended[name] = last[stage] = start + took.max(axis=1)
    return numpy.maximum.reduce(last).reshape(num_steps, scale.dp).max(axis=1)


def _draw(runs, shape, rng):
    """(ms of a step's passes, their 10th percentile in its run) for each rank and step, [*shape, times]."""
    which = rng.integers(0, len(runs), shape)
    drawn = numpy.empty((*shape, runs[0].shares.shape[1]))
    low = numpy.empty_like(drawn)
    for index, run in enumerate(runs):
        mine = which == index
        shares = run.shares[rng.integers(0, len(run.shares), mine.sum())]
        drawn[mine] = rng.choice(run.steps_ms, mine.sum())[:, None] * shares
        low[mine] = numpy.quantile(run.steps_ms, 0.1) * numpy.quantile(run.shares, 0.1, axis=0)
    return drawn, low


def ratios(scale: Scale, eager, graph, num_steps: int, num_boot: int = NUM_BOOT) -> dict:
    """{"spread" and "burst": eager's mean step over graph's, "low" and "high": 95 %, of both} at this scale.

    eager, graph: `Run`s, all of equal num_passes.
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
    drawn = _draw(runs, (num_draws, num_ranks), rng)[0].sum(axis=-1)
    return float(numpy.median(drawn.max(axis=1) - drawn.min(axis=1)))


# ------------------------------------------------------------------------------------------------
# Records


def runs_of(found, variant: str, loaded: bool = False) -> list[Run]:
    """Timed runs of one process of a variant of which more is known than the time of a whole step."""
    return [
        _run(record)
        for record in found
        if record["variant"] == variant
        and bool(record["host_load"]) == loaded
        and record["env"]["world_size"] == 1
        and (record["optimizer_ms"] is not None or record["extra"].get("microbatches"))
    ]


def _run(record):
    optimizer_ms, known = record["optimizer_ms"] or 0.0, record["extra"].get("microbatches")
    steps_ms = numpy.array(record["steps"]["gpu_ms"]) - optimizer_ms
    if not known:
        return Run(steps_ms, rest_ms=optimizer_ms, optimizer_ms=optimizer_ms)
    passes_ms, rest_ms = numpy.hstack([known["forward_ms"], known["backward_ms"]]), numpy.array(known["rest_ms"])
    whole_ms = passes_ms.sum(axis=1) + rest_ms - optimizer_ms
    return Run(steps_ms, passes_ms / whole_ms[:, None], float(numpy.median(rest_ms)), optimizer_ms)


def comparable(*variants: list[Run]) -> list[list[Run]]:
    """Of each variant's runs those with times of microbatches, equally many, where every variant has some; else all,
    with times of steps alone."""
    numbers = [{run.num_passes for run in runs} - {0} for runs in variants]
    shared = Counter(
        run.num_passes for runs in variants for run in runs if run.num_passes in set.intersection(*numbers)
    )
    if shared:
        chosen = shared.most_common(1)[0][0]
        return [[run for run in runs if run.num_passes == chosen] for runs in variants]
    return [[run.of_steps for run in runs] for runs in variants]


def rows(found, model: str, variant: str, num_steps: int, num_boot: int = NUM_BOOT) -> list[dict]:
    """One GPU, then each cluster; on a quiet host, then beside busy processes. "ratios" is None without records."""
    result = []
    for host, loaded in (("quiet", False), ("busy", True)):
        eager, graph = comparable(runs_of(found, "eager", loaded), runs_of(found, variant, loaded))
        boots = {
            record["env"].get("boot_id") or record["session"] for record in found if bool(record["host_load"]) == loaded
        }
        row = {"host": host, "published": None, "ratios": None, "count": f"{len(eager)} + {len(graph)}, {len(boots)}"}
        if not (eager and graph):
            result.append(row | {"gpus": None, "times": None})
            continue
        row["times"] = "microbatches" if eager[0].num_passes else "steps"
        alone = float(numpy.mean([run.passes_ms for run in eager]) / numpy.mean([run.passes_ms for run in graph]))
        result.append(row | {"gpus": 1, "ratios": dict.fromkeys(SPREADS, alone)})
        for scale in SCALES[model]:
            got = ratios(scale, eager, graph, max(2, num_steps // scale.dp), num_boot)
            result.append(row | {"gpus": scale.gpus, "ratios": got, "published": scale.published})
    return result


def table(found: list[dict]) -> list[str]:
    """Lines of a Markdown table of `rows`."""
    lines = ["| GPUs | host | runs, hosts | times | eager over graph: spread | burst | 95 % | published |"]
    lines.append("| ---: | --- | --- | --- | ---: | ---: | ---: | ---: |")
    for row in found:
        cells = [f"{row['gpus']:,}" if row["gpus"] else "-", row["host"], row["count"] if row["gpus"] else "no record"]
        got = row["ratios"] or {}
        cells.append(row["times"] or "-")
        cells += [f"{got[spread]:.3f}x" if got else "-" for spread in SPREADS]
        cells.append(f"{got['low']:.3f} to {got['high']:.3f}" if "low" in got else "-")
        cells.append(f"{row['published']:.3f}x" if row["published"] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ranks_of(record: dict) -> Scale:
    """The cluster that the ranks of a record were; what the config of an older record lacks is 1."""
    num_ranks = record["env"]["world_size"]
    sizes = {key: record["config"].get(key, 1) for key in ("tp", "pp", "chunks", "microbatches")}
    return Scale(gpus=num_ranks, dp=num_ranks // (sizes["tp"] * sizes["pp"]), **sizes)


def simulated_step_ms(scale: Scale, runs: list[Run], num_steps: int, rng) -> dict[str, float]:
    """{"spread" and "burst": median ms of a step of ranks that hold the layers of these runs together}.

    runs: of one process that holds the layers of all stages, one tensor rank's widths each. What a step takes beside
    its passes is added, of the optimizer one stage's share; sends and receives take no time.
    """
    shares = [replace(run, steps_ms=run.steps_ms / scale.pp) for run in runs]
    rest_ms = numpy.median([run.rest_ms - run.optimizer_ms * (1 - 1 / scale.pp) for run in runs])
    return {
        spread: float(numpy.median(cluster_steps(scale, shares, spread, num_steps, rng)) + rest_ms)
        for spread in SPREADS
    }


def of_several_ranks(found) -> list[str]:
    """For each decomposition and variant with records of several ranks: measured step and skew beside the simulated."""
    rng = numpy.random.default_rng(SEED)
    cases: dict[Scale, dict[str, list]] = {}
    for record in found:
        if record["env"]["world_size"] > 1 and not record["host_load"]:
            cases.setdefault(ranks_of(record), {}).setdefault(record["variant"], []).append(record)
    lines = []
    for scale, variants in cases.items():
        where, steps_ms = f"{scale.gpus} ranks (dp {scale.dp}, tp {scale.tp}, pp {scale.pp})", {}
        for variant, records in variants.items():
            (alone,) = comparable(runs_of([one for one in found if _same_work(one, records[0])], variant))
            if not alone:
                continue
            low_ms, high_ms = sorted(simulated_step_ms(scale, alone, 200, rng).values())
            measured_ms = float(numpy.median([record["statistic_ms"] for record in records]))
            steps_ms[variant] = measured_ms, (low_ms + high_ms) / 2
            lines.append(f"{where}, {variant}: step {measured_ms:.2f} ms, simulated {low_ms:.2f} to {high_ms:.2f} ms")
            skews = [record["rank_skew_ms"] for record in records if record["rank_skew_ms"] is not None]
            # Ranks of a pipeline wait for each other within a step.
            if skews and scale.dp == scale.gpus:
                expected_ms = expected_skew_ms(alone, scale.gpus, rng)
                lines[-1] += f"; skew {numpy.median(skews):.2f} ms, of independent steps {expected_ms:.2f} ms"
        for variant in sorted(steps_ms.keys() - {"eager"}) if "eager" in steps_ms else ():
            measured, simulated = (base / own for base, own in zip(steps_ms["eager"], steps_ms[variant], strict=True))
            lines.append(f"{where}, eager over {variant}: {measured:.3f}x, simulated {simulated:.3f}x")
    return lines or ["no record of several ranks beside records of one"]


def _same_work(record, other):
    """Whether two records differ at most in how the work is split over ranks."""
    split = ("tp", "pp", "chunks", "zero1")
    return all(record["config"].get(key) == value for key, value in other["config"].items() if key not in split)


def sessions_of(found) -> list[str]:
    """The sessions that a table rests on, in order of time; records of schema 1 name none."""
    names = {record.get("session") for record in found}
    return sorted(filter(None, names)) + ["some of schema 1"] * (not all(names))


def write(args, lines: list[str], found) -> Path:
    """The printed lines as a page that says how it was made and from which sessions. args: of the command line."""
    other = [args.variant] * (args.variant != VARIANT) + [f"steps{args.steps}"] * (args.steps != NUM_STEPS)
    path = Path(args.results) / f"{'-'.join(['scale', args.model, args.preset, *other])}.md"
    made = f"make scale MODEL={args.model} PRESET={args.preset} VARIANT={args.variant} ARGS='--steps {args.steps}'"
    head = f"Simulated, not measured: eager over {args.variant} where many GPUs wait for each other."
    own = f"From the sessions {', '.join(sessions_of(found))}."
    path.write_text("\n".join([head, "", f"    {made}", "", *lines, "", own, ""]))
    return path


def main(argv=None) -> int:
    """Print the table of a model, write it as a page beside the results, draw it.

    Exit status 2 for what cannot be simulated, said in one line."""
    parser = Parser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("results", help="folder of results")
    parser.add_argument("--model", required=True, metavar="NAME", help=f"one of {', '.join(SCALES)}")
    parser.add_argument("--preset", default="bench", metavar="NAME", help="whose records are a rank's (bench)")
    parser.add_argument("--variant", default=VARIANT, metavar="NAME", help="what stands against eager (graph)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, metavar="N", help="replica steps to simulate (400)")
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
        parser.error(
            f"no timed eager runs of {args.model}/{args.preset} with times of parts of their steps in {args.results}"
        )
    made = rows(found, args.model, args.variant, args.steps)
    lines = [*table(made), "", LEGEND, "", *of_several_ranks(found)]
    print("\n".join(lines))
    print(f"page: {write(args, lines, found)}")
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
