"""The models, and the answers of their training scripts to --describe, which the harness reads before a run."""

import functools
import json
import subprocess
import sys

from graph_worth.folders import OWN_STEP, ROOT, START, models_below, script_of
from graph_worth.harness.command import Mistake

DESCRIBE_LIMIT_S = 120
RESERVED_FLAGS = {"--preset", "--variant", "--steps", "--record", "--parity", "--describe"}
RESERVED_FLAGS |= {"--profile", "--worker"}
# Eager once more, beside eager: it shows how far two equal programs differ on this host.
CONTROL = "control"


def models() -> list[str]:
    """Return the names of top-level folders with a train.py."""
    return [path.name for path in models_below(ROOT) if path.parent == ROOT]


def find_model(text: str) -> str:
    """Return a model as Python names it: examples/minimal is examples.minimal."""
    name = text.strip().rstrip("/").replace("/", ".")
    if name == OWN_STEP:
        return name
    if all(part.isidentifier() for part in name.split(".")) and ROOT.joinpath(*name.split("."), "train.py").exists():
        return name
    known = sorted(models_below(ROOT), key=lambda path: (path.parent != ROOT, path))
    if not known:
        raise Mistake(f"unknown model {text!r}: no folder of {ROOT} has a train.py")
    names = ", ".join(path.relative_to(ROOT).as_posix() for path in known)
    raise Mistake(f"unknown model {text!r}, --model takes one of {names}")


def describe(model: str, flags: list[str], preset: str | None = None) -> dict:
    """Return the script's description of itself. The script checks its flags, which may depend on the preset."""
    reserved = [flag for flag in flags if flag.split("=")[0] in RESERVED_FLAGS]
    if reserved:
        raise Mistake(f"{reserved[0]} after -- is set by this command, leave it out")
    answer = _told(model, preset, *flags)
    try:
        description = json.loads(answer)
        if isinstance(description, dict):
            return description
        raise ValueError
    except ValueError:
        raise Mistake((answer.strip() or "nothing").splitlines()[-1].removeprefix("python -m ")) from None


def words_of(model: str) -> list[str]:
    """Return the words after the interpreter that start a model's script, as -m gpt3.train."""
    # A step's project may have packages of our names, and its interpreter another graph_worth, or none.
    return [str(START) if model == OWN_STEP else "-m", script_of(model)]


@functools.cache
def _told(model: str, preset: str | None, *flags: str) -> str:
    """The answer to --describe: one process tells a model's table."""
    command = [sys.executable, *words_of(model), "--describe", *(["--preset", preset] if preset else []), *flags]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DESCRIBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Mistake(f"{' '.join(command[1:])} gives no answer in {DESCRIBE_LIMIT_S} s") from None
    return answer.stdout if answer.returncode == 0 else answer.stderr or answer.stdout


def needs_gpu(description: dict, preset: str) -> bool:
    """Return whether a preset needs GPUs, as its script declares."""
    return bool(description.get("presets_need", {}).get(preset, {}).get("gpus"))


def submitted(description: dict, preset: str) -> tuple[int, int] | None:
    """Return the nodes of the MLPerf submission that has this preset and the GPUs of each; None for other presets."""
    submission = description.get("presets_need", {}).get(preset, {}).get("submitted")
    return (submission["nodes"], submission["gpus_per_node"]) if submission else None


def require_world_size(description: dict, preset: str, world_size: int, rank_flags: str) -> None:
    """Require that a preset, with its flags, runs on the ranks that `rank_flags` chose."""
    takes = description.get("presets_need", {}).get(preset, {}).get("world_size", {})
    multiple_of, at_most = takes.get("multiple_of", 1), takes.get("at_most")
    if world_size % multiple_of == 0 and (at_most is None or world_size <= at_most):
        return
    words = f"a multiple of {multiple_of} ranks" if multiple_of > 1 else f"{at_most} rank" + "s" * (at_most > 1)
    asks = f"{description['model']}/{preset} runs on {words}, {rank_flags} make {world_size}"
    raise Mistake(f"{asks}: change one of them, or the script's flags for ranks, after --")


def eagers_of(description: dict) -> list[str]:
    """Return the eager variants that may be the base: all but those that do extra work in each step."""
    kinds, traits = description["kinds"], description["traits"]
    return [name for name in kinds if kinds[name] == "eager" and "extra_work" not in traits.get(name, {})]


def first_graph(description: dict) -> str:
    """Return the first variant of kind graph among the headline variants, else among all."""
    for name in (*description["headline"], *description["variants"]):
        if description["kinds"][name] == "graph":
            return name
    raise Mistake(f"{description.get('model')} has no variant of kind graph: name one, --variant")
