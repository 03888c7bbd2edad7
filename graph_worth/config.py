"""Configuration and command line of a training script, both made from one frozen dataclass.

A script has a `Config`, each field of which is an `option`, and PRESETS, named instances of it. `contract.parse` finds
the variants in its source and calls `parse` here before torch is imported: `--help`, `--describe` and every mistake on
the command line are answered in a fraction of a second, on machines without torch too.

    args = parse("gpt3", Config, PRESETS, variants)
    args.config      the preset with the fields given on the command line replaced
    args.run         what concerns this run only: variant, steps, parity, record, profile
    args.variants    the variants, by name
"""

import argparse
import atexit
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import signal
import sys
import tempfile
import typing
from dataclasses import dataclass
from pathlib import Path

from graph_worth import garbage
from graph_worth.folders import SUPERVISOR, script_of
from graph_worth.text import printable

# Each step keeps an event on the GPU and its time.
MAX_STEPS = 1_000_000
# They are made before the first step.
MAX_BATCHES = 10_000
# What is computed from sizes stays within the range of a float.
MAX_INTEGER = 2**53

PR_SET_PDEATHSIG = 1

# Of training by hand.
EXIT_STATUS = {"pass": 0, "unsupported": 3, "oom": 4}

# ------------------------------------------------------------------------------------------------
# What concerns one run and not the model


def option(default, help, choices=None, metavar=None):
    """A field of a Config: its default, what a user does with it, and the allowed values if they are few.

    metavar: what --help calls the value, the type's name unless told.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that every training script has. They never change what a step computes."""

    preset: str
    variant: str
    steps: int = option(0, "train this many steps (0: --min-steps)", metavar="N")
    parity: bool = option(
        False, "deterministic kernels, every step hashed (20 unless --steps says otherwise), nothing timed"
    )
    record: str = option("", "write what came of it as JSON", metavar="PATH")
    profile: str = option("", "time nothing, trace a few steps for a viewer (.json)", metavar="PATH")
    worker: str = option("", "used by make bench: do what the process that listens here says", metavar="SOCKET")

    def __post_init__(self):
        require_fields(self, ("steps",), lambda steps: steps >= 0, "a number from 0 up")
        require_steps("--steps", self.steps)
        if self.profile and not self.profile.endswith(".json"):
            raise ValueError(f"--profile {self.profile}: takes a path that ends in .json")
        if self.profile and self.parity:
            raise ValueError("--parity and --profile are runs of their own: take one of them")
        for flag, path in (("--record", self.record), ("--profile", self.profile)):
            if path:
                require_writable(flag, Path(path))


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The parsed command line: `config` is the model's dataclass, `variants` are those that `contract.scan` found."""

    config: typing.Any
    run: RunOptions
    model: str
    variants: dict


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The field that every model's Config has: the number of steps of a run."""

    min_steps: int = option(50, "steps of a run, unless --steps says otherwise")


# ------------------------------------------------------------------------------------------------
# Command line


def parse(model, config_class, presets, variants, argv=None, facts=None) -> Arguments:
    """Parse `argv` (default: the process's own).

    presets: name -> config_class instance. variants: of `contract.scan`. facts: see describe.py. On `--describe` and
    `--help` it prints and exits with 0. Any mistake is one line on stderr that names what is allowed, and exit status
    2.
    """
    raw = argparse.RawDescriptionHelpFormatter
    command = f"python -m {script_of(model)}"
    width = max(map(len, variants))
    lines = ["variants:", *(f"  {name:{width}}  {variant.help}" for name, variant in variants.items())]
    statuses = ", ".join(f"{status} {name}" for name, status in EXIT_STATUS.items())
    lines += ["", f"exit status: {statuses}, 1 failed, 2 mistake on the command line"]
    parser = Parser(prog=command, allow_abbrev=False, formatter_class=raw, epilog="\n".join(lines))
    parser.add_argument("--describe", action="store_true", help="print presets, variants and flags as JSON, then exit")
    for name, table in (("preset", presets), ("variant", variants)):
        first = next(iter(table))
        parser.add_argument(f"--{name}", metavar="NAME", default=first, help=f"one of {', '.join(table)} [{first}]")
    _add_flags(parser, RunOptions)
    values, overrides = parse_with_fields(parser, config_class, argv, presets)
    asked_to_describe = values.pop("describe")
    try:
        run = RunOptions(**values)
        require_known("preset", run.preset, presets)
        require_known("variant", run.variant, variants)
        config = dataclasses.replace(presets[run.preset], **overrides)
        require_steps("--min-steps", config.min_steps)
        require_fields(config, ("min_steps",), lambda steps: steps >= 1, "a number from 1 up")
        rotating = ["batches"] if hasattr(config, "batches") else []
        require_fields(config, rotating, lambda batches: batches <= MAX_BATCHES, f"at most {MAX_BATCHES:,}")
    except ValueError as error:
        parser.error(str(error))
    if asked_to_describe:
        from graph_worth.describe import describe

        print(json.dumps(describe(model, presets, variants, facts or {}, {run.preset: config})))
        sys.exit(0)
    if argv is None:
        # The script's imports come next.
        garbage.hold()
    return Arguments(config=config, run=run, model=model, variants=variants)


