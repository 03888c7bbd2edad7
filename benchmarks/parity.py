"""Round 0 compared tensor by tensor: two parity sidecars, and what a difference means for a record's status."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy

from benchmarks import script

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Parity:
    """Two runs compared: bitwise, the largest relative difference (of anything, of the losses), and where the first is.

    After an optimizer's first steps a weight of almost no gradient may differ by all of its value; whether
    two runs train alike is therefore judged by their losses.
    """

    bitwise: bool
    max_rel_diff: float
    loss_rel_diff: float
    first_difference: dict | None

    @property
    def name(self) -> str:
        return "bitwise" if self.bitwise else "differs"


def compare_parity(path: Path, base_path: Path) -> Parity:
    """Compare two parity sidecars (.npz with names [T], hashes [steps, T], samples [T, K], loss and grad_norm [steps]).

    The relative difference of losses and gradient norms is |a-b| / max(|a|, |b|); that of samples is
    relative to the tensor's largest sampled magnitude, so that noise around zero does not count as
    100 %. Raises ValueError when a sidecar is missing, damaged, or of other steps or tensors.
    """
    ours, base = _load_sidecar(path), _load_sidecar(base_path)
    names = [str(name) for name in base["names"]]
    if names != [str(name) for name in ours["names"]]:
        odd = sorted(set(names) ^ {str(name) for name in ours["names"]}) or ["their order"]
        raise ValueError(f"parity sidecars name different tensors: {', '.join(odd[:3])}")
    for key in ("hashes", "samples", "loss", "grad_norm"):
        if ours[key].shape != base[key].shape:
            raise ValueError(f"parity sidecars differ in the shape of {key}: {ours[key].shape} and {base[key].shape}")
    differing = ours["hashes"] != base["hashes"]
    unequal = {key: _unequal(ours[key], base[key]) for key in ("loss", "grad_norm")}
    steps = numpy.flatnonzero(differing.any(axis=1) | unequal["loss"] | unequal["grad_norm"])
    scale = numpy.fmax(_largest(ours["samples"]), _largest(base["samples"]))
    series = {key: _relative(ours[key], base[key], numpy.fmax(abs(ours[key]), abs(base[key]))) for key in unequal}
    largest = max(_relative(ours["samples"], base["samples"], scale[:, None]), *series.values())
    if not steps.size:
        return Parity(True, largest, series["loss"], None)
    step = int(steps[0])
    tensor = names[int(numpy.argmax(differing[step]))] if differing[step].any() else None
    if tensor is None:
        tensor = "loss" if unequal["loss"][step] else "grad_norm"
    return Parity(False, largest, series["loss"], {"step": step, "tensor": tensor})


def _load_sidecar(path):
    try:
        with numpy.load(path) as file:
            return {key: file[key] for key in ("names", "hashes", "samples", "loss", "grad_norm")}
    except FileNotFoundError:
        raise ValueError(f"the run wrote no parity sidecar {path.name}") from None
    except (KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} is not a whole parity sidecar ({error})") from None


def _unequal(a, b):
    return ~((a == b) | (numpy.isnan(a) & numpy.isnan(b)))


def _largest(samples):
    return numpy.nan_to_num(abs(samples.astype(numpy.float64)), nan=0.0, posinf=numpy.inf).max(axis=1, initial=0.0)


def _relative(a, b, scale):
    """Largest |a-b| / scale; equal values (NaN too, which pads) count as 0 and a value that is not finite as inf."""
    unequal = _unequal(a, b)
    if not unequal.any():
        return 0.0
    with numpy.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = abs(a.astype(numpy.float64) - b.astype(numpy.float64)) / scale
    ratio = numpy.where(numpy.isfinite(ratio), ratio, numpy.inf)
    return float(ratio[unequal].max())


# ------------------------------------------------------------------------------------------------
# What it means for a record


def judge_control(record: dict, control: dict, path: Path, base_path: Path) -> None:
    """Eager against eager: a second run's verdict goes into the first one's record."""
    base = record["variant"]
    if control["status"] != "pass":
        record.update(status=control["status"], message=f"{base}'s second run: {control['message']}")
        return
    parity = _fill(record, path, base_path)
    if parity and not parity.bitwise:
        where = parity.first_difference
        record.update(
            status="eager_two_runs_differ",
            message=f"two {base} runs differ from step {where['step']} on, first in {where['tensor']},"
            f" by up to {parity.max_rel_diff:.2g} relative",
        )


def judge(record: dict, base: dict | None, path: Path, base_path: Path, description: dict) -> None:
    """A variant's round 0 against its base's: bitwise where it is promised, within its tolerance elsewhere.

    base: the base's record of round 0. description: what the script says of itself (bitwise, tolerance).
    """
    variant, name = record["variant"], record["numerics"]["reference"]
    if base is None or base["status"] not in ("pass", "eager_two_runs_differ"):
        record["message"] = f"no parity: {name}'s round 0 is {base['status'] if base else 'missing'}"
        return
    parity = _fill(record, path, base_path)
    if parity is None or parity.bitwise:
        return
    # What eager itself does not repeat cannot be asked of a variant.
    eager_differs = base["status"] == "eager_two_runs_differ"
    tolerance = description.get("tolerance", {}).get(variant, TOLERANCE)
    if eager_differs:
        tolerance = max(tolerance, 2 * (base["extra"].get("loss_rel_diff") or 0.0))
    where = f"first at step {parity.first_difference['step']} in {parity.first_difference['tensor']}"
    if promises_bitwise(description, variant) and not eager_differs:
        record.update(
            status="numerics_failed",
            message=f"not bitwise equal to {name}, {where}, by up to {parity.max_rel_diff:.2g} relative",
        )
    elif not parity.loss_rel_diff <= tolerance:
        record.update(
            status="numerics_failed",
            message=f"losses differ from {name} by {parity.loss_rel_diff:.2g} relative, allowed {tolerance:.2g}, "
            f"{where}",
        )


def promises_bitwise(description: dict, variant: str) -> bool:
    if "bitwise" in description:
        return variant in description["bitwise"]
    return script.kind_of(description, variant) != "compile"


def is_run_twice(description: dict, variant: str) -> bool:
    """Whether a variant's round 0 is run a second time: what others are compared with, and each eager whose bits are
    not those of its reference. That one may be the base, so it has to repeat itself, as eager does."""
    references = description.get("reference", {})
    if variant == "eager" or variant in references.values():
        return True
    return script.kind_of(description, variant) == "eager" and not promises_bitwise(description, variant)


def _fill(record, path, base_path):
    """Numerics from the two sidecars; one that is not there or damaged is a failure."""
    try:
        parity = compare_parity(path, base_path)
    except ValueError as error:
        record.update(status="failed", message=str(error))
        return None
    record["numerics"].update(
        parity=parity.name, max_rel_diff=parity.max_rel_diff, first_difference=parity.first_difference
    )
    record["extra"]["loss_rel_diff"] = parity.loss_rel_diff
    return parity
