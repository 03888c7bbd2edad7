"""A checked command line of `make bench`, and the machine that it meets: models, builds, variants, environment."""

import dataclasses
import hashlib
import itertools
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from graph_worth.config import checked, flag_of
from graph_worth.folders import OWN_STEP, ROOT
from graph_worth.harness import script
from graph_worth.harness.builds.request import BuildRequest
from graph_worth.harness.command import RUNS, Mistake, amount, count, positive, words_of
from graph_worth.harness.files import facts
from graph_worth.harness.processes import launch
from graph_worth.harness.processes.gpus import Gpus
from graph_worth.harness.processes.launch import PORT

RESULTS = ROOT / "results"
CONTROL = script.CONTROL
LONGEST_LABEL = 48
# cuBLAS is deterministic with a workspace of its own, and eager and graphs then run the same kernels. A worker drops it
# before it builds anything (measuring/torch_settings.py).
ALWAYS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
# OpenMP threads without work spin by default, which takes the cores from all else. OMP_WAIT_POLICY is OpenMP's own
# variable; GOMP_SPINCOUNT (libgomp, in PyTorch's wheels) and KMP_BLOCKTIME (LLVM's and Intel's) say the same.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

_cycles = checked(
    lambda text: text if text == "auto" else int(text),
    lambda number: number == "auto" or 1 <= number <= 1000,
    "a number of cycles from 1 to 1000, or auto",
)
_label = checked(
    str,
    lambda text: re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,47}", text),
    "a word of letters, digits, '.', '_' and '-', at most 48",
)


def _flag(default, help, metavar=None, type=None, also=""):
    """A field with a flag. `also`: programs that take it, too, and header: a begun run goes on with the same value."""
    words = {"metavar": metavar, "type": type, "default": default} if metavar else {"action": "store_true"}
    return field(default=default, metadata={"also": f"run {also}".split(), "words": {"help": help} | words})


@dataclass(kw_only=True)
class Options:
    """Options of a measurement. Each `_flag` is a flag of benchmarks.run.

    Attributes:
        model: a name, some with commas, or all.
        flags: of the training script.
        is_light: eager and one graph, with the losses of the blocks as parity.
        most_blocks_s: of `Settings`, where it is not that of the preset.
        over, value: the quantity of the sweep that this is a point of, and its value.
        cycles_s: seconds for the cycles of a build, see `Settings`.
        doctor_s: seconds that were spent on the step before the run.
        tolerance: of losses in blocks, where a variant declares none.
    """

    model: str
    preset: str | None = _flag(None, "bench where a GPU is found, else tiny", "NAME")
    variants: str | None = _flag(
        None, "the headline variants unless told; all, or some names", "A,B", also="measure submit"
    )
    no_control: bool = _flag(False, "without the base once more as if it were a variant")
    no_audit: bool = _flag(False, "without blocks that eager repeats in a process of its own")
    cycles: int | str | None = _flag(
        None, "cycles (8; tiny: 3), or auto: until +-0.5 %%, at least 8", "N", _cycles, also="measure submit"
    )
    minutes: float | None = _flag(
        None, "go on with cycles until then; with auto: no longer (10)", "M", amount, also="measure submit"
    )
    ngpu: int = _flag(1, "GPUs, or ranks on the CPU (1)", "N", positive, also="measure")
    host_load: int = _flag(0, "busy processes in every second cycle (0)", "N", count, also="measure submit header")
    out: str | None = _flag(
        None, "root of the runs: files go to DIR/<gpu>x<count>/<model>-<preset>/ (runs)", "DIR", also="measure"
    )
    label: str | None = _flag(None, "ends the folder's name (made of flags after --)", "WORD", _label)
    limit_s: float = _flag(600.0, "a worker that is silent for so long hangs (600)", "S", amount)
    nnodes: int = _flag(1, "nodes, --ngpu ranks on each (1)", "N", positive)
    launch: str | None = _flag(
        None, "starts what follows it on every node; see graph_worth/harness/processes/launch.py", "COMMAND"
    )
    rendezvous: str | None = _flag(None, f"node 0, for the others (this host:{PORT})", "HOST:PORT")
    python: str | None = _flag(None, "interpreter of the training script (this one)", "PATH")
    flags: list[str] = field(default_factory=list)
    is_light: bool = False
    most_blocks_s: float | None = None
    over: str = ""
    value: int = 0
    cycles_s: float | None = None
    doctor_s: float = 0.0
    tolerance: float | None = None


def flags_for(use: str) -> dict[str, dict]:
    """Return words for argparse by the name of each flag for a use: run (all), measure, submit or header."""
    declared = [field for field in dataclasses.fields(Options) if use in field.metadata.get("also", ())]
    return {field.name: field.metadata["words"] for field in declared}


def add_flags(parser, use: str, **helps) -> None:
    """Add the flags for a use to a parser; `helps`: texts that differ from run's."""
    for name, words in flags_for(use).items():
        parser.add_argument(flag_of(name), **words | ({"help": helps[name]} if name in helps else {}))


