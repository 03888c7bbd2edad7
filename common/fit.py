"""Checks that a shape fits into memory and widths into tensor ranks. An error names the flags to change.

Given flags go back to their preset's values, one after the other, until the shape fits.
"""

import copy
import dataclasses
import math
from bisect import bisect_right

from graph_worth.config import flag_of


def require(config, presets, need, available_bytes: int | None) -> None:
    """ValueError where a run without a GPU needs more than the host has free (None: the host does not tell).

    Arguments as for `blame`; where no flag is to blame, the batch is, or the preset.
    """
    if available_bytes is None or need(config) <= available_bytes:
        return
    needed, free = f"{gib(need(config))} GiB", f"{gib(available_bytes)} GiB"
    if hasattr(config, "batch"):
        needed += f" ({need(config):,} bytes)"
        otherwise = f"--batch {config.batch} needs {needed}, {free} are free: lower --batch, or run --preset tiny"
    else:
        otherwise = (
            f"this preset needs {needed} on a GPU, there is none, and the host has {free} free: run --preset tiny"
        )
    raise ValueError(blame(config, presets, need, available_bytes) or otherwise)


def require_split(sizes: dict[str, int], tp: int, share: int = 1) -> None:
    """Check that tensor ranks can split widths, which a share without ranks divides already.

    Args:
        sizes: Flag -> width of the whole model.
        tp: Value of --tp.
        share: Value of --share-tp.

    Raises:
        ValueError: A width is not divisible by tp x share; the text names the flag to change, and its largest value
            that divides all of them.
    """
    flag, by, count, fixed = "--tp", f"--tp {tp}", tp, 1
    if share > 1:
        flag, by, count, fixed = "--share-tp", f"--share-tp {share} x --tp {tp} = {share * tp}", share, tp
    common = math.gcd(*sizes.values())
    for name, size in sizes.items():
        if size % (share * tp):
            fits = [value for value in range(1, min(count, 4096) + 1) if common % (value * fixed) == 0]
            more = f": take {flag} {fits[-1]}" if fits else ""
            raise ValueError(f"{name} {size} is not divisible by {by}{more}")


def fit_layers(config, presets, need, available_bytes: int, unit: int = 1):
    """The config with as many of its layers as fit, in multiples of `unit` (one in each chunk of each stage).

    Arguments as for `blame`. Raises ValueError where not even `unit` layers fit.
    """
    if need(config) <= available_bytes:
        return config
    counts = range(unit, config.layers, unit)
    fits = bisect_right(counts, available_bytes, key=lambda count: need(dataclasses.replace(config, layers=count)))
    if not fits:
        least = dataclasses.replace(config, layers=unit)
        what = "one layer needs" if unit == 1 else "one layer in each chunk needs"
        raise ValueError(
            blame(least, presets, need, available_bytes)
            or f"{what} {gib(need(least))} GiB, {gib(available_bytes)} GiB are free: lower --sequence or --ffn, or run "
            "--preset tiny"
        )
    return dataclasses.replace(config, layers=counts[fits - 1])


def fewer_layers(fitted, given, gib_free: float) -> str:
    """The note of a run that `fit_layers` made smaller: tables find the number of layers in it."""
    return f"{fitted.layers} of {given.layers} layers: what fits into {gib_free:.0f} GiB"


def blame(config, presets, need, available_bytes: int) -> str | None:
    """In words, the flags that make `config` need more than available_bytes; None where its preset does so alone.

    presets: name -> config. need: bytes that a config needs. The preset that was asked for is not known here; it is
    the one that differs in the fewest fields. Of several flags those are named that save most, until the rest fits.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    changes = {
        name: [field for field in fields if getattr(config, field) != getattr(preset, field)]
        for name, preset in presets.items()
    }
    preset_name, changed = min(changes.items(), key=lambda pair: len(pair[1]))
    preset, blamed, left = presets[preset_name], [], config
    while need(left) > available_bytes:
        tried = {name: _put_back(left, preset, name) for name in changed if name not in blamed}
        name = min(tried, key=lambda name: need(tried[name]), default=None)
        if name is None:
            return None
        blamed.append(name)
        left = tried[name]
    if not blamed:
        return None
    given = " and ".join(f"{flag_of(name)} {getattr(config, name)}" for name in blamed)
    back = " and ".join(f"{flag_of(name)} {getattr(preset, name)}" for name in blamed)
    verbs = ("is", "fits") if len(blamed) == 1 else ("are", "fit")
    return (
        f"{given} {verbs[0]} too large: {gib(need(config))} GiB are needed, {gib(available_bytes)} GiB are free; "
        f"{back}, as in preset {preset_name}, {verbs[1]}"
    )


def gib(num_bytes: int) -> str:
    """`12.3`, from 1,000 up without the fraction; huge sizes too."""
    size = num_bytes / 2**30
    return f"{size:,.0f}" if size >= 1000 else f"{size:.1f}"


def _put_back(config, preset, name):
    """A copy whose fields are not checked together again: of two flags that belong together one goes back first."""
    changed = copy.copy(config)
    object.__setattr__(changed, name, getattr(preset, name))
    return changed
