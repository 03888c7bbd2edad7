"""Submit a benchmark to Slurm: one job for all variants and rounds of a model, then one that makes the tables.

    python -m benchmarks.submit --model gpt3 --nodes 2 --ngpu 8 --partition gpu
    python -m benchmarks.submit --model gpt3,rnnt --time 2:00:00 -- --layers 4        an array over models
    python -m benchmarks.submit --model gpt3 --over batch --values 1,2,4              an array over sweep points

Settings are checked and printed before anything is submitted; --dry-run ends there. Variants and rounds are never
spread over jobs: two nodes may differ by more than what is measured. The jobs' own settings are in
benchmarks/slurm/README.md. The first job is held until Slurm has taken the second, and both are cancelled when that
fails or this command is stopped before. Exit status: 0, 1 when Slurm refuses, 2 for a mistake, 130 when stopped.
"""

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from benchmarks import rounds, run, script, sweep

SCRIPTS = Path("benchmarks", "slurm")
SLURM_LIMIT_S = 120
# What bench.sbatch asks for, and what Slurm takes where --signal names no time.
SIGNAL_LEAD_S, SLURM_SIGNAL_LEAD_S = 120, 60

# Options of sbatch that would break what this command promises, or have an option of their own here.
OWNED = ("array", "chdir", "clusters", "dependency", "export", "export-file", "help", "hold", "input")
OWNED += ("kill-on-invalid-dep", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable")
OWNED += ("requeue", "test-only", "time", "usage", "version", "wait", "wrap")
# The same in the environment, where a login script may have left them.
DROPPED = ("SBATCH_ARRAY_INX", "SBATCH_INPUT", "SBATCH_NO_REQUEUE", "SBATCH_OPEN_MODE", "SBATCH_WAIT")
# Where a job may run: the one that makes the tables needs them too.
SITE = ("--account", "--qos", "--reservation")
GPU_OPTIONS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task")


class Refused(RuntimeError):
    """Slurm does not take the job, and nothing is in its queue; the message is its own."""


class Unknown(RuntimeError):
    """Something may be in the queue; the message says what, and how to look."""


# ------------------------------------------------------------------------------------------------
# Command line


def parse(argv=None) -> argparse.Namespace:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    parser = script.Parser(
        prog="python -m benchmarks.submit",
        description="Submit a benchmark to Slurm, and after it a job that makes the tables.",
        epilog="What follows -- goes to the training script.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="A,B", required=True, help=f"an array over {', '.join(script.models())}")
    parser.add_argument("--nodes", metavar="N", type=script.positive, default=1, help="nodes of one job (1)")
    parser.add_argument(
        "--ngpu", metavar="N", type=script.positive, default=1, help="GPUs, or ranks on the CPU, of a node (1)"
    )
    parser.add_argument("--preset", metavar="NAME", help="bench unless told, as jobs are for GPUs")
    for name in ("variants", "rounds", "steps", "host-load", "minutes"):
        parser.add_argument(f"--{name}", metavar="X", help="as in benchmarks.run")
    parser.add_argument("--over", metavar="QUANTITY", help="what benchmarks.sweep varies, with --values")
    parser.add_argument("--variant", metavar="NAME", help="with --over: what stands against eager (graph)")
    parser.add_argument("--values", metavar="1,2,4", type=sweep._values, help="an array over these points of the sweep")
    parser.add_argument("--out", metavar="DIR", help="root of the sessions, on a shared file system (runs/slurm/...)")
    parser.add_argument("--partition", metavar="NAME", help="Slurm's default unless told")
    parser.add_argument("--account", metavar="NAME", help="Slurm's account")
    parser.add_argument("--time", metavar="D-HH:MM:SS", help="limit of a job, which then is queued again")
    parser.add_argument("--image", metavar="IMAGE", help="container (pyxis), such as nvcr.io#nvidia/pytorch:25.09-py3")
    parser.add_argument("--mounts", metavar="A:B,C:D", help="more mounts for it; the repository and records are there")
    parser.add_argument("--sbatch", metavar="A=B", default="", help='more options of sbatch: "qos=high nice=10"')
    parser.add_argument("--collate-partition", metavar="NAME", help="for the tables, which need no GPU (--partition)")
    parser.add_argument("--dry-run", action="store_true", help="check and print, submit nothing")
    args = parser.parse_args(argv[:split])
    args.flags = argv[split + 1 :]
    return args


# ------------------------------------------------------------------------------------------------
# What is submitted


class Plan:
    """The two jobs: settings, environment and commands. Raises script.Mistake for what cannot be.

    jobs: the ids of those that are in the queue.
    """

    def __init__(self, args):
        self.args = args
        self.jobs: list[str] = []
        self.models = list(dict.fromkeys(_list(args.model)))
        if not self.models:
            raise script.Mistake(f"--model takes some of {', '.join(script.models())}")
        if bool(args.over) != bool(args.values):
            raise script.Mistake("--over and --values belong together, as in --over batch --values 1,2,4")
        if args.over and len(self.models) > 1:
            raise script.Mistake("--over takes one --model; submit once for each")
        if args.over and args.variants:
            raise script.Mistake("--variants with --over: a sweep compares eager with one variant, --variant")
        if args.variant and not args.over:
            raise script.Mistake("--variant is for a sweep, --over is missing; --variants takes several")
        if args.variant == "eager":
            raise script.Mistake("--variant eager: a sweep compares eager with another variant")
        self.values = args.values or []
        if args.mounts and not args.image:
            raise script.Mistake("--mounts is for a container, --image is missing")
        if args.nodes > 1 and args.host_load not in (None, "0"):
            raise script.Mistake("--host-load with --nodes > 1: only the first node would be busy")
        self.more = _more(args.sbatch)
        _check_time(self._in_effect("time", "SBATCH_TIMELIMIT"), self._in_effect("signal", "SBATCH_SIGNAL"))
        if "SBATCH_CLUSTERS" in os.environ:
            raise script.Mistake("SBATCH_CLUSTERS is set: use SLURM_CLUSTERS, which scontrol and scancel know too")
        self.preset = args.preset or "bench"
        for model in self.models:
            self._check_script(model)
        self.items = [str(value) for value in self.values] or self.models
        self.base, self.records = self._folders()
        self.folders = [Path(str(self.records).replace("{}", item)) for item in self.items]
        # Numbers and the rest are what the command on the node takes.
        run.parse(["--model", self.models[0], *self._asked()])
        for folder in (self.base, *self.folders):
            self._require_writable(folder / "logs")

    def _check_script(self, model):
        presets = script.describe(model, [])["presets"]
        if self.preset not in presets:
            raise script.Mistake(f"{model} has no preset {self.preset!r}, --preset takes one of {', '.join(presets)}")
        description = script.describe(model, self.args.flags, self.preset)
        self.on_gpu = script.needs_gpu(description, self.preset)
        script.choose_variants(self.args.variant or self.args.variants, description["variants"])
        sweeps = description.get("sweeps", {})
        if self.args.over and self.args.over not in sweeps:
            known = ", ".join(sweeps) or "none"
            raise script.Mistake(f"{model} has no quantity {self.args.over!r}, --over takes one of {known}")
        if self.args.over:
            self._check_sweep(description)
        # Jobs start in the repository's root, and this command may not.
        self.flags = rounds.from_root(self.args.flags, description["flags"])

    def _check_sweep(self, description):
        """The sweep's own checks of its values, less those that need the job's GPUs."""
        # Without a session, which would ask this machine.
        draft = object.__new__(sweep.Sweep)
        draft.args, draft.preset = argparse.Namespace(over=self.args.over, flags=self.args.flags), self.preset
        draft.session = argparse.Namespace(description=description, flags=self.args.flags)
        draft.fields = draft._fields(description["sweeps"])
        for value in self.values:
            script.describe(self.models[0], draft._flags(value), self.preset)

    def _require_writable(self, folder):
        parent = next(path for path in (folder, *folder.parents) if path.exists())
        if not parent.is_dir():
            raise script.Mistake(f"--out {self.base}: {parent} is no folder")
        if not os.access(parent, os.W_OK):
            raise script.Mistake(f"--out {self.base}: cannot write in {parent}")

    def _in_effect(self, option, variable):
        """(where it is from, value) of an option of sbatch, as sbatch itself would choose; the value may be None."""
        added = _option(self.more, option)
        given = getattr(self.args, option, None)
        if added is not None:
            return f"--sbatch {option}", added
        return (f"--{option}", given) if given else (variable, os.environ.get(variable))

    @property
    def partition(self) -> str | None:
        """Of the first job, None for Slurm's default."""
        return self._in_effect("partition", "SBATCH_PARTITION")[1]

    def _folders(self):
        """The folder that --out names or stands for, and that of a task's records with {} for its item."""
        load = f"-load{self.args.host_load}" if self.args.host_load not in (None, "0") else ""
        size = f"{self.args.nodes}x{self.args.ngpu}"
        base = Path(self.args.out).resolve() if self.args.out else rounds.ROOT / "runs" / "slurm" / size
        if "{}" in str(base):
            raise script.Mistake(f"--out {base}: without braces, they stand for a task's item")
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
    def environment(self) -> dict:
        """What this command sets for the jobs."""
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
        log = self._log("slurm-%A_%a.out" if len(self.items) > 1 else "slurm-%j.out")
        command = ["sbatch", "--parsable", "--hold", *more, f"--chdir={rounds.ROOT}", f"--output={log}", "--export=ALL"]
        command += [f"--job-name=bench-{'sweep' if self.values else '-'.join(self.models)}", f"--nodes={args.nodes}"]
        command += [f"--array=0-{len(self.items) - 1}"] * (len(self.items) > 1)
        command += [f"--gpus-per-node={args.ngpu}"] * (self.on_gpu and not self._names_gpus())
        command += [f"--time={args.time}"] * bool(args.time)
        command += [*self._site(args.partition), *self.more, str(SCRIPTS / "bench.sbatch")]
        if args.over:
            program, which = "benchmarks.sweep", ["--model", self.models[0], "--over", args.over, "--values", "{}"]
            which += ["--variant", args.variant] if args.variant else []
            out = self.base
        else:
            program, which, out = "benchmarks.run", ["--model", "{}"], self.records
        command += [program, *self.items, "--", *which, "--preset", self.preset, "--out", str(out), *self._asked()]
        return command + (["--", *self.flags] if self.flags else [])

    def sbatch_collate(self, job: str) -> list[str]:
        command = ["sbatch", "--parsable", f"--dependency=afterany:{job}", "--kill-on-invalid-dep=yes"]
        command += [f"--chdir={rounds.ROOT}", f"--output={self._log('collate-%j.out')}", "--export=ALL"]
        added = [word for word in self.more if word.partition("=")[0] in SITE]
        partition = self.args.collate_partition or _option(self.more, "partition") or self.args.partition
        command += [*self._site(partition), *added]
        return [*command, str(SCRIPTS / "collate.sbatch"), job, *map(str, self.folders)]

    def _log(self, name):
        return f"{str(self.base).replace('%', '%%')}/logs/{name}"

    def _names_gpus(self):
        """Whether the user says in his own way which GPUs the job gets."""
        gres = (_option(self.more, "gres"), os.environ.get("SBATCH_GRES"))
        if any("gpu" in (text or "") for text in gres) or any(_option(self.more, name) for name in GPU_OPTIONS):
            return True
        # SBATCH_GPUS_PER_NODE gives way to --ngpu, as to every option on a command line.
        return bool(os.environ.get("SBATCH_GPUS") or os.environ.get("SBATCH_GPUS_PER_TASK"))

    def _site(self, partition):
        account = self.args.account
        return [f"--partition={partition}"] * bool(partition) + [f"--account={account}"] * bool(account)

    def print_card(self):
        args = self.args
        unit = "GPUs" if self.on_gpu else "ranks, on the CPU"
        over = f"  over {args.over} {', '.join(self.items)}" if self.values else ""
        asked = " ".join([*self._asked(), *self.flags])
        print(f"jobs     {', '.join(self.models)}  preset {self.preset}{over}  {asked}".rstrip())
        account = self._in_effect("account", "SBATCH_ACCOUNT")[1]
        limit = self._in_effect("time", "SBATCH_TIMELIMIT")[1]
        print(f"nodes    {args.nodes} x {args.ngpu} {unit}  partition {self.partition or 'default'}", end="")
        print(f"  account {account or 'default'}  time {limit or 'default'}")
        print(f"image    {args.image or 'none'}{f'  mounts {args.mounts}' if args.mounts else ''}")
        for folder in self.folders:
            print(f"records  {_shown(folder)}")
        for name, value in self.from_environment().items():
            print(f"environ  {name}={shlex.quote(value)}")
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        print(f"\n{' '.join(settings)} \\\n    {shlex.join(self.sbatch_bench())}")
        collate = shlex.join(self.sbatch_collate("JOB"))
        print(f"PYTHON={shlex.quote(self.environment['PYTHON'])} \\\n    {collate}")
        print("scontrol release JOB\n", flush=True)

    def from_environment(self) -> dict:
        """What of the caller's environment changes the job: sbatch's own variables, and those that bench.sbatch reads.

        The rest reaches the job too, as it does by hand.
        """
        read = ["MAX_REQUEUES"] + ["MASTER_ADDR", "MASTER_PORT"] * (self.args.nodes > 1)
        read += ["NODE_PYTHON"] * (self.args.nodes > 1 or bool(self.args.image))
        # An option on the command line is stronger.
        said = {word.partition("=")[0].lstrip("-") for word in self.sbatch_bench() if word.startswith("--")}
        for name in sorted(os.environ):
            option = "time" if name == "SBATCH_TIMELIMIT" else name.removeprefix("SBATCH_").lower().replace("_", "-")
            if name.startswith("SBATCH_") and name not in DROPPED and option not in said:
                read.append(name)
        return {name: os.environ[name] for name in read if os.environ.get(name)}


def _more(text) -> list[str]:
    """The options in --sbatch with two dashes each."""
    try:
        # Given without their dashes, as a word with dashes is an option of this command.
        words = [f"--{word.lstrip('-')}" for word in shlex.split(text)]
    except ValueError as error:
        raise script.Mistake(f"--sbatch {text!r}: {error}") from None
    for word in words:
        name = word.partition("=")[0].removeprefix("--")
        if not re.fullmatch("[a-z][a-z-]+", name):
            raise script.Mistake(f"--sbatch {text!r}: {name!r} is no long option of sbatch, as in qos=high")
        # sbatch takes the beginning of a name for the whole.
        owned = next((option for option in OWNED if option.startswith(name)), None)
        if owned:
            own = f"--{owned} of this command does it" if owned in ("nodes", "time") else "this command sets it"
            raise script.Mistake(f"--sbatch {text!r}: not {owned}, {own}")
    return words


def _option(words, name):
    """The value of an option, "" where it has none, None where it is not there; the last one counts."""
    found = [word.partition("=")[2] for word in words if word.partition("=")[0] == f"--{name}"]
    return found[-1] if found else None


_TIME = re.compile(
    r"(?P<d>[0-9]+)-(?P<h>[0-9]+)(:(?P<m>[0-9]+)(:(?P<s>[0-9]+))?)?"
    r"|(?P<minutes>[0-9]+)(:(?P<seconds>[0-9]+))?"
    r"|(?P<hours>[0-9]+):(?P<mm>[0-9]+):(?P<ss>[0-9]+)"
)


def limit_s(text: str) -> int | None:
    """Seconds of a time limit in Slurm's formats, None for no limit. Raises ValueError for what is none of them."""
    if text.lower() in ("unlimited", "infinite", "-1", "0"):
        return None
    match = _TIME.fullmatch(text)
    if not match:
        raise ValueError("takes M, M:S, H:M:S, D-H, D-H:M or D-H:M:S, as in 30 or 2:00:00")
    units_s = {"d": 86400, "h": 3600, "m": 60, "s": 1, "minutes": 60, "seconds": 1, "hours": 3600, "mm": 60, "ss": 1}
    return sum(units_s[name] * int(value) for name, value in match.groupdict().items() if value)


def _check_time(limit, signalled):
    """limit, signalled: (where it is from, text). A job needs time to measure before it is told to stop."""
    (source, text), lead_s = limit, SIGNAL_LEAD_S
    if signalled[1]:
        match = re.search("@([0-9]+)$", signalled[1])
        lead_s = int(match[1]) if match else SLURM_SIGNAL_LEAD_S
    if not text:
        return
    try:
        seconds = limit_s(text)
    except ValueError as error:
        raise script.Mistake(f"{source} {text}: {error}") from None
    if seconds is not None and seconds < 2 * lead_s:
        least = f"{2 * lead_s / 60:.3g} minutes"
        raise script.Mistake(f"{source} {text}: the job stops {lead_s} s before its limit, ask for {least} at least")


def _list(text):
    return [word.strip() for word in text.split(",") if word.strip()]


def _shown(path):
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# ------------------------------------------------------------------------------------------------
# Slurm


def check_partition(*asked) -> None:
    """Raises script.Mistake for a partition that sinfo does not list; without an answer Slurm itself decides."""
    answer = _call(["sinfo", "--noheader", "--format=%R"])
    known = sorted(set(answer.stdout.split()))
    for name in asked:
        for part in _list(name or ""):
            if known and part not in known:
                raise script.Mistake(f"unknown partition {part!r}, Slurm knows {', '.join(known)}")


def submit(plan: Plan) -> None:
    """Submit both jobs; their ids are plan.jobs. The first is held until the second is in the queue.

    Raises Refused, or KeyboardInterrupt, with nothing left in the queue, and Unknown where that is not sure.
    """
    # sbatch hands all of this to the job; what is not asked for on the command line must not come from elsewhere.
    environment = {name: value for name, value in os.environ.items() if name not in (*DROPPED, "IMAGE", "MOUNTS")}
    environment |= plan.environment
    with signals_held_back() as arrived:
        try:
            _sbatch(plan.sbatch_bench("--test-only"), environment, arrived)
            for folder in (plan.base, *plan.folders):
                (folder / "logs").mkdir(parents=True, exist_ok=True)
            for command in (plan.sbatch_bench, lambda: plan.sbatch_collate(plan.jobs[0])):
                plan.jobs.append(_submitted(command(), environment))
                _stop_if(arrived)
            _sbatch(["scontrol", "release", plan.jobs[0]], environment, arrived)
        except BaseException as error:
            _cancel(plan, error)
            raise


def _cancel(plan, error):
    """Take back what is in the queue. Raises Unknown where that fails."""
    left = []
    # The end of the first would start the second.
    while plan.jobs:
        job = plan.jobs.pop()
        gone = _call(["scancel", job])
        if gone.returncode:
            left.append(f"job {job} could not be cancelled: {gone.stderr.strip()}; squeue --job {job}")
    if left:
        raise Unknown("; ".join([str(error) or "stopped", *left])) from None


@contextlib.contextmanager
def signals_held_back():
    """SIGINT, SIGTERM and SIGHUP only go into the list that this gives: between two calls there is a good place."""
    arrived = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_if(arrived):
    if arrived:
        raise KeyboardInterrupt


def _sbatch(command, environment, arrived):
    """A call that submits nothing. Raises Refused."""
    answer = _call(command, environment)
    if answer.returncode:
        raise Refused(_said(answer))
    _stop_if(arrived)


def _submitted(command, environment) -> str:
    """Submit, and return the job's id. Raises Refused, or Unknown where Slurm may have taken the job all the same."""
    answer = _call(command, environment)
    # On a federation: ID;CLUSTER.
    match = re.search(r"^([0-9]+)(;.*)?$", answer.stdout, re.MULTILINE)
    if answer.returncode == 0 and match:
        return match[1]
    said = _said(answer)
    # 124 is ours; of a socket that timed out sbatch does not know more than that.
    if answer.returncode in (0, 124) or answer.returncode < 0 or "timed out" in said.lower():
        name = _option(command, "job-name") or "collate"
        raise Unknown(f"{said}; whether a job is in the queue is unknown: squeue --me --name={name}, scancel its id")
    raise Refused(said)


def _said(answer):
    said = answer.stderr.strip() or answer.stdout.strip() or f"exit status {answer.returncode}"
    return "\n".join(dict.fromkeys(said.splitlines()))


def _call(command, environment=None):
    try:
        # In a session of its own, as Ctrl-C would end it too, half way.
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=rounds.ROOT,
            timeout=SLURM_LIMIT_S,
            start_new_session=True,
        )
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"no {command[0]} on PATH: this is no login node of Slurm")
    except subprocess.TimeoutExpired:
        said = f"{command[0]} gives no answer in {SLURM_LIMIT_S} s"
        return subprocess.CompletedProcess(command, 124, "", said)