def values_for(kind: type, source) -> dict:
    """Return the values of a source for the fields of a dataclass, where it has them by the same name."""
    names = [declared.name for declared in dataclasses.fields(kind)]
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


@dataclass(kw_only=True)
class Ask:
    """The request to measure one model.

    Attributes:
        description: the script's answer to --describe.
        root: folder of all runs.
        launch: how the script is started.
        host: `launch.describe_here()`.
        builds: in the order in which they are measured.
        tolerance: of `Options`.
    """

    model: str
    preset: str
    flags: list[str]
    label: str
    description: dict
    root: Path
    launch: launch.Launch
    gpus: Gpus
    host: dict
    builds: list[BuildRequest] = field(default_factory=list)
    tolerance: float | None = None

    @property
    def name(self) -> str:
        """Model and preset, as in gpt3/bench, or the label of a step of the user's own."""
        return facts.title_of(self.model, self.preset, self.label)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.launch.world_size

    @property
    def group(self) -> Path:
        """The folder of the model's runs, as in runs/h200x1/gpt3-bench."""
        folder = facts.folder_of(self.model, self.preset, self.label)
        return self.root / f"{self.gpus.slug}x{self.ranks}" / folder


def ask_of(args: Options, model: str, machine: dict) -> Ask:
    """Return the request that options make of one model on a machine (`launch.describe_here()`), or raise a Mistake."""
    gpus, started = Gpus(**machine["gpus"]), launch.parse(args)
    preset = args.preset or ("bench" if gpus.names else "tiny")
    description = script.describe(model, args.flags, preset)
    if not gpus.names and script.needs_gpu(description, preset):
        raise Mistake(f"preset {preset} needs an NVIDIA GPU, and nvidia-smi -L lists none: PRESET=tiny runs here")
    require_ranks(args.ngpu, gpus)
    root = Path(args.out).resolve() if args.out else RUNS
    if root.is_relative_to(RESULTS):
        raise Mistake(f"--out {args.out}: results/ grows by make publish RUN=... alone; take another folder")
    number = f"--nnodes {args.nnodes} x --ngpu {args.ngpu} (NGPU)"
    script.require_world_size(description, preset, started.world_size, number)
    request = Ask(
        model=model,
        preset=preset,
        flags=args.flags,
        label=label_of([args.label] if args.label else args.flags, args.host_load),
        description=description,
        root=root,
        launch=started,
        gpus=gpus,
        host=machine,
        tolerance=args.tolerance,
    )
    chosen = chosen_variants(args.variants, description)
    builds = description["builds"]
    # A build that changes nothing of what is asked for is measured with the preset.
    config = description["presets"][preset]
    unchanged = {
        name
        for name, fields in builds.items()
        if name and all(_asked(key, args.flags, config) == str(value) for key, value in fields.items())
    }
    for name, fields in builds.items():
        if name in unchanged:
            continue
        names = {name} if name else {name, *unchanged}
        of_build = [variant for variant in chosen if names & set(_builds_of(variant, description))]
        is_undone = {text.split("=")[0] for text in args.flags} & set(map(flag_of, fields))
        if is_undone or not any(description["kinds"][variant] == "eager" for variant in of_build):
            continue
        groups = _groups(of_build, description)
        for apart, variants in groups.items():
            measured = {variant for build in request.builds for variant in build.variants}
            measured |= {variant for group in groups.values() if group is not variants for variant in group}
            # Eagers alone say nothing that another build has not said.
            if {description["kinds"][variant] for variant in variants} != {"eager"} or not measured >= set(variants):
                # It shows how far equal programs differ on this host, once.
                has_control = not args.no_control and all(fields != build.fields for build in request.builds)
                request.builds.append(_build(request, name, fields, variants, has_control, apart))
    if not request.builds:
        raise Mistake(f"no build of {model} has both an eager variant and those of --variants {args.variants}")
    return request


def require_ranks(number: int, gpus: Gpus) -> None:
    """Refuse more ranks on this machine than it has GPUs, or cores where it has no GPU."""
    if gpus.names and number > len(gpus.names):
        raise Mistake(f"--ngpu {number}: this machine shows {len(gpus.names)}")
    cores = len(os.sched_getaffinity(0))
    if not gpus.names and number > cores:
        raise Mistake(f"--ngpu {number} (NGPU): without a GPU a rank takes a core, and this machine has {cores}")


def _asked(name, flags, config) -> str:
    """The value of a field that preset and command line give, as text."""
    value, flag = config.get(name), flag_of(name)
    for text, following in itertools.zip_longest(flags, flags[1:]):
        word, has_value, inline = text.partition("=")
        if word == flag:
            value = inline if has_value else following
    return str(value)


