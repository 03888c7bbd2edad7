"""Submit a benchmark to Slurm: one job for all variants and cycles of a model, then one that prints the tables.

    python -m benchmarks.submit --model gpt3 --nodes 2 --ngpu 8 --partition gpu
    python -m benchmarks.submit --model gpt3 --preset mlperf --dry-run                the submission's 1,452 nodes of 8
    python -m benchmarks.submit --model gpt3,rnnt --time 2:00:00 -- --layers 4        an array over models
    python -m benchmarks.submit --model gpt3 --over batch --values 1,2,4              a sweep, on one set of nodes

Settings and commands are checked, Slurm's by `sbatch --test-only`, and printed before anything is submitted; --dry-run
ends there. Nodes and GPUs that are not given are those of the MLPerf submission whose preset it is, else 1. Variants
and cycles are never spread over jobs: two nodes may differ by more than graphs gain. benchmarks/slurm/README.md
describes the jobs. Exit status: 0, 1 when Slurm refuses, 2 for a mistake, 130 when stopped.
"""

import argparse
import math
import operator
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

from benchmarks import sweep
from benchmarks.slurm import jobs
from graph_worth.config import flag_of
from graph_worth.folders import ROOT
from graph_worth.harness import ask, command, run, script
from graph_worth.harness.command import RUNS, Mistake, shown, words_of

SCRIPTS = Path("benchmarks", "slurm")
# Options of sbatch that would break what this command promises.
OWNED = ["array", "chdir", "dependency", "export", "hold", "nodes", "ntasks", "ntasks-per-node", "output", "parsable"]
OWNED += ["requeue", "no-requeue", "test-only", "time", "wait", "wrap"]
# These say where a job may run, so the job that prints the tables needs them too.
SITE = ("account", "qos", "reservation", "partition")
# A worker starts, and a toy has its first facts.
LEAST_WORK_S = 30


def parse(argv=None) -> argparse.Namespace:
    """Return the command line. Mistakes end the program with one line."""
    words, flags = command.split_flags(argv)
    about = "Submit a benchmark to Slurm, and after it a job that prints the tables."
    parser = command.parser_of("submit", about, command.TO_SCRIPT)
    add = parser.add_argument
    add("--model", metavar="A,B", required=True, help=f"an array over {', '.join(script.models())}")
    theirs = "of the submission whose preset it is, else 1"
    add("--nodes", metavar="N", type=command.positive, help=f"nodes of one job (as many as give the GPUs {theirs})")
    add("--ngpu", metavar="N", type=command.positive, help=f"GPUs, or ranks on the CPU, of a node (those {theirs})")
    add("--preset", metavar="NAME", default="bench", help="bench unless told, as jobs are for GPUs")
    for name in ask.flags_for("submit"):
        add(flag_of(name), metavar="X", help="as in benchmarks.run")
    add("--over", metavar="QUANTITY", help="what benchmarks.sweep varies, with --values")
    add("--variant", metavar="NAME", help="with --over: what stands against eager (the model's first graph)")
    add("--values", metavar="1,2,4", type=command.values, help="the points of the sweep, all in one job")
    add("--out", metavar="DIR", help="root of the runs, on a shared file system (runs/slurm/...)")
    add("--partition", metavar="NAME", help="Slurm's default unless told")
    add("--account", metavar="NAME", help="Slurm's account")
    add("--time", metavar="D-HH:MM:SS", help="limit of a job, which then is queued again")
    add("--image", metavar="IMAGE", help="container (pyxis), such as nvcr.io#nvidia/pytorch:25.09-py3")
    add("--mounts", metavar="A:B,C:D", help="more mounts for it; the repository and the runs are there")
    add("--sbatch", metavar="A=B", default="", help='more options of sbatch: "qos=high nice=10"')
    add("--dry-run", action="store_true", help="check and print, submit nothing")
    args = parser.parse_args(words)
    args.flags = flags
    command.require_printable(parser, [*words, *flags])
    return args


# ------------------------------------------------------------------------------------------------
# The two jobs


