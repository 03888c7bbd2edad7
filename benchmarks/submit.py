"""Submit a benchmark to Slurm: one job for all variants and rounds of a model, then one that makes the tables.

    python -m benchmarks.submit --model gpt3 --nodes 2 --ngpu 8 --partition gpu
    python -m benchmarks.submit --model gpt3,rnnt --time 2:00:00 -- --layers 4        an array over models
    python -m benchmarks.submit --model gpt3 --over batch --values 1,2,4              an array over sweep points

Settings are checked and printed before anything is submitted; --dry-run ends there. Variants and rounds are never
spread over jobs: two nodes may differ by more than what is measured. The jobs' own settings are in
benchmarks/slurm/README.md. Exit status: 0, 1 when Slurm refuses (nothing stays submitted), 2 for a mistake.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks import rounds, run

SCRIPTS = Path("benchmarks", "slurm")


class Refused(RuntimeError):
    """Slurm does not take the job; the message is its own."""


# ------------------------------------------------------------------------------------------------
# Command line


def parse(argv=None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = run.Parser(
        prog="python -m benchmarks.submit",
        description="Submit a benchmark to Slurm, and after it a job that makes the tables.",
        epilog="What follows -- goes to the training script.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="A,B", required=True, help=f"an array over {', '.join(run.models())}")
    parser.add_argument("--nodes", metavar="N", type=run.positive, default=1, help="nodes of one job (1)")
    parser.add_argument(
        "--ngpu", metavar="N", type=run.positive, default=1, help="GPUs, or ranks on the CPU, of a node (1)"
    )
    parser.add_argument("--preset", metavar="NAME", help="bench unless told, as jobs are for GPUs")
    for name in ("variants", "rounds", "steps", "host-load", "minutes"):
        parser.add_argument(f"--{name}", metavar="X", help="as in benchmarks.run")
    parser.add_argument("--over", metavar="QUANTITY", help="what benchmarks.sweep varies, with --values")
    parser.add_argument("--variant", metavar="NAME", help="with --over: what stands against eager (graph)")
    parser.add_argument("--values", metavar="1,2,4", help="an array over these points of the sweep")
    parser.add_argument("--out", metavar="DIR", help="records, on a shared file system (runs/slurm/<nodes>x<ngpu>/...)")
    parser.add_argument("--partition", metavar="NAME", help="Slurm's default unless told")
    parser.add_argument("--account", metavar="NAME", help="Slurm's account")
    parser.add_argument("--time", metavar="D-HH:MM:SS", help="time limit of a job; at its end it is queued again")
    parser.add_argument("--image", metavar="IMAGE", help="container (pyxis), such as nvcr.io#nvidia/pytorch:25.09-py3")
    parser.add_argument("--mounts", metavar="A:B,C:D", help="more mounts for it; the repository and records are there")
    parser.add_argument("--sbatch", metavar="A=B", default="", help='more options of sbatch: "qos=high gres=gpu:8"')
    parser.add_argument("--collate-partition", metavar="NAME", help="for the tables, which need no GPU (--partition)")
    parser.add_argument("--dry-run", action="store_true", help="check and print, submit nothing")
    args = parser.parse_args(argv[:split])
    args.flags = argv[split + 1 :]
    return args


# ------------------------------------------------------------------------------------------------
# What is submitted


class Plan:
    """The two jobs: settings, environment and commands. Raises run.Mistake for what cannot be."""

    def __init__(self, args):
        self.args = args
        self.models = list(dict.fromkeys(_list(args.model)))
        if not self.models:
            raise run.Mistake(f"--model takes some of {', '.join(run.models())}")
        if bool(args.over) != bool(args.values):
            raise run.Mistake("--over and --values belong together, as in --over batch --values 1,2,4")
        if args.over and len(self.models) > 1:
            raise run.Mistake("--over takes one --model; submit once for each")
        if args.over and args.variants:
            raise run.Mistake("--variants with --over: a sweep compares eager with one variant, --variant")
        if args.variant and not args.over:
            raise run.Mistake("--variant is for a sweep, --over is missing; --variants takes several")
        self.values = list(dict.fromkeys(_list(args.values))) if args.over else []
        if any(not value.isdigit() or int(value) < 1 for value in self.values) or (args.over and not self.values):
            raise run.Mistake(f"--values {args.values}: numbers from 1 up, as in 1,2,4")
        if args.mounts and not args.image:
            raise run.Mistake("--mounts is for a container, --image is missing")
        if args.nodes > 1 and args.host_load not in (None, "0"):
            raise run.Mistake("--host-load with --nodes > 1: only the first node would be busy")
        try:
            # Without their dashes, as a word with dashes is an option of this command.
            self.more = [f"--{word.lstrip('-')}" for word in shlex.split(args.sbatch)]
        except ValueError as error:
            raise run.Mistake(f"--sbatch {args.sbatch!r}: {error}") from None
        self.preset = args.preset or "bench"
        for model in self.models:
            self._check_script(model)
        self.items = self.values or self.models
        self.base, self.records = self._folders()
        self.folders = [Path(str(self.records).replace("{}", item)) for item in self.items]
        # Numbers and the rest are what the command on the node takes.
        run.parse(["--model", self.models[0], *self._asked()])

    def _check_script(self, model):
        description = run.describe(model, self.args.flags)
        presets = description["presets"]
        if self.preset not in presets:
            raise run.Mistake(f"{model} has no preset {self.preset!r}, --preset takes one of {', '.join(presets)}")
        run.choose_variants(self.args.variant or self.args.variants, description["variants"])
        sweeps = description.get("sweeps", {})
        if self.args.over and self.args.over not in sweeps:
            known = ", ".join(sweeps) or "none"
            raise run.Mistake(f"{model} has no quantity {self.args.over!r}, --over takes one of {known}")
        # Jobs start in the repository's root, and this command may not.
        self.flags = rounds.from_root(self.args.flags, description["flags"])

    def _folders(self):
        """The folder that --out names or stands for, and that of a task's records with {} for its item."""
        load = f"-load{self.args.host_load}" if self.args.host_load not in (None, "0") else ""
        size = f"{self.args.nodes}x{self.args.ngpu}"
        base = Path(self.args.out).resolve() if self.args.out else rounds.ROOT / "runs" / "slurm" / size
        if "{}" in str(base):
            raise run.Mistake(f"--out {base}: without braces, they stand for a task's item")
        if self.values:
            base = base if self.args.out else base / f"{self.models[0]}-{self.preset}-{self.args.over}{load}"
            return base, base / f"{self.args.over}-{{}}"
        if len(self.models) == 1 and self.args.out:
            return base, base
        return base, base / f"{{}}-{self.preset}{load}"

    def _asked(self):
        """Flags of benchmarks.run that have been given."""
        names = ("variants", "rounds", "steps", "host_load", "minutes")
        given = [(name, getattr(self.args, name)) for name in names]
        return [word for name, value in given if value is not None for word in (f"--{name.replace('_', '-')}", value)]

    @property
    def on_gpu(self) -> bool:
        return self.preset in run.GPU_PRESETS

    @property
    def environment(self) -> dict:
        """What bench.sbatch reads."""
        python = rounds.ROOT / ".venv" / "bin" / "python"
        chosen = {
            "RECORDS": str(self.records),
            "PYTHON": str(python) if python.exists() else sys.executable,
            "NGPU": str(self.args.ngpu),
            "IMAGE": self.args.image or "",
            "MOUNTS": ",".join([f"{self.base}:{self.base}", *_list(self.args.mounts or "")]) if self.args.image else "",
        }
        return {name: value for name, value in chosen.items() if value}

    def sbatch_bench(self, *more) -> list[str]:
        args = self.args
        log = self.base / "logs" / ("slurm-%A_%a.out" if len(self.items) > 1 else "slurm-%j.out")
        command = ["sbatch", "--parsable", *more, f"--chdir={rounds.ROOT}", f"--output={log}", "--export=ALL"]
        command += [f"--job-name=bench-{'sweep' if self.values else '-'.join(self.models)}", f"--nodes={args.nodes}"]
        command += [f"--array=0-{len(self.items) - 1}"] * (len(self.items) > 1)
        command += [f"--gpus-per-node={args.ngpu}"] * self.on_gpu
        command += [f"--time={args.time}"] * bool(args.time)
        command += [*self._site(args.partition), *self.more, str(SCRIPTS / "bench.sbatch")]
        if self.values:
            program, which = "benchmarks.sweep", ["--model", self.models[0], "--over", args.over, "--values", "{}"]
            which += ["--variant", args.variant] if args.variant else []
            out = self.base
        else:
            program, which, out = "benchmarks.run", ["--model", "{}"], self.records
        command += [program, *self.items, "--", *which, "--preset", self.preset, "--out", str(out), *self._asked()]
        return command + (["--", *self.flags] if self.flags else [])

    def sbatch_collate(self, job: str) -> list[str]:
        command = ["sbatch", "--parsable", f"--dependency=afterany:{job}", "--kill-on-invalid-dep=yes"]
        command += [f"--chdir={rounds.ROOT}", f"--output={self.base / 'logs' / 'collate-%j.out'}", "--export=ALL"]
        command += self._site(self.args.collate_partition or self.args.partition)
        return [*command, str(SCRIPTS / "collate.sbatch"), job, *map(str, self.folders)]

    def _site(self, partition):
        account = self.args.account
        return [f"--partition={partition}"] * bool(partition) + [f"--account={account}"] * bool(account)

    def print_card(self):
        args = self.args
        unit = "GPUs" if self.on_gpu else "ranks, on the CPU"
        sweep = f"  over {args.over} {', '.join(self.values)}" if self.values else ""
        asked = " ".join([*self._asked(), *self.flags])
        print(f"jobs     {', '.join(self.models)}  preset {self.preset}{sweep}  {asked}".rstrip())
        print(f"nodes    {args.nodes} x {args.ngpu} {unit}  partition {args.partition or 'default'}", end="")
        print(f"  account {args.account or 'default'}  time {args.time or 'default'}")
        print(f"image    {args.image or 'none'}{f'  mounts {args.mounts}' if args.mounts else ''}")
        for folder in self.folders:
            print(f"records  {_shown(folder)}")
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        print(f"\n{' '.join(settings)} \\\n    {shlex.join(self.sbatch_bench())}")
        collate = shlex.join(self.sbatch_collate("JOB"))
        print(f"PYTHON={shlex.quote(self.environment['PYTHON'])} \\\n    {collate}\n", flush=True)


