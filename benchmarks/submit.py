"""Submit a benchmark to Slurm: one job for all variants and cycles of a model, then one that prints the tables.

    python -m benchmarks.submit --model gpt3 --nodes 2 --ngpu 8 --partition gpu
    python -m benchmarks.submit --model gpt3 --preset mlperf --dry-run                the submission's 1,452 nodes of 8
    python -m benchmarks.submit --model gpt3,rnnt --time 2:00:00 -- --layers 4        an array over models
    python -m benchmarks.submit --model gpt3 --over batch --values 1,2,4              an array over sweep points

Settings are checked, Slurm's by `sbatch --test-only`, and printed before anything is submitted; --dry-run ends there.
Where there is no sbatch, and with --dry-run where it reaches no cluster, all is printed unchecked. Nodes and GPUs that
are not given are those of the MLPerf submission whose preset it is, else 1; a number of ranks on which the preset does
not run is refused. Variants and cycles are never spread over jobs: two nodes may differ by more than what is measured.
The jobs' own settings are in benchmarks/slurm/README.md. The first job is held until Slurm has taken the second, and
both are cancelled when that fails or this command is stopped before. Exit status: 0, 1 when Slurm refuses, 2 for a
mistake, 130 when stopped.
"""

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from benchmarks import ROOT, ask, command, run, script
from benchmarks.command import RUNS, Mistake, shown, words_of
from benchmarks.slurm import queue
from benchmarks.sweeps import quantity
from common.config import flag_of

SCRIPTS = Path("benchmarks", "slurm")
PROG = "python -m benchmarks.submit"