def _report(plan):
    job, collate = plan.jobs
    print(f"job {job}  {len(plan.items)} {'tasks' if len(plan.items) > 1 else 'task'}; squeue --job {job}")
    print(f"job {collate}  tables, when {job} has ended, well or not")
    print(f"logs     {_shown(plan.base / 'logs')}", flush=True)


def main(argv=None) -> int:
    args = parse(argv)
    prog = "python -m benchmarks.submit"
    plan = None
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, run.interrupt)
    try:
        plan = Plan(args)
        check_partition(plan.partition, args.partition, args.collate_partition)
        plan.print_card()
        if args.dry_run:
            note = "" if shutil.which("sbatch") else ", and no sbatch on PATH"
            print(f"nothing submitted (--dry-run){note}", flush=True)
            return 0
        submit(plan)
        _report(plan)
    except script.Mistake as mistake:
        print(f"{prog}: {mistake}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Python would write into it once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{prog}: nobody reads the output, {_state(plan)}", file=sys.stderr)
        return 0 if plan.jobs or args.dry_run else 1
    except OSError as error:
        print(f"{prog}: {error.filename}: {error.strerror}, {_state(plan)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: stopped, {_state(plan)}", file=sys.stderr)
        return 130
    except Unknown as state:
        print(f"{prog}: {state}", file=sys.stderr)
        return 1
    except Refused as refusal:
        print(f"{prog}: nothing submitted: {refusal}", file=sys.stderr)
        return 1
    return 0


def _state(plan):
    return f"submitted: jobs {' and '.join(plan.jobs)}" if plan and plan.jobs else "nothing submitted"


if __name__ == "__main__":
    sys.exit(main())