def _list(text):
    return [word.strip() for word in text.split(",") if word.strip()]


def _shown(path):
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# ------------------------------------------------------------------------------------------------
# Slurm


def check_partition(*asked) -> None:
    """Raises run.Mistake for a partition that sinfo does not list; without an answer Slurm itself decides."""
    answer = _call(["sinfo", "--noheader", "--format=%R"])
    known = sorted(set(answer.stdout.split()))
    for name in asked:
        for part in _list(name or ""):
            if known and part not in known:
                raise run.Mistake(f"unknown partition {part!r}, Slurm knows {', '.join(known)}")


def submit(plan: Plan) -> tuple[str, str]:
    """Submit both jobs and return their ids. Raises Refused, with nothing left in the queue."""
    environment = {**os.environ, **plan.environment}
    for name in ("IMAGE", "MOUNTS"):
        # Of the caller's environment only what the card shows may reach the job.
        if name not in plan.environment:
            environment.pop(name, None)
    _sbatch(plan.sbatch_bench("--test-only"), environment)
    for folder in (plan.base, *plan.folders):
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    job = _sbatch(plan.sbatch_bench(), environment)
    try:
        return job, _sbatch(plan.sbatch_collate(job), environment)
    except BaseException:
        gone = _call(["scancel", job])
        if gone.returncode:
            print(f"job {job} could not be cancelled: {gone.stderr.strip()}", file=sys.stderr)
        raise


