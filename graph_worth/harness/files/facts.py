"""The facts of a run, as types: what a run file of schema 4 holds.

Times of steps, losses, hashes, counts, and what a worker raised. There is no verdict among them: judge.py makes
verdicts when a file is read. Names end in their unit. A value that could not be measured is None.
"""

import statistics as plain
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from graph_worth.folders import OWN_STEP

# Types with bounds: tables, figures and terminals take these values as they are.
Name = Annotated[str, Meta(max_length=100)]
Text = Annotated[str, Meta(max_length=2000)]
Ms = Annotated[float, Meta(gt=1e-6, lt=1e9)]
Index = Annotated[int, Meta(ge=0, lt=100_000)]
Count = Annotated[int, Meta(ge=1, lt=10**9)]
Whole = Annotated[int, Meta(ge=0, lt=10**15)]
Size = Annotated[int, Meta(gt=-(10**15), lt=10**15)]
Amount = Annotated[float, Meta(ge=0, lt=1e24)]
Finite = Annotated[float, Meta(gt=-1e30, lt=1e30)]
Promise = Literal["bitwise"] | Finite | None


class Raised(Struct, kw_only=True):
    """The reason why a variant is not measured to its end, from a worker or its exit.

    Attributes:
        kind: "error" for a worker that ended or an exception without a kind of its own; "changed_settings" and
            "moved_state" for a variant that left torch or the training state other than it found them.
        reason: in one line.
    """

    kind: Literal[
        "unsupported",
        "oom",
        "capture_failed",
        "numerics_failed",
        "error",
        "timeout",
        "changed_settings",
        "moved_state",
    ]
    reason: Text


class Reruns(Struct, kw_only=True):
    """Steps of a block that ran again in another way: timed steps, how many ran again, and their mean ms."""

    steps: Count
    reruns: Whole = 0
    rerun_ms: Amount | None = None


class GpuState(Struct, kw_only=True):
    """Medians over the samples of a block.

    Attributes:
        sm_mhz: clock of the multiprocessors.
        power_w: power of the board.
        throttle: reasons for a lower clock that any sample named, as "power cap".
    """

    sm_mhz: Amount | None = None
    power_w: Amount | None = None
    throttle: list[Name] = field(default_factory=list)


class Summary(Struct, kw_only=True):
    """The sums that a file of schema 3 has in the place of the times of a block's steps."""

    steps: Count
    mean_ms: Ms
    typical_ms: Ms
    num_classes: Count


class Block(Struct, kw_only=True):
    """One block of a variant: timed steps in a row.

    Attributes:
        step_ms: of each timed step, of several ranks the slowest's; fastest_ms: the fastest rank's, [] for one rank and
            in older files.
        classes: of each timed step the number of its batch's class; [] where all are of one class.
        issue_ms: the host's time to issue each drained step.
        first: number of the first step, the same for all blocks of a cycle.
        parent_s: time of the timed steps by the clock of another process; worker_s: by the worker's own.
        whole_s: time of the whole block by the clock of another process, with what is not timed; older files lack it.
        held_bytes: memory in use before the variant was entered; older files lack it.
        growth_bytes: growth of that memory inside the steps.
        late_ms, late_change: work, and change of the state, after the block had ended.
        moved: how far watched tensors of the training state moved.
    """

    cycle: Index
    place: Index
    busy_processes: Index
    process: Whole
    threads: Whole
    untimed_steps: Whole
    drained_steps: Whole
    step_ms: list[Ms] = field(default_factory=list)
    fastest_ms: list[Ms] = field(default_factory=list)
    classes: list[Index] = field(default_factory=list)
    issue_ms: list[Ms] = field(default_factory=list)
    gpu: GpuState | None = None
    first: Index = 0
    parent_s: Finite
    worker_s: Finite
    whole_s: Finite | None = None
    reserved_bytes: Size | None = None
    held_bytes: Size | None = None
    growth_bytes: Size | None = None
    replays: Whole
    expected_replays: Whole
    late_ms: Amount
    late_change: bool
    reset: bool
    losses: list[Finite | None]
    moved: list[Finite | None]
    reruns: Reruns | None = None
    summary: Summary | None = None

    @property
    def steps(self) -> int:
        """Number of timed steps."""
        return self.summary.steps if self.summary else len(self.step_ms)

    @property
    def mean_ms(self) -> float:
        """Mean of the timed steps: what a step adds to the time of a job."""
        return self.summary.mean_ms if self.summary else plain.fmean(self.step_ms)

    @property
    def typical_ms(self) -> float:
        """Median of the timed steps; with several classes of batch the mean of the classes' medians."""
        if self.summary:
            return self.summary.typical_ms
        if not self.classes:
            return plain.median(self.step_ms)
        times: dict[int, list[float]] = {}
        for kind, ms in zip(self.classes, self.step_ms, strict=False):
            times.setdefault(kind, []).append(ms)
        return plain.fmean(plain.median(class_times) for class_times in times.values())

    @property
    def num_classes(self) -> int:
        """Number of classes of batch."""
        return self.summary.num_classes if self.summary else len(set(self.classes)) or 1

    @property
    def issued_ms(self) -> float | None:
        """The host's time to issue a step, at most the step's own; None where none was drained.

        Draining inflates the issue time: a step whose host is the slower side takes no longer than its issue.
        """
        return min(plain.median(self.issue_ms), self.mean_ms) if self.issue_ms else None