class JobPlan:
    """The two jobs: settings, environment and commands.

    Attributes:
        base: the folder that --out names or stands for.
        runs: the root of a task's runs, with {} for its model.
        folders: the root of each model's runs.
        more: further options of sbatch.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.models = list(dict.fromkeys(map(script.find_model, words_of(args.model))))
        _require_sense(args, self.models)
        self.more = _options(args.sbatch)
        _require_time(args.time, self.more)
        described = {model: script.describe(model, args.flags, args.preset) for model in self.models}
        self.nodes, self.ngpu = _machines(args, described)
        if self.nodes > 1 and args.host_load not in (None, "0"):
            raise Mistake(f"--host-load with --nodes {self.nodes}: only the first node would be busy")
        for model, description in described.items():
            ask.chosen_variants(args.variant or args.variants, description)
            if args.over:
                sweep.flags_of(args, model, description, args.preset)
            self.on_gpu = script.needs_gpu(description, args.preset)
        self.base, self.runs = self._folders()
        self.folders = [Path(str(self.runs).replace("{}", model)) for model in self.models]
        given = [(name, getattr(args, name)) for name in ask.flags_for("submit")]
        self.asked = [word for name, text in given if text is not None for word in (flag_of(name), text)]
        # The command on the node would find these mistakes too late.
        run.parse(["--model", self.models[0], *self.asked])

    def _folders(self):
        args = self.args
        load = f"-load{args.host_load}" if args.host_load not in (None, "0") else ""
        base = Path(args.out).resolve() if args.out else RUNS / "slurm" / f"{self.nodes}x{self.ngpu}"
        if "{}" in str(base):
            raise Mistake(f"--out {base}: without braces, they stand for a task's model")
        if len(self.models) == 1 and args.out:
            return base, base
        return base, base / f"{{}}-{args.preset}{load}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables that this command sets for the jobs; sbatch hands them on."""
        python = ROOT / ".venv" / "bin" / "python"
        chosen = {"RUNS": str(self.runs), "PYTHON": str(python) if python.exists() else sys.executable}
        chosen["NGPU"] = str(self.ngpu)
        if self.args.image:
            mounts = ",".join([f"{self.base}:{self.base}", *words_of(self.args.mounts or "")])
            chosen |= {"IMAGE": self.args.image, "MOUNTS": mounts}
        return chosen

    def sbatch_bench(self) -> list[str]:
        """Return the command that submits the job which measures."""
        args, is_array = self.args, len(self.models) > 1
        words = self._sbatch("slurm-%A_%a.out" if is_array else "slurm-%j.out", "--hold")
        words += [f"--job-name=bench-{'sweep' if args.values else '-'.join(self.models)}", f"--nodes={self.nodes}"]
        words += [f"--array=0-{len(self.models) - 1}"] * is_array
        words += [f"--gpus-per-node={self.ngpu}"] * (self.on_gpu and not any("gpu" in word for word in self.more))
        words += [f"--time={args.time}"] * bool(args.time)
        words += [*self.more, str(SCRIPTS / "bench.sbatch")]
        words += ["benchmarks.sweep" if args.over else "benchmarks.run", *self.models, "--", "--model", "{}"]
        words += ["--preset", args.preset, "--out", str(self.runs)]
        words += ["--over", args.over, "--values", ",".join(map(str, args.values))] if args.over else []
        words += ["--variant", args.variant] if args.variant else []
        return [*words, *self.asked, *(["--", *args.flags] if args.flags else [])]

    def sbatch_collate(self, job: str) -> list[str]:
        """Return the command that submits the job which prints the tables, after the job of this id."""
        words = [*self._sbatch("collate-%j.out"), f"--dependency=afterany:{job}", "--kill-on-invalid-dep=yes"]
        words += [word for word in self.more if _name(word) in SITE]
        return [*words, str(SCRIPTS / "collate.sbatch"), job, *map(str, self.folders)]

    def _sbatch(self, log, *first):
        words = ["sbatch", "--parsable", *first, f"--chdir={ROOT}", "--export=ALL"]
        words += [f"--output={str(self.base).replace('%', '%%')}/logs/{log}"]
        given = {name: getattr(self.args, name) for name in ("partition", "account")}
        return words + [f"--{name}={value}" for name, value in given.items() if value]

    def card(self) -> str:
        """Return settings and commands as text."""
        args, unit = self.args, "GPUs" if self.on_gpu else "ranks, on the CPU"
        over = f"  over {args.over} {', '.join(map(str, args.values))}" if args.values else ""
        options = " ".join([*self.asked, *args.flags])
        site = "  ".join(f"{name} {getattr(args, name) or 'default'}" for name in ("partition", "account", "time"))
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [
            f"jobs     {', '.join(self.models)}  preset {args.preset}{over}  {options}".rstrip(),
            f"nodes    {self.nodes} x {self.ngpu} {unit}  {site}",
            f"image    {args.image or 'none'}{f'  mounts {args.mounts}' if args.mounts else ''}",
            *(f"runs     {shown(folder)}" for folder in self.folders),
            f"\n{' '.join(settings)} \\\n    {shlex.join(self.sbatch_bench())}",
            f"PYTHON={shlex.quote(self.environment['PYTHON'])} \\\n    {shlex.join(self.sbatch_collate('JOB'))}",
            "scontrol release JOB\n",
        ]
        return "\n".join(lines)


def _require_sense(args, models):
    mistakes = {
        f"--model takes some of {', '.join(script.models())}": not models,
        "--over and --values belong together, as in --over batch --values 1,2,4": bool(args.over) != bool(args.values),
        "--over takes one --model; submit once for each": args.over and len(models) > 1,
        "--variants with --over: a sweep compares eager with one variant, --variant": args.over and args.variants,
        "--host-load with --over: a sweep is measured without other work": args.over and args.host_load,
        "--variant is for a sweep, --over is missing; --variants takes several": args.variant and not args.over,
        "--variant eager: a sweep compares eager with another variant": args.variant == "eager",
        "--mounts is for a container, --image is missing": args.mounts and not args.image,
    }
    for text, is_so in mistakes.items():
        if is_so:
            raise Mistake(text)


