"""What the harness knows of a training script before it runs: the models there are, and what --describe answers.

Also the small parts that every command line here shares: a parser with mistakes in one line, and kinds of number.
"""

import argparse
import json
import subprocess
import sys

from benchmarks import frame, rounds
from common.config import Parser as Parser

DESCRIBE_LIMIT_S = 120
RESERVED_FLAGS = ("--preset", "--variant", "--round", "--attempt", "--steps", "--parity-steps", "--record", "--parity")
RESERVED_FLAGS += ("--describe", "--mllog", "--profile")
# Eager once more, beside eager: what two equal programs differ by on this host.
CONTROL = "control"


class Mistake(ValueError):
    """Something on the command line that cannot be; the message names what can."""


def count(text):
    return _number(text, int, 0, "a number from 0 up")


def positive(text):
    return _number(text, int, 1, "a number from 1 up")


def amount(text):
    return _number(text, float, 0, "a number above 0", above=True)


def _number(text, kind, least, allowed, above=False):
    try:
        value = kind(text)
    except ValueError:
        value = None
    # Written so that NaN, which compares as false, is refused too.
    if value is None or not least <= value < float("inf") or (above and value == least):
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
    return value


def models() -> list[str]:
    """Top-level folders with a train.py."""
    return sorted(path.parent.name for path in rounds.ROOT.glob("[!.]*/train.py"))


def describe(model: str, flags: list[str], preset: str | None = None) -> dict:
    """What the script says of itself; it checks `flags` on the way. Raises Mistake with the script's own line.

    preset: the one that flags are added to: what one preset allows another may refuse.
    """
    folder = rounds.ROOT.joinpath(*model.split("."))
    if not (all(part.isidentifier() for part in model.split(".")) and (folder / "train.py").exists()):
        raise Mistake(f"unknown model {model!r}, --model takes one of {', '.join(models())}")
    reserved = [flag for flag in flags if flag.split("=")[0] in RESERVED_FLAGS]
    if reserved:
        raise Mistake(f"{reserved[0]} after -- is set by this command, leave it out")
    command = [sys.executable, "-m", f"{model}.train", "--describe", *(["--preset", preset] if preset else []), *flags]
    try:
        answer = subprocess.run(
            command, cwd=rounds.ROOT, capture_output=True, text=True, check=False, timeout=DESCRIBE_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise Mistake(f"{' '.join(command[1:])} gives no answer in {DESCRIBE_LIMIT_S} s") from None
    try:
        return json.loads(answer.stdout)
    except json.JSONDecodeError:
        said = (answer.stderr.strip() or answer.stdout.strip() or "nothing").splitlines()[-1]
        raise Mistake(f"{' '.join(command[1:])} answers: {said}") from None


def needs_gpu(description: dict, preset: str) -> bool:
    """Whether a preset runs on GPUs alone, as its script declares."""
    return bool(description.get("presets_need", {}).get(preset, {}).get("gpus"))


def choose_preset(asked: str | None, description: dict, gpus: rounds.Gpus) -> str:
    """The preset to run. Raises Mistake for an unknown one, or one that needs a GPU where there is none."""
    presets = description["presets"]
    name = asked or ("bench" if gpus.names and "bench" in presets else "tiny")
    if name not in presets:
        raise Mistake(f"unknown preset {name!r}, --preset takes one of {', '.join(presets)}")
    if needs_gpu(description, name) and not gpus.names:
        raise Mistake(
            f"preset {name} needs an NVIDIA GPU and nvidia-smi -L lists none; PRESET=tiny (--preset tiny) runs here"
        )
    return name


def kind_of(description: dict, variant: str) -> str:
    """eager, graph or compile as the script declares it; control of the harness's own control."""
    return CONTROL if variant == CONTROL else description.get("kinds", {}).get(variant) or frame.family(variant)


def traits_of(description: dict, variant: str) -> dict:
    """What sets a variant apart, by the names of `common.config.TRAITS`; the control is eager."""
    return description.get("traits", {}).get("eager" if variant == CONTROL else variant, {})


def eagers_of(description: dict) -> list[str]:
    """The eager variants that the best base needs: all but those that do extra work in each step."""
    names = [name for name in description.get("variants", {}) if kind_of(description, name) == "eager"]
    return [name for name in names if "extra_work" not in traits_of(description, name)]


def said(description: dict, variant: str) -> dict:
    """What a record keeps of --describe, in its extra part: kind and traits of its variant, and the eagers needed."""
    traits = traits_of(description, variant)
    return {"kind": kind_of(description, variant), "traits": traits, "eagers": eagers_of(description)}


def choose_variants(asked: str | None, known, references=None) -> list[str]:
    """Variants in order, eager first, each after its reference. Raises Mistake for an unknown one.

    references: variant -> the one that its numbers are compared with, where that is not eager.
    """
    names = [name.strip() for name in asked.split(",") if name.strip()] if asked is not None else list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise Mistake(f"unknown variant {', '.join(unknown)!r}, --variants takes some of {', '.join(known)}")
    first = [(references or {}).get(name, name) for name in names if name in (references or {})]
    return list(dict.fromkeys(["eager", *first, *names]))