# Options of sbatch that would break what this command promises, or have an option of their own here.
OWNED: tuple[str, ...] = ("array", "chdir", "clusters", "dependency", "export", "export-file", "help", "hold", "input")
OWNED += ("kill-on-invalid-dep", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable")
OWNED += ("requeue", "test-only", "time", "usage", "version", "wait", "wrap")
# Where a job may run: the one that makes the tables needs them too.
SITE = ("account", "qos", "reservation")
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")
# Flags of benchmarks.run that are handed on.
HANDED_ON = ("variants", "cycles", "minutes", "host_load")


def parse(argv=None) -> argparse.Namespace:
    """Return the command line. Mistakes end the program with one line."""
    own, flags = command.split_flags(argv)
    about = "Submit a benchmark to Slurm, and after it a job that prints the tables."
    parser = command.parser_of("submit", about, command.TO_SCRIPT)
    add = parser.add_argument
    add(
        "--model",
        metavar="A,B",
        type=command.model_name,
        required=True,
        help=f"an array over {', '.join(script.models())}",
    )
    theirs = "of the submission whose preset it is, else 1"
    add("--nodes", metavar="N", type=command.positive, help=f"nodes of one job (as many as give the GPUs {theirs})")
    add("--ngpu", metavar="N", type=command.positive, help=f"GPUs, or ranks on the CPU, of a node (those {theirs})")
    add("--preset", metavar="NAME", default="bench", help="bench unless told, as jobs are for GPUs")
    for name in HANDED_ON:
        add(flag_of(name), metavar="X", help="as in benchmarks.run")
    add("--over", metavar="QUANTITY", help="what benchmarks.sweep varies, with --values")
    add("--variant", metavar="NAME", help="with --over: what stands against eager (the model's first graph)")
    add("--values", metavar="1,2,4", type=command.values, help="an array over these points of the sweep")
    add("--out", metavar="DIR", help="root of the runs, on a shared file system (runs/slurm/...)")
    add("--partition", metavar="NAME", help="Slurm's default unless told")
    add("--account", metavar="NAME", help="Slurm's account")
    add("--time", metavar="D-HH:MM:SS", help="limit of a job, which then is queued again")
    add("--image", metavar="IMAGE", help="container (pyxis), such as nvcr.io#nvidia/pytorch:25.09-py3")
    add("--mounts", metavar="A:B,C:D", help="more mounts for it; the repository and the runs are there")
    add("--sbatch", metavar="A=B", default="", help='more options of sbatch: "qos=high nice=10"')
    add("--collate-partition", metavar="NAME", help="for the tables, which need no GPU (--partition)")
    add("--dry-run", action="store_true", help="check and print, submit nothing")
    args = parser.parse_args(own)
    args.flags = flags
    for word in filter(lambda word: not word.isprintable(), [*own, *flags]):
        parser.error(f"{word!a}: has a character that cannot be printed")
    return args


# ------------------------------------------------------------------------------------------------
# What is submitted


class Plan:
    """The two jobs: settings, environment and commands.

    Args:
        args: of `parse`.

    Attributes:
        items: models, or values of a sweep, a task of the array each.
        base: the folder that --out names or stands for.
        runs: the root of a task's runs, with {} for its item.
        folders: the same of each item.
        more: further options of sbatch.
        jobs: the ids of those that are in the queue.

    Raises:
        Mistake: something cannot be; the text names what can.
    """

    def __init__(self, args):
        self.args, self.jobs = args, []
        self.models = list(dict.fromkeys(words_of(args.model)))
        if not self.models:
            raise Mistake(f"--model takes some of {', '.join(script.models())}")
        if bool(args.over) != bool(args.values):
            raise Mistake("--over and --values belong together, as in --over batch --values 1,2,4")
        if args.over and len(self.models) > 1:
            raise Mistake("--over takes one --model; submit once for each")
        if args.over and args.variants:
            raise Mistake("--variants with --over: a sweep compares eager with one variant, --variant")
        if args.variant and not args.over:
            raise Mistake("--variant is for a sweep, --over is missing; --variants takes several")
        if args.variant == "eager":
            raise Mistake("--variant eager: a sweep compares eager with another variant")
        if args.mounts and not args.image:
            raise Mistake("--mounts is for a container, --image is missing")
        self.more = _more(args.sbatch)
        if "SBATCH_CLUSTERS" in os.environ:
            raise Mistake("SBATCH_CLUSTERS is set: use SLURM_CLUSTERS, which scontrol and scancel know too")
        descriptions = {model: self._described(model) for model in self.models}
        self.nodes, self.ngpu, self.is_submitted = self._machines(descriptions)
        if self.nodes > 1 and args.host_load not in (None, "0"):
            raise Mistake(f"--host-load with --nodes {self.nodes}: only the first node would be busy")
        for model in self.models:
            self._check_script(model, descriptions[model])
        self.items = [str(value) for value in args.values or []] or self.models
        self.base, self.runs = self._folders()
        self.folders = [Path(str(self.runs).replace("{}", item)) for item in self.items]
        given = [(name, getattr(args, name)) for name in HANDED_ON]
        self.asked = [word for name, text in given if text is not None for word in (flag_of(name), text)]
        # Numbers and the rest are what the command on the node takes.
        run.parse(["--model", self.models[0], *self.asked])
        for folder in (self.base, *self.folders):
            self._require_writable(folder / "logs")

    def _described(self, model):
        """Return the script's --describe with the preset and the flags."""
        args, presets = self.args, script.describe(model, [])["presets"]
        if args.preset not in presets:
            raise Mistake(f"{model} has no preset {args.preset!r}, --preset takes one of {', '.join(presets)}")
        return script.describe(model, args.flags, args.preset)

    def _machines(self, descriptions) -> tuple[int, int, bool]:
        """(nodes, GPUs or ranks of each, whether they are the MLPerf submission's own).

        What is not given is the submission's: GPUs of a node, and nodes for as many GPUs as it had.
        """
        nodes, ngpu, preset = self.args.nodes, self.args.ngpu, self.args.preset
        theirs = {model: script.submitted(description, preset) for model, description in descriptions.items()}
        if len(set(theirs.values())) > 1 and not (nodes and ngpu):
            said = ", ".join(f"{model} {' x '.join(map(str, own or (1, 1)))}" for model, own in theirs.items())
            raise Mistake(f"--nodes and --ngpu are missing, and models of {preset} differ: {said}; submit each alone")
        submitted = next(iter(theirs.values()))
        if submitted is None:
            nodes, ngpu = nodes or 1, ngpu or 1
        else:
            ngpu, num_gpus = ngpu or submitted[1], submitted[0] * submitted[1]
            if not nodes:
                nodes, rest = divmod(num_gpus, ngpu)
                if rest:
                    raise Mistake(f"--ngpu {ngpu}: the submission's {num_gpus} GPUs are no multiple; give --nodes")
        asked = f"--nodes {nodes} x --ngpu {ngpu} (NODES, NGPU)"
        for description in descriptions.values():
            script.require_world_size(description, preset, nodes * ngpu, asked)
        return nodes, ngpu, (nodes, ngpu) == submitted

    def _check_script(self, model, description):
        args = self.args
        self.on_gpu = script.needs_gpu(description, args.preset)
        ask.chosen_variants(args.variant or args.variants, description)
        if args.over:
            varied = quantity.find(description, args.preset, args.over, args.flags)
            quantity.require(model, args.preset, varied, args.flags, args.values)
        # Jobs start in the repository's root, and this command may not.
        self.flags = script.from_root(args.flags, description["flags"])

    def _require_writable(self, folder):
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        if not parent.is_dir():
            raise Mistake(f"--out {self.base}: {parent} is no folder")
        if not os.access(parent, os.W_OK):
            raise Mistake(f"--out {self.base}: cannot write in {parent}")

    def _folders(self):
        args = self.args
        load = f"-load{args.host_load}" if args.host_load not in (None, "0") else ""
        base = Path(args.out).resolve() if args.out else RUNS / "slurm" / f"{self.nodes}x{self.ngpu}"
        if "{}" in str(base):
            raise Mistake(f"--out {base}: without braces, they stand for a task's item")
        if args.values:
            base = base if args.out else base / f"{self.models[0]}-{args.preset}-{args.over}{load}"
            return base, base / f"{args.over}-{{}}"
        if len(self.models) == 1 and args.out:
            return base, base
        return base, base / f"{{}}-{args.preset}{load}"

    @property
    def environment(self) -> dict:
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
        args, is_array = self.args, len(self.items) > 1
        words = self._sbatch("slurm-%A_%a.out" if is_array else "slurm-%j.out", args.partition, "--hold")
        words += [f"--job-name=bench-{'sweep' if args.values else '-'.join(self.models)}", f"--nodes={self.nodes}"]
        words += [f"--array=0-{len(self.items) - 1}"] * is_array
        words += [f"--gpus-per-node={self.ngpu}"] * (self.on_gpu and not self._names_gpus())
        words += [f"--time={args.time}"] * bool(args.time)
        words += [*self.more, str(SCRIPTS / "bench.sbatch")]
        if args.over:
            which = ["--model", self.models[0], "--over", args.over, "--values", "{}"]
            which += ["--variant", args.variant] if args.variant else []
            words += ["benchmarks.sweep", *self.items, "--", *which, "--preset", args.preset, "--out", str(self.base)]
        else:
            words += ["benchmarks.run", *self.items, "--", "--model", "{}", "--preset", args.preset]
            words += ["--out", str(self.runs)]
        return [*words, *self.asked, *(["--", *self.flags] if self.flags else [])]

    def sbatch_collate(self, job: str) -> list[str]:
        """Return the command that submits the job which prints the tables, after the job of this id."""
        partition = self.args.collate_partition or self._option("partition") or self.args.partition
        words = self._sbatch("collate-%j.out", partition)
        words += [f"--dependency=afterany:{job}", "--kill-on-invalid-dep=yes"]
        words += [word for word in self.more if word.partition("=")[0].removeprefix("--") in SITE]
        return [*words, str(SCRIPTS / "collate.sbatch"), job, *map(str, self.folders)]

    def _sbatch(self, log, partition, *first):
        account = self.args.account
        words = ["sbatch", "--parsable", *first, f"--chdir={ROOT}", "--export=ALL"]
        words += [f"--output={str(self.base).replace('%', '%%')}/logs/{log}"]
        return words + [f"--partition={partition}"] * bool(partition) + [f"--account={account}"] * bool(account)

    def _option(self, name):
        """The value of a further option, "" where it has none, None where it is not there; the last one counts."""
        found = [word.partition("=")[2] for word in self.more if word.partition("=")[0] == f"--{name}"]
        return found[-1] if found else None

    def _names_gpus(self):
        """Return whether the user's own Slurm options say which GPUs the job gets."""
        gres = (self._option("gres"), os.environ.get("SBATCH_GRES"))
        if any("gpu" in (text or "") for text in gres) or any(map(self._option, GPU_OPTIONS)):
            return True
        # SBATCH_GPUS_PER_NODE gives way to --ngpu, as to every option on a command line.
        return bool(os.environ.get("SBATCH_GPUS") or os.environ.get("SBATCH_GPUS_PER_TASK"))

    def _lead_s(self):
        """Seconds before its limit at which a job is told to stop: Slurm's 60 where --signal names none."""
        signal = self._option("signal") or os.environ.get("SBATCH_SIGNAL") or "B:USR1@120"
        lead = signal.partition("@")[2]
        return int(lead) if lead.isdigit() else 60

    def _in_effect(self, name, variable):
        """An option of sbatch, as sbatch itself chooses: from --sbatch, this command line or the environment."""
        return self._option(name) or getattr(self.args, name) or os.environ.get(variable) or "default"

    def print_card(self) -> None:
        """Print settings and commands."""
        args = self.args
        unit = "GPUs" if self.on_gpu else "ranks, on the CPU"
        over = f"  over {args.over} {', '.join(self.items)}" if args.values else ""
        asked = " ".join([*self.asked, *self.flags])
        print(f"jobs     {', '.join(self.models)}  preset {args.preset}{over}  {asked}".rstrip())
        site = (("partition", "SBATCH_PARTITION"), ("account", "SBATCH_ACCOUNT"), ("time", "SBATCH_TIMELIMIT"))
        chosen = "  ".join(f"{name} {self._in_effect(name, variable)}" for name, variable in site)
        print(f"nodes    {self.nodes} x {self.ngpu} {unit}{', as submitted' * self.is_submitted}  {chosen}")
        print(f"image    {args.image or 'none'}{f'  mounts {args.mounts}' if args.mounts else ''}")
        for folder in self.folders:
            print(f"runs     {shown(folder)}")
        for name, value in self.from_environment().items():
            print(f"environ  {name}={shlex.quote(value)}")
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        print(f"\n{' '.join(settings)} \\\n    {shlex.join(self.sbatch_bench())}")
        print(f"PYTHON={shlex.quote(self.environment['PYTHON'])} \\\n    {shlex.join(self.sbatch_collate('JOB'))}")
        print("scontrol release JOB\n", flush=True)

    def from_environment(self) -> dict:
        """Return what of the caller's environment changes the job: sbatch's variables, and those of bench.sbatch.

        The rest reaches the job too, as it does by hand.
        """
        read = ["MAX_REQUEUES", "GRAPH_SOCKET_DIR"] + ["MASTER_ADDR", "MASTER_PORT"] * (self.nodes > 1)
        read += ["NODE_PYTHON"] * (self.nodes > 1 or bool(self.args.image))
        # An option on the command line is stronger.
        said = {word.partition("=")[0].lstrip("-") for word in self.sbatch_bench() if word.startswith("--")}
        for name in sorted(os.environ):
            option = "time" if name == "SBATCH_TIMELIMIT" else name.removeprefix("SBATCH_").lower().replace("_", "-")
            if name.startswith("SBATCH_") and name not in queue.DROPPED and option not in said:
                read.append(name)
        return {name: os.environ[name] for name in read if os.environ.get(name)}

    def submit(self) -> int:
        """Submit both jobs, or with --dry-run ask Slurm whether it would take them; return the exit status."""
        environment = queue.inherited(self.environment)
        if not shutil.which("sbatch"):
            print("nothing submitted: no sbatch on PATH, so that Slurm has not checked this", flush=True)
            return 0 if self.args.dry_run else 1
        collate = [word for word in self.sbatch_collate("JOB") if "dep" not in word.partition("=")[0]]
        try:
            queue.check(self.sbatch_bench(), collate, environment=environment)
        except queue.Refused as refusal:
            if not self.args.dry_run or queue.reaches_cluster(environment):
                raise
            why = str(refusal).splitlines()[-1]
            print(f"nothing submitted (--dry-run); Slurm has not checked this, no cluster answers: {why}", flush=True)
            return 0
        if self.args.dry_run:
            print("nothing submitted (--dry-run); Slurm would take both jobs", flush=True)
            return 0
        for folder in (self.base, *self.folders):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        queue.submit(self.jobs, self.sbatch_bench(), self.sbatch_collate, environment, self._lead_s())
        job, collate = self.jobs
        print(f"job {job}  {len(self.items)} {'tasks' if len(self.items) > 1 else 'task'}; squeue --job {job}")
        print(f"job {collate}  tables, when {job} has ended, well or not")
        print(f"logs     {shown(self.base / 'logs')}", flush=True)
        return 0


def _more(text) -> list[str]:
    """The options in --sbatch with two dashes each."""
    try:
        # Given without their dashes, as a word with dashes is an option of this command.
        words = [f"--{word.lstrip('-')}" for word in shlex.split(text)]
    except ValueError as error:
        raise Mistake(f"--sbatch {text!r}: {error}") from None
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        # sbatch takes the beginning of a name for the whole.
        owned = next((option for option in OWNED if option.startswith(name)), None)
        if owned:
            own = f"--{owned} of this command does it" if owned in ("nodes", "time") else "this command sets it"
            raise Mistake(f"--sbatch {text!r}: not {owned}, {own}")
    return words


def main(argv=None) -> int:
    """The program."""
    args = parse(argv)
    jobs: list[str] = []

    def work():
        plan = Plan(args)
        plan.jobs = jobs
        try:
            plan.print_card()
            return plan.submit()
        except BrokenPipeError:
            # Python would write into it once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"{PROG}: nobody reads the output, {state()}", file=sys.stderr)
            return 0 if jobs or args.dry_run else 1
        except queue.Refused as refusal:
            print(f"{PROG}: nothing submitted: {refusal}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"{PROG}: stopped, {state()}", file=sys.stderr)
            return 130

    def state():
        return f"submitted: jobs {' and '.join(jobs)}" if jobs else "nothing submitted"

    return command.exit_status(PROG, work, (queue.Unknown,), f"{PROG}: stopped, nothing submitted")


if __name__ == "__main__":
    sys.exit(main())