class Course(Struct, kw_only=True):
    """Steps of training from the seeded start, to be compared with those of the reference.

    Attributes:
        hashes: of the training state, after each step before the blocks, after the last step else.
        losses, grad_norms: of each step.
        tensor: the first one whose bits are other than eager's, where the process has made eager's course.
        apart: how the training leaves eager's, "" where by roundings alone, None where nothing looked at the state.
    """

    hashes: list[Name]
    losses: list[Finite | None]
    grad_norms: list[Finite | None] = field(default_factory=list)
    tensor: Text = ""
    apart: Text | None = None


class CaptureFacts(Struct, kw_only=True):
    """A variant's capture: times in s, sizes in bytes, and graphs made beside graphs promised.

    `promised_graphs`, `promised_replays` (a step): None where the variant promises any number from 1 up.
    `bytes_added`: growth of torch's reserved memory while the variant was made; `memory`: see made_variant.Capture.
    `peak_reserved_bytes`, `driver_bytes`: of older files.
    """

    strategy: Text = ""
    graphs: Whole = 0
    promised_graphs: Whole | None = None
    promised_replays: Whole | None = None
    made_s: Amount | None = None
    warmup_s: Amount | None = None
    compile_s: Amount | None = None
    capture_s: Amount | None = None
    bytes_added: Size | None = None
    pool_bytes: Size | None = None
    peak_reserved_bytes: Size | None = None
    driver_bytes: Size | None = None
    threads_added: Size = 0
    memory: dict | None = None
    report: dict | None = None


class Trained(Struct, kw_only=True):
    """The training of a block, and its speed; fields as those of `Block`."""

    step_ms: list[Ms]
    losses: list[Finite | None]
    moved: list[Finite | None]

    @property
    def mean_ms(self) -> float:
        """Mean of the timed steps."""
        return plain.fmean(self.step_ms)


class Again(Trained, kw_only=True):
    """A block of the base beyond the cycles: does eager part from itself where a variant parted from it?

    Attributes:
        first: number of the first step, as of the cycle whose losses parted.
    """

    first: Index


class Audit(Struct, kw_only=True):
    """A block from a state that a secret draw has scaled (graph_worth.measuring.block.scale_state).

    Attributes:
        seed: of the draw.
        first: number of the first step.
        own: the variant's block; None where it raised something, see `raised`.
        repetition: the same steps of the reference, in a process that never made the variant; None where it failed.
        ended: a signal that the run did not send ended the worker, twice, so this is no audit; older files have none.
    """

    seed: Whole
    first: Index
    own: Trained | None = None
    repetition: Trained | None = None
    raised: Text = ""
    ended: Text = ""


class Alone(Struct, kw_only=True):
    """A variant without other variants: it is built and makes some steps with the kernels of the blocks.

    It is the only one of its process, or those before it have left next to nothing in torch's memory.

    Attributes:
        builds: of a base, names of the builds whose blocks it is compared with: one process answers for all of them.
            Older files have none, for there each build had one.
        peak_reserved_bytes: most that torch's allocator held from before the capture on.
        steps_reserved_bytes: most that it held in the steps; the cache was given back before them. Older files have
            none.
        driver_bytes: what the driver says is taken on the GPU then, with CUDA's context and loaded kernels.
        is_only: neither another worker of the run was there when it answered, nor another variant before. Where one
            was, as in all older files, driver_bytes counts its context or kernels, too.
        step_ms: of each step.
    """

    peak_reserved_bytes: Whole
    steps_reserved_bytes: Whole | None = None
    driver_bytes: Whole | None = None
    is_only: bool = False
    builds: list[Name] = field(default_factory=list)
    step_ms: list[Ms] = field(default_factory=list)