def _require_time(limit, more):
    """Require that a job's limit leaves time to work; where Slurm alone knows the limit, progress.py says it later."""
    flag, text = ("--time ", limit) if limit else ("SBATCH_TIMELIMIT=", os.environ.get("SBATCH_TIMELIMIT", ""))
    # Each overrides the next.
    sources = [*more, f"--signal={os.environ.get('SBATCH_SIGNAL', '')}", (ROOT / SCRIPTS / "bench.sbatch").read_text()]
    early_s = next(int(match[1]) for source in sources if (match := re.search(r"--signal=\S*@(\d+)", source)))
    if _seconds(text) < early_s + LEAST_WORK_S:
        reason = (
            f"jobs stop {early_s} s before their limit, so this leaves no time to work: take more, as in TIME=2:00:00"
        )
        raise Mistake(f"{flag}{text}: {reason}")


def _seconds(limit: str) -> float:
    """The seconds of a limit as Slurm writes it; infinity for 0 and for what is not written so."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit.strip())
    days, *rest = match.groups() if match else ("0",)
    numbers = [int(group) for group in rest if group]
    units = (3600, 60, 1) if days or len(numbers) == 3 else (60, 1)
    return 86400 * int(days or 0) + sum(map(operator.mul, numbers, units)) or math.inf


def _machines(args, described) -> tuple[int, int]:
    """(nodes, GPUs or ranks of each). What is not given is the MLPerf submission's: as many GPUs in all as it had."""
    nodes, ngpu, preset = args.nodes, args.ngpu, args.preset
    theirs = {model: script.submitted(description, preset) for model, description in described.items()}
    if len(set(theirs.values())) > 1 and not (nodes and ngpu):
        sizes = ", ".join(f"{model} {' x '.join(map(str, size or (1, 1)))}" for model, size in theirs.items())
        raise Mistake(f"--nodes and --ngpu are missing, and models of {preset} differ: {sizes}; submit each alone")
    their_nodes, their_ngpu = next(iter(theirs.values())) or (1, 1)
    ngpu = ngpu or their_ngpu
    if not nodes:
        # GPUs that are given without a submission are those of one node.
        nodes, rest = divmod(their_nodes * their_ngpu, ngpu) if any(theirs.values()) else (1, 0)
        if rest:
            gpus = their_nodes * their_ngpu
            raise Mistake(f"--ngpu {ngpu}: the submission's {gpus} GPUs are no multiple; give --nodes")
    settings = f"--nodes {nodes} x --ngpu {ngpu} (NODES, NGPU)"
    for description in described.values():
        script.require_world_size(description, preset, nodes * ngpu, settings)
    return nodes, ngpu


def _options(text) -> list[str]:
    """The options in --sbatch with two dashes each, which a user leaves out: they would be options of this command."""
    try:
        words = [f"--{word.lstrip('-')}" for word in shlex.split(text)]
    except ValueError as error:
        raise Mistake(f"--sbatch {text!r}: {error}") from None
    for word in words:
        if _name(word) in OWNED:
            raise Mistake(f"--sbatch {text!r}: {_name(word)} is set by this command")
    return words


def _name(word):
    return word.partition("=")[0].removeprefix("--")


# ------------------------------------------------------------------------------------------------
# The command


def submit(plan: JobPlan) -> int:
    """Print the plan and submit both jobs, or with --dry-run ask Slurm whether it would take them."""
    print(plan.card(), flush=True)
    is_dry = plan.args.dry_run
    if not shutil.which("sbatch"):
        print("nothing submitted: no sbatch on PATH, so that Slurm has not checked this")
        return 0 if is_dry else 1
    environment = jobs.inherited(plan.environment)
    collate = [word for word in plan.sbatch_collate("JOB") if "dep" not in _name(word)]
    jobs.check(plan.sbatch_bench(), collate, environment=environment)
    if is_dry:
        print("nothing submitted (--dry-run); Slurm would take both jobs")
        return 0
    for folder in (plan.base, *plan.folders):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    job, collate_job = jobs.submit(plan.sbatch_bench(), plan.sbatch_collate, environment)
    print(f"job {job}  {len(plan.models)} {'tasks' if len(plan.models) > 1 else 'task'}; squeue --job {job}")
    tables = shown(plan.base / "logs" / f"collate-{collate_job}.out")
    print(f"job {collate_job}  tables in {tables}, when {job} has ended, well or not")
    print(f"logs     {shown(plan.base / 'logs')}")
    return 0


def main(argv=None) -> int:
    """Run the program; return its exit status."""
    args = parse(argv)
    stopped = "\nstopped, nothing submitted"
    return command.exit_status(
        "python -m benchmarks.submit", lambda: submit(JobPlan(args)), (jobs.SlurmRefused,), stopped=stopped
    )


if __name__ == "__main__":
    sys.exit(main())
