"""A folder of a Hugging Face model: its config.json and its tensors by name, in one file or several.

Nothing of a tensor is read here. Every mistake is a ValueError in one line that begins with --checkpoint.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from common.text import printable
from common.training.data import safetensors_file
from common.training.data.limits import MAX_HEADER_BYTES, open_regular

FLAG = "--checkpoint"
_READABLE = ("BF16", "F16", "F32")


def read_json(path) -> dict:
    """Read a JSON object; ValueError where the file is missing, too large or damaged."""
    with open_regular(path, FLAG, MAX_HEADER_BYTES) as file:
        text = file.read(MAX_HEADER_BYTES)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{FLAG}: {printable(path)} is damaged, it is not JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"{FLAG}: {printable(path)} is damaged, it is not a JSON object")
    return content


def require_sizes(folder: Path, config, sizes: Callable[[], dict]) -> list[str]:
    """Check sizes of config.json, by the names of our fields, against a config; return a note on layers left out.

    ValueError in one line that names the flags that would fit, or what is no number. A model of more layers is taken.
    """
    try:
        found = sizes()
        layers = found.pop("layers")
        differing = {name: value for name, value in found.items() if not math.isclose(value, getattr(config, name))}
        if layers < config.layers:
            differing["layers"] = layers
    except KeyError as error:
        raise ValueError(f"{FLAG} {folder}: config.json has no {error.args[0]}") from None
    except (TypeError, ZeroDivisionError, OverflowError):
        raise ValueError(f"{FLAG} {folder}: config.json has sizes that are no numbers from 1 up") from None
    if differing:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in differing.items())
        ours = ", ".join(f"{name} {getattr(config, name)}" for name in differing)
        raise ValueError(f"{FLAG} {folder}: does not fit {ours}: take {flags}")
    return [f"{FLAG}: the first {config.layers} of {layers} layers"] if layers > config.layers else []


def all_entries(folder: Path) -> dict[str, safetensors_file.File]:
    """Name -> the opened file that holds the tensor, from the index or the single file.

    ValueError where files are missing or damaged, or the index names what they do not hold.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ValueError(f"{FLAG} {folder}: neither model.safetensors.index.json nor model.safetensors")
        file = safetensors_file.open_file(single, FLAG)
        return dict.fromkeys(file.entries, file)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{FLAG}: {index} is damaged, its weight_map does not name files")
    for name in weight_map.values():
        if Path(name).name != name:
            raise ValueError(f"{FLAG}: {index} names {printable(name[:100])}, which is no file of its folder")
    files = {name: safetensors_file.open_file(folder / name, FLAG) for name in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in files[file].entries:
            raise ValueError(f"{FLAG}: {index} looks for {name} in {file}, which does not hold it")
    return {name: files[file] for name, file in weight_map.items()}


def require_tensors(folder: Path, entries: dict[str, safetensors_file.File], shapes: dict) -> None:
    """Check that the files (of `all_entries`) hold tensors of these shapes, by name, in 16 or 32 bits.

    ValueError where a tensor is missing, or has another shape or a dtype that is not read.
    """
    missing = [name for name in shapes if name not in entries]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise ValueError(f"{FLAG} {folder}: holds no tensor {missing[0]}{more}")
    for name, shape in shapes.items():
        entry = entries[name].entries[name]
        if entry.shape != shape:
            raise ValueError(f"{FLAG} {folder}: {name} has the shape {entry.shape}, the flags say {shape}")
        if entry.dtype not in _READABLE:
            raise ValueError(f"{FLAG} {folder}: {name} has dtype {entry.dtype}, not {', '.join(_READABLE)}")