class Profile(Struct, kw_only=True):
    """The GPU's work in a step, see `kernel_trace.facts`; on a CPU operators in the place of kernels.

    Of several ranks all but working_ms and waiting_ms is rank 0's. See `kernel_trace.over_ranks` for these: older files
    and those of one rank lack them, and `unmatched` says why a newer one does.
    """

    busy_ms: Ms | None = None
    kernels: Amount | None = None
    graph_share: Amount | None = None
    graph_time_share: Amount | None = None
    gap_ms: Finite | None = None
    overlap_ms: Finite | None = None
    collective_ms: Amount | None = None
    working_ms: list[Amount] = field(default_factory=list)
    waiting_ms: list[Amount] = field(default_factory=list)
    unmatched: Text = ""
    kernels_hash: Name | None = None
    top_kernels: list[dict] = field(default_factory=list)
    timeline_us: list[list[Finite]] = field(default_factory=list)
    timeline_step_us: Ms | None = None
    sm_mhz: Amount | None = None
    steps: Whole = 0


class Sealed(Struct, kw_only=True):
    """Verdicts that a file of schema 3 holds. Its hashes and losses of parity were not kept."""

    status: Name
    reason: Text
    parity: Name


class Variant(Struct, kw_only=True):
    """All facts of one variant of a build.

    Attributes:
        reference: the variant that training is compared with.
        promise: how near: "bitwise", a relative difference of losses, or None for that of two runs of the reference.
        tolerance: relative difference of losses that the variant declares.
        apart: each block has a process of its own.
        parity: courses before the blocks with deterministic kernels; a reference has two.
        after: courses after the blocks, on the graphs that were timed; a reference has two.
        audits, again: older files have none; `again` is of the base alone.
    """

    kind: Literal["eager", "graph", "compile"]
    help: Text
    headline: bool
    traits: dict[Name, Text] = field(default_factory=dict)
    reference: Name
    promise: Promise = None
    tolerance: Amount | None = None
    raised: Raised | None = None
    apart: bool = False
    capture: CaptureFacts = field(default_factory=CaptureFacts)
    alone: Alone | None = None
    parity: list[Course] = field(default_factory=list)
    after: list[Course] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    again: list[Again] = field(default_factory=list)
    profile: Profile = field(default_factory=Profile)
    blocks: list[Block] = field(default_factory=list)
    sealed: Sealed | None = None


class Cycle(Struct, kw_only=True):
    """A whole cycle of blocks.

    Attributes:
        order: names by place.
        operator_us: the host's time for one small operator at its begin.
        others: benchmarks on other GPUs of the host at its begin; None in older files.
    """

    cycle: Index
    busy_processes: Index = 0
    others: Index | None = None
    order: list[Name] = field(default_factory=list)
    seconds: Amount | None = None
    operator_us: Amount | None = None


class Build(Struct, kw_only=True):
    """One state with its variants, which share cycles. `fields` differ from the preset's.

    Attributes:
        anchor: the eager variant that has two blocks in each cycle and that the control repeats; "" without a cycle.
        apart: name by which its variants besides eager stand apart (graph_worth.contract.variant), in a process of
            their own; the build's name ends in it, see `joined`. Older files have none.
        flops_notes: what belongs beside a rate, such as work of a step that is not counted.
        asked_layers: layers of the preset and the flags; `config` has those that the GPU holds.
    """

    anchor: Name = ""
    apart: Name = ""
    fields: dict = field(default_factory=dict)
    asked_layers: Whole | None = None
    config: dict = field(default_factory=dict)
    card: list[Text] = field(default_factory=list)
    notes: list[Text] = field(default_factory=list)
    flops_per_step: Amount = 0.0
    flops_convention: Text = ""
    flops_notes: list[Text] = field(default_factory=list)
    items_per_step: Amount = 0.0
    cycles: list[Cycle] = field(default_factory=list)
    variants: dict[Name, Variant]


class Gpu(Struct, kw_only=True):
    """A GPU of the run. `uuid` is None where it is not known."""

    name: Name
    uuid: Name | None = None