def chosen_variants(text: str | None, description: dict) -> list[str]:
    """Return names in the model's order, eager first: the headline variants, the requested ones, or all."""
    known, formerly = description["variants"], description["formerly"]
    if text is None:
        names = description["headline"] or list(known)
    elif text.strip().lower() == "all":
        names = list(known)
    else:
        names = words_of(text)
        renamed = [f"{name!r} is now {formerly[name]!r}" for name in names if name in formerly]
        if renamed:
            raise Mistake(f"variant {', '.join(renamed)}")
        unknown = ", ".join(name for name in names if name not in known)
        if unknown or not names:
            raise Mistake(f"unknown variant {unknown!r}, --variants takes all, or some of {', '.join(known)}")
    wanted = {"eager", *names, *(description["reference"].get(name, "eager") for name in names)}
    # Each build needs an eager variant of its own.
    for build in {build for name in names for build in _builds_of(name, description)}:
        eagers = [eager for eager in script.eagers_of(description) if build in _builds_of(eager, description)]
        wanted |= set(eagers[:1])
    return [name for name in known if name in wanted]


def _builds_of(variant, description):
    return description["variant_builds"][variant]


def _groups(variants, description) -> dict[str, list[str]]:
    """Name that variants stand apart by, "" first -> these, with the first eager and with what they are compared with.

    Processes differ: torch's reduce-overhead, which uses a second stream, slows the graphs that others made.
    """
    apart, kinds, references = (description.get(key, {}) for key in ("apart", "kinds", "reference"))
    eagers = [name for name in variants if name in script.eagers_of(description)]
    first = next(iter(eagers), next(name for name in variants if kinds[name] == "eager"))
    groups = {"": [name for name in variants if not apart.get(name)]}
    for group in dict.fromkeys(filter(None, map(apart.get, variants))):
        members = [name for name in variants if apart.get(name) == group]
        wanted = {first, *members, *(references.get(name, "eager") for name in members)}
        groups[group] = [name for name in variants if name in wanted]
    return groups


def _build(request, name, fields, variants, has_control, apart) -> BuildRequest:
    description, on_gpu = request.description, bool(request.gpus.names)
    options = [text for key, value in fields.items() for text in (flag_of(key), str(value))]
    script_words = [*script.words_of(request.model), "--preset", request.preset]
    declared = {variant: _declared(variant, variants, description, request.tolerance) for variant in variants}
    if has_control:
        declared[CONTROL] = {
            "kind": "eager",
            "help": "the base once more, as if it were a variant",
            "reference": CONTROL,
            "headline": False,
            **{"parity": None, "tolerance": None, "traits": {}},
        }
    environment = _environment(request.root, on_gpu)
    if not on_gpu and request.model != OWN_STEP:
        # Toy sizes gain nothing from a second thread, and wait for it where other programs have the core.
        environment.setdefault("OMP_NUM_THREADS", "1")
    parity = description.get("parity_variables") if on_gpu else None
    layers = _asked("layers", [*request.flags, *options], description["presets"][request.preset])
    return BuildRequest(
        name=facts.joined(name, apart),
        apart=apart,
        fields=fields,
        variants=declared,
        command=lambda variant: request.launch.command([*script_words, "--variant", variant, *request.flags, *options]),
        environment=environment,
        parity_environment=environment | parity if parity else None,
        eagers=[variant for variant in variants if variant in script.eagers_of(description)],
        asked_layers=int(layers) if layers.isdecimal() else None,
        ranks=request.ranks,
    )


def _declared(variant, variants, description, usual_tolerance=None) -> dict:
    """The declaration of a variant, as the run file needs it. `variants`: all variants of the build."""
    tolerance = description["tolerance"].get(variant)
    reference = description["reference"].get(variant, "eager")
    return {
        "kind": description["kinds"][variant],
        "help": description["variants"][variant],
        "reference": reference if reference in variants else variants[0],
        "parity": "bitwise" if variant in description["bitwise"] else tolerance,
        "tolerance": tolerance or (usual_tolerance if variant != "eager" else None),
        "headline": variant in description["headline"],
        "traits": description["traits"].get(variant, {}),
    }


def _environment(root, on_gpu):
    """Variables of a worker. Compilers keep their caches in the root of the runs."""
    cache = root / ".cache"
    variables = dict(os.environ) | ALWAYS
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    # Without it, torch caches no compiled model that has autograd functions of its own (Stable Diffusion's norms).
    variables.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD", "1")
    if not on_gpu and not variables.keys() & set(WAITING):
        variables["OMP_WAIT_POLICY"] = "passive"
    return variables


def label_of(flags: list[str], host_load: int) -> str:
    """Return the part of a folder's name for flags and host load: `--buckets 4`, 16 -> buckets-4-load16."""
    words = [Path(text).name if "/" in text else text for text in flags]
    label = re.sub("[^A-Za-z0-9.]+", "-", "-".join(words).replace("_", "-")).strip("-.").lower()
    if len(label) > LONGEST_LABEL:
        digest = hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]
        label = f"{label[: LONGEST_LABEL - 9].rstrip('-.')}-{digest}"
    return "-".join(filter(None, [label, f"load{host_load}" if host_load else ""]))