def parse_with_fields(parser, config_class, argv=None, presets=None) -> tuple[dict, dict]:
    """(values of the parser's own flags, fields of config_class that were given) of a command line.

    parser: a `Parser`, which gets a flag for each field. presets: --help tells the values of the one on the command
    line; without presets it tells the defaults of the fields.
    """
    shown, title = config_class, "model"
    if presets:
        early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        early.add_argument("--preset", nargs="?")
        name = early.parse_known_args(argv)[0].preset
        name = name if name in presets else next(iter(presets))
        shown, title = presets[name], f"model, with the values of preset {name}"
    _add_flags(parser.add_argument_group(title), config_class, "config_", shown)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        known = ", ".join(flag_of(name.removeprefix("config_")) for name in vars(values))
        parser.error(f"unknown argument {unknown[0]!r}, known: {known}")
    values = vars(values)
    overrides = {key[7:]: values.pop(key) for key in list(values) if key.startswith("config_")}
    return values, {name: value for name, value in overrides.items() if value is not None}


def _add_flags(parser, owner, prefix="", shown=None):
    """A flag for each field of a dataclass that is an `option`; with a prefix of their names, without a default.

    shown: has the values that --help tells.
    """
    for field in [field for field in dataclasses.fields(owner) if field.metadata]:
        kind = typing.get_type_hints(owner)[field.name]
        if kind is bool and not prefix:
            parser.add_argument(flag_of(field.name), action="store_true", help=field.metadata["help"])
            continue
        choices = field.metadata["choices"]
        among = f" ({', '.join(map(str, choices))})" if choices else ""
        value = getattr(shown or owner, field.name)
        among += f" [{str(value).lower() if kind is bool else value}]" if value not in ("", None) else ""
        parser.add_argument(
            flag_of(field.name),
            dest=prefix + field.name,
            type=_converter(kind, choices) if prefix else kind,
            default=None if prefix else field.default,
            metavar=field.metadata["metavar"] or kind.__name__.upper(),
            help=(field.metadata["help"] + among).replace("%", "%%"),
        )


@contextlib.contextmanager
def mistakes_in_one_line(prog: str):
    """A ValueError that leaves this block becomes one line on stderr and exit status 2, as a mistake in a flag does.

    Ctrl-C becomes one line and 130. prog: the command that the user has typed, which begins the line.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{prog}: stopped", file=sys.stderr)
        sys.exit(130)
    except ValueError as error:
        # In one write: ranks share what they print to.
        sys.stderr.write(f"{prog}: {printable(error)}\n")
        sys.exit(2)
    finally:
        end_at_once()


def end_at_once() -> None:
    """Let Ctrl-C end the process without a traceback while Python itself ends."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)


def end_with_supervisor() -> None:
    """Let the kernel end this process with its parent, which may be torchrun; end it where the supervisor is gone.

    A supervisor that is killed ends torchrun with it, and nothing else ends torchrun's ranks.
    """
    pid = os.environ.get(SUPERVISOR)
    if pid is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        state = "X"
    if state in "XZ":
        os._exit(1)