def _sbatch(command, environment):
    answer = _call(command, environment)
    if answer.returncode:
        said = answer.stderr.strip() or answer.stdout.strip() or f"exit status {answer.returncode}"
        raise Refused("\n".join(dict.fromkeys(said.splitlines())))
    # On a federation: ID;CLUSTER.
    return answer.stdout.strip().partition(";")[0]


def _call(command, environment=None):
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=rounds.ROOT, timeout=120)
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"no {command[0]} on PATH: this is no login node of Slurm")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"{command[0]} gives no answer in 120 s")


def main(argv=None) -> int:
    args = parse(argv)
    prog = "python -m benchmarks.submit"
    try:
        plan = Plan(args)
        check_partition(args.partition, args.collate_partition)
        plan.print_card()
        if args.dry_run:
            note = "" if shutil.which("sbatch") else ", and no sbatch on PATH"
            print(f"nothing submitted (--dry-run){note}")
            return 0
        job, collate = submit(plan)
    except run.Mistake as mistake:
        print(f"{prog}: {mistake}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except Refused as refusal:
        print(f"{prog}: nothing submitted: {refusal}", file=sys.stderr)
        return 1
    print(f"job {job}  {len(plan.items)} {'tasks' if len(plan.items) > 1 else 'task'}; squeue --job {job}")
    print(f"job {collate}  tables, when {job} has ended, well or not")
    print(f"logs     {_shown(plan.base / 'logs')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