class Latency(Struct, kw_only=True):
    """Percentiles of the host's time in a call."""

    p50_us: Amount
    p99_us: Amount


class Host(Struct, kw_only=True):
    """The machine.

    Attributes:
        boot: names it until it starts again.
        calls: of `graph_worth.machine.host_pace.calls_us`; older files have none.
    """

    boot: Name | None = None
    host: Text | None = None
    cpu: Text | None = None
    cores: Whole | None = None
    gpus: list[Gpu] = field(default_factory=list)
    operator_us: Amount | None = None
    launch_us: Amount | None = None
    calls: dict[Name, Latency] = field(default_factory=dict)
    driver: Name | None = None
    variables: dict = field(default_factory=dict)
    slurm: dict = field(default_factory=dict)


class Run(Struct, kw_only=True):
    """One request on one host.

    Attributes:
        parity: "courses", or "blocks" where nothing but the losses of the blocks shows that variants train alike.
        stopped: the signal after which nothing but profiles was measured; "" of other runs.
        over, value: of a point of a sweep: the quantity that varies, and its value; "" and 0 of other runs.
    """

    schema: Index
    id: Name
    model: Name
    preset: Name
    label: Name
    flags: list[Text]
    device: Literal["cuda", "cpu"]
    control: Name
    source: dict
    versions: dict
    host: Host
    ranks: Count
    begin_utc: Name
    end_utc: Name
    unit: Name
    whole: bool
    seconds: dict[Name, Amount]
    parity: Literal["courses", "blocks"] = "courses"
    stopped: Name = ""
    over: Name = ""
    value: Whole = 0
    builds: dict[Name, Build]

    @property
    def title(self) -> str:
        """The name for people, see title_of."""
        return title_of(self.model, self.preset, self.label)

    @property
    def swept_label(self) -> str:
        """The label that all points of a sweep have in common: "" for sequence-128."""
        return self.label.removesuffix(f"{self.over}-{self.value}").rstrip("-") if self.over else self.label


class Census(Struct, kw_only=True):
    """Short runs of several workloads on one host, or the points of a sweep, in one file.

    Attributes:
        left_out: workload -> reason.
    """

    schema: Index
    census: Literal[True]
    id: Name
    left_out: dict[Name, Text]
    runs: list[Run]


class Epoch(Struct, kw_only=True):
    """An epoch of a program of examples/programs, in a process of its own.

    Attributes:
        step: label of the runs in which `measure` timed the program's step.
        epoch_s: with warm-up, captures, compiler, loader, logs and checkpoint. None where the program failed.
        step_ms: of the steps after the 30th, with loader and logs.
        busy_ms: in which the GPU works in a step; None on a CPU.
        losses: of every tenth step.
        raised: why it failed, or "".
    """

    program: Name
    step: Name
    form: Literal["eager", "graphed", "compile"]
    round: Index
    steps: Count
    epoch_s: Amount | None = None
    step_ms: Ms | None = None
    busy_ms: Ms | None = None
    replays: Whole = 0
    losses: list[Finite | None] = field(default_factory=list)
    raised: Text = ""


class Epochs(Struct, kw_only=True):
    """Epochs of real programs on one host. `others`: benchmarks on other GPUs of it, at most."""

    schema: Index
    epochs: Literal[True]
    id: Name
    source: dict
    versions: dict
    host: Host
    begin_utc: Name
    end_utc: Name
    others: Index
    runs: list[Epoch]


def joined(build: str, apart: str) -> str:
    """Return the name of a build in a run: validate, or validate+compiled for variants that stand apart by a name."""
    return f"{build}+{apart}" if apart else build


def title_of(model: str, preset: str, label: str) -> str:
    """Return gpt3/bench, or the label of a step of the user's own."""
    return label if model == OWN_STEP else f"{model}/{preset}"


def stem(preset: str) -> str:
    """Return the preset as it was requested: earlier, a GPU that held fewer layers named it bench-l6."""
    return preset.partition("-")[0]


def folder_of(model: str, preset: str, label: str) -> str:
    """Return the name of the folder of a model's runs, as gpt3-bench."""
    return "-".join(filter(None, [model.removeprefix("common."), preset, label]))


def folder_of_sweep(model: str, preset: str, label: str, over: str) -> str:
    """Return the name of the folder of a sweep, as gpt3-bench-over-batch."""
    return folder_of(model, preset, "-".join(filter(None, [label, "over", over])))