def needs(gpus: bool, multiple_of=1, at_most=None, submitted=None) -> dict:
    """Return a preset's requirements on machines, for "presets_need" in `graph_worth.describe`.

    gpus: whether it runs on GPUs alone. multiple_of, at_most (None: any): the numbers of ranks that it takes.
    submitted: (nodes, GPUs of each node) of the MLPerf submission whose preset it is, None for others.
    """
    return {
        "gpus": int(gpus),
        "world_size": {"multiple_of": multiple_of, "at_most": at_most},
        "submitted": dict(zip(("nodes", "gpus_per_node"), submitted, strict=True)) if submitted else None,
    }


def flag_of(name):
    """The flag of a Config's field."""
    return "--" + name.replace("_", "-")


def require_fields(config, names, allowed, takes):
    """ValueError that names the flag where a field's value is not allowed(value); takes: what is, in words.

    allowed: written as what must hold, so that NaN, which compares as false, is refused: `0 <= value < 1`.
    """
    for name in names:
        value = getattr(config, name)
        if not allowed(value):
            raise ValueError(f"{flag_of(name)} {value}: takes {takes}")


def require_folder_of_its_own(flag, path):
    """ValueError where a folder of data is the root of the file system: nobody means to read all of it."""
    if path and os.path.normpath(path).strip("/") == "":
        raise ValueError(f"{flag} {path}: this is the whole file system, take the folder that the data is in")


def require_writable(flag, path):
    """Asked now, since what goes there is written after minutes of work."""
    # Path.exists raises OSError where a name is too long.
    if os.path.exists(path) and not path.is_file():
        what = "this is a folder" if path.is_dir() else "this is none"
        raise ValueError(f"{flag} {path}: takes the path of a file, {what}")
    folder = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    try:
        # Tried, not asked: root may write everywhere, says the system, and in /proc nobody can.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot write in {folder} ({error.strerror})") from None


def require_steps(flag, value):
    """ValueError where a number of steps is beyond what a run can hold."""
    if value > MAX_STEPS:
        raise ValueError(f"{flag} {value}: takes at most {MAX_STEPS:,} steps")


def require_known(what, name, table):
    """ValueError where `name` is not in the table of what --`what` takes; it gives the new name for an old one."""
    if name in table:
        return
    for new, entry in table.items():
        if name and getattr(entry, "formerly", "") == name:
            raise ValueError(f"variant {name!r} is now {new!r}")
    raise ValueError(f"unknown {what} {name!r}, --{what} takes one of {', '.join(table)}")


def checked(kind, allowed, takes):
    """A type for argparse: kind(text) where that is allowed(value), else a mistake; takes: what is, in words."""

    def convert(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {takes}")
        return value

    return convert


def _converter(kind, choices):
    """A function from the flag's text to `kind`; argparse prints its name when it raises ValueError."""

    def convert(text):
        if kind is bool:
            if text.lower() not in ("true", "false", "1", "0"):
                raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
            return text.lower() in ("true", "1")
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is not of type {kind.__name__}") from None
        if kind is int and abs(value) > MAX_INTEGER:
            raise argparse.ArgumentTypeError(f"{_shortened(text)!r} is beyond {MAX_INTEGER:,}")
        if choices and value not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(map(str, choices))}")
        return value

    return convert


def _shortened(text):
    return text if len(text) <= 40 else f"{text[:37]}..."


class Parser(argparse.ArgumentParser):
    """With mistakes in one line on stderr, exit status 2; `--flag=--` is one."""

    def parse_known_args(self, args=None, namespace=None):
        """As argparse's, which takes the -- out of --flag=-- and gives an empty list to who asked for a value."""
        args = sys.argv[1:] if args is None else list(args)
        for text in args[: args.index("--")] if "--" in args else args:
            name, equals, value = text.partition("=")
            if equals and name.startswith("-") and value == "--":
                self.error(f"argument {name}: expected a value, '--' is none (./-- is a path of that name)")
        return super().parse_known_args(args, namespace)

    def error(self, message):
        """Print the mistake as one line on stderr and exit with status 2."""
        self.exit(2, f"{self.prog}: {printable(message)}\n")
