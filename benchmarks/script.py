"""What the harness knows of a training script before it runs: the models there are, and what --describe answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.command import Mistake, words_of
from benchmarks.gpus import Gpus

DESCRIBE_LIMIT_S = 120
RESERVED_FLAGS = ("--preset", "--variant", "--round", "--attempt", "--steps", "--parity-steps", "--record", "--parity")
RESERVED_FLAGS += ("--describe", "--mllog", "--profile")
# Eager once more, beside eager: what two equal programs differ by on this host.
CONTROL = "control"


def models() -> list[str]:
    """Top-level folders with a train.py."""
    return sorted(path.parent.name for path in ROOT.glob("[!.]*/train.py"))


def describe(model: str, flags: list[str], preset: str | None = None) -> dict:
    """What the script says of itself; it checks `flags` on the way. Raises Mistake with the script's own line.

    preset: the one that flags are added to: what one preset allows another may refuse.
    """
    folder = ROOT.joinpath(*model.split("."))
    if not (all(part.isidentifier() for part in model.split(".")) and (folder / "train.py").exists()):
        raise Mistake(f"unknown model {model!r}, --model takes one of {', '.join(models())}")
    reserved = [flag for flag in flags if flag.split("=")[0] in RESERVED_FLAGS]
    if reserved:
        raise Mistake(f"{reserved[0]} after -- is set by this command, leave it out")
    command = [sys.executable, "-m", f"{model}.train", "--describe", *(["--preset", preset] if preset else []), *flags]
    try:
        answer = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=DESCRIBE_LIMIT_S
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


def submitted(description: dict, preset: str) -> tuple[int, int] | None:
    """(nodes, GPUs of each) of the MLPerf submission whose preset it is, None for others."""
    found = description.get("presets_need", {}).get(preset, {}).get("submitted")
    return (found["nodes"], found["gpus_per_node"]) if found else None


def require_world_size(description: dict, preset: str, world_size: int, asked: str) -> None:
    """Raises Mistake where a preset, with its flags, does not run on so many ranks, which the flags `asked` chose."""
    takes = description.get("presets_need", {}).get(preset, {}).get("world_size", {})
    multiple_of, at_most = takes.get("multiple_of", 1), takes.get("at_most")
    if world_size % multiple_of == 0 and (at_most is None or world_size <= at_most):
        return
    words = f"a multiple of {multiple_of} ranks" if multiple_of > 1 else f"{at_most} rank" + "s" * (at_most > 1)
    raise Mistake(f"{description['model']}/{preset} runs on {words}, {asked} make {world_size}: change one of them")


def choose_preset(asked: str | None, description: dict, gpus: Gpus) -> str:
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
    """eager, graph or compile as the script declares it; control of the harness's own control.

    Raises Mistake where the script declares none.
    """
    kinds = description.get("kinds", {}) | {CONTROL: CONTROL}
    if variant not in kinds:
        raise Mistake(f"{description.get('model')} does not declare what kind variant {variant!r} is: ABOUT's kinds")
    return kinds[variant]


def traits_of(description: dict, variant: str) -> dict:
    """What sets a variant apart, by the names of `common.config.TRAITS`; the control is eager."""
    return description.get("traits", {}).get("eager" if variant == CONTROL else variant, {})


def eagers_of(description: dict) -> list[str]:
    """The eager variants that the best base needs: all but those that do extra work in each step."""
    kinds = description.get("kinds", {})
    names = [name for name in description.get("variants", {}) if kinds.get(name) == "eager"]
    return [name for name in names if "extra_work" not in traits_of(description, name)]


def said(description: dict, variant: str) -> dict:
    """What a record keeps of --describe, in its extra part: kind and traits of its variant, and the eagers needed."""
    traits = traits_of(description, variant)
    return {"kind": kind_of(description, variant), "traits": traits, "eagers": eagers_of(description)}


def choose_variants(asked: str | None, known, references=None) -> list[str]:
    """Variants in order, eager first, each after its reference. Raises Mistake for an unknown one.

    references: variant -> the one that its numbers are compared with, where that is not eager.
    """
    names = words_of(asked) if asked is not None else list(known)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise Mistake(f"unknown variant {', '.join(unknown)!r}, --variants takes some of {', '.join(known)}")
    first = [references[name] for name in names if name in references] if references else []
    return list(dict.fromkeys(["eager", *first, *names]))


def from_root(flags: list[str], described: list[dict]) -> list[str]:
    """`flags` with relative paths made absolute: a script runs in the repository's root, which is not always here."""
    if Path.cwd() == ROOT:
        return flags
    paths = {flag["flag"]: flag.get("words", ()) for flag in described if flag["type"] == "path"}
    out = []
    for previous, text in zip(["", *flags], flags, strict=False):
        name, equals, value = text.partition("=")
        if previous in paths and text and text not in paths[previous]:
            text = os.path.abspath(text)
        elif name in paths and value and value not in paths[name]:
            text = name + equals + os.path.abspath(value)
        out.append(text)
    return out
