"""Round 0 by tensor: what two sidecars differ by, and what that makes of a record."""

import numpy
import pytest

from benchmarks import parity
from common import record as records

# ------------------------------------------------------------------------------------------------
# Two sidecars


def sidecar(path, **changes):
    """Three tensors over four steps; the last tensor has two elements only, padded with NaN."""
    arrays = {
        "names": numpy.array(["a", "b", "c"]),
        "hashes": numpy.arange(12, dtype=numpy.uint64).reshape(4, 3) + numpy.uint64(2**63),
        "samples": numpy.array([[1, 2, 3, 4], [1e-9, 1, -2, 0], [5, -6, numpy.nan, numpy.nan]], dtype=numpy.float32),
        "loss": numpy.array([4.0, 3.0, 2.0, 1.0]),
        "grad_norm": numpy.ones(4),
    }
    for key, change in changes.items():
        arrays[key] = arrays[key].copy()
        change(arrays[key])
    numpy.savez_compressed(path, **arrays)
    return path


def compared(tmp_path, **changes):
    return parity.compare_parity(sidecar(tmp_path / "a.npz", **changes), sidecar(tmp_path / "b.npz"))


def change(index, factor=None, add=None):
    def apply(array):
        array[index] = array[index] * factor if add is None else array[index] + array.dtype.type(add)

    return apply


def test_equal_sidecars_are_bitwise(tmp_path):
    assert compared(tmp_path) == parity.Parity(True, 0.0, 0.0, None)


def test_the_first_step_and_the_first_tensor_that_differ_are_named(tmp_path):
    def later_tensor_first(hashes):
        hashes[1:, 2] += numpy.uint64(1)
        hashes[2:, 0] += numpy.uint64(1)

    found = compared(tmp_path, hashes=later_tensor_first)
    assert not found.bitwise
    assert found.first_difference == {"step": 1, "tensor": "c"}


def test_a_loss_alone_that_differs_is_found(tmp_path):
    found = compared(tmp_path, loss=change(3, 1.01))
    assert found.first_difference == {"step": 3, "tensor": "loss"}
    assert found.max_rel_diff == found.loss_rel_diff == pytest.approx(0.01 / 1.01)
    assert compared(tmp_path, grad_norm=change(2, 0.5)).first_difference == {"step": 2, "tensor": "grad_norm"}
    both = compared(tmp_path, loss=change(0, 1.01), hashes=change((2, 1), add=1))
    assert both.first_difference == {"step": 0, "tensor": "loss"}


def test_samples_are_relative_to_their_tensors_largest(tmp_path):
    # 1e-9 becoming -1e-9 in a tensor of magnitude 2 is 1e-9, not 200 %.
    found = compared(tmp_path, hashes=change((3, 1), add=1), samples=change((1, 0), -1.0))
    assert found.max_rel_diff == pytest.approx(1e-9, rel=1e-3)
    assert found.loss_rel_diff == 0.0
    assert compared(tmp_path, samples=change((2, 1), 1.5)).max_rel_diff == pytest.approx(3 / 9)


def test_a_value_that_became_nan_is_an_infinite_difference(tmp_path):
    assert compared(tmp_path, loss=change(1, float("nan"))).max_rel_diff == float("inf")
    assert compared(tmp_path, samples=change((0, 0), float("nan"))).max_rel_diff == float("inf")


def test_sidecars_that_cannot_be_compared_say_why(tmp_path):
    whole = sidecar(tmp_path / "whole.npz")
    with pytest.raises(ValueError, match=r"no parity sidecar gone\.npz"):
        parity.compare_parity(tmp_path / "gone.npz", whole)
    (tmp_path / "half.npz").write_bytes(whole.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"half\.npz is not a whole"):
        parity.compare_parity(tmp_path / "half.npz", whole)
    with pytest.raises(ValueError, match="different tensors: a, z"):
        compared(tmp_path, names=lambda names: names.__setitem__(0, "z"))
    arrays = dict(numpy.load(whole))
    arrays["loss"] = arrays["loss"][:3]
    numpy.savez(tmp_path / "short.npz", **arrays)
    with pytest.raises(ValueError, match="shape of loss"):
        parity.compare_parity(tmp_path / "short.npz", whole)


# ------------------------------------------------------------------------------------------------
# What it means for a record


def record_of(variant, status="pass", **extra):
    record = records.blank(variant=variant, status=status, message="its message")
    record["numerics"]["reference"] = "eager"
    record["extra"].update(extra)
    return record


def judged(tmp_path, variant="graph", base_status="pass", description=None, base_extra=None, **changes):
    record = record_of(variant)
    base = record_of("eager", base_status, **(base_extra or {}))
    paths = sidecar(tmp_path / "own.npz", **changes), sidecar(tmp_path / "base.npz")
    kinds = {"eager": "eager", "graph": "graph", "compile": "compile"}
    parity.judge(record, base, *paths, {"kinds": kinds} | (description or {}))
    return record


def test_a_variant_that_promises_bits_has_them(tmp_path):
    record = judged(tmp_path)
    assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise")
    record = judged(tmp_path, hashes=change((2, 1), add=1))
    assert record["status"] == "numerics_failed" and record["numerics"]["parity"] == "differs"
    assert record["message"].startswith("not bitwise equal to eager, first at step 2 in b, by up to 0 relative")


def test_what_promises_no_bits_is_judged_by_its_losses(tmp_path):
    described = {"kinds": {"fast": "compile"}}
    changes = {"hashes": change((2, 1), add=1), "samples": change((1, 1), 3.0)}
    assert judged(tmp_path, "fast", description=described, **changes)["status"] == "pass"
    far = judged(tmp_path, "fast", description=described, loss=change(1, 1.01))
    assert far["status"] == "numerics_failed" and "allowed 0.001" in far["message"]
    wide = described | {"tolerance": {"fast": 0.02}}
    assert judged(tmp_path, "fast", description=wide, loss=change(1, 1.01))["status"] == "pass"
    # A loss that is no number is none within a tolerance.
    assert judged(tmp_path, "fast", description=wide, loss=change(1, float("nan")))["status"] == "numerics_failed"


def test_what_eager_does_not_repeat_is_not_asked_of_a_variant(tmp_path):
    noisy = {"base_status": "eager_two_runs_differ", "base_extra": {"loss_rel_diff": 0.004}}
    assert judged(tmp_path, loss=change(1, 1.007), **noisy)["status"] == "pass"
    assert judged(tmp_path, loss=change(1, 1.009), **noisy)["status"] == "numerics_failed"


def test_without_the_bases_round_there_is_no_parity(tmp_path):
    record = judged(tmp_path, base_status="failed")
    assert (record["status"], record["message"]) == ("pass", "no parity: eager's round 0 is failed")
    record = record_of("graph")
    parity.judge(record, None, tmp_path / "a.npz", tmp_path / "b.npz", {})
    assert record["message"] == "no parity: eager's round 0 is missing" and record["numerics"]["parity"] is None


def test_a_sidecar_that_is_not_there_is_a_failure(tmp_path):
    record = record_of("graph")
    parity.judge(record, record_of("eager"), tmp_path / "own.npz", sidecar(tmp_path / "base.npz"), {})
    assert (record["status"], record["message"]) == ("failed", "the run wrote no parity sidecar own.npz")


def test_eager_against_eager(tmp_path):
    first, second = sidecar(tmp_path / "a.npz"), sidecar(tmp_path / "b.npz")
    record = record_of("eager")
    parity.judge_control(record, record_of("eager"), second, first)
    assert (record["status"], record["numerics"]["parity"]) == ("pass", "bitwise")
    sidecar(tmp_path / "b.npz", loss=change(3, 1.01))
    parity.judge_control(record, record_of("eager"), second, first)
    assert record["status"] == "eager_two_runs_differ" and "from step 3 on, first in loss" in record["message"]
    assert record["extra"]["loss_rel_diff"] == pytest.approx(0.01 / 1.01)
    record = record_of("eager")
    parity.judge_control(record, record_of("eager", "timeout"), second, first)
    assert (record["status"], record["message"]) == ("timeout", "eager's second run: its message")


# ------------------------------------------------------------------------------------------------
# An eager with other kernels


OTHER_KERNELS = {
    "variants": dict.fromkeys(("eager", "eager_torch", "eager_sync", "graph", "compile"), ""),
    "kinds": {"eager": "eager", "eager_torch": "eager", "eager_sync": "eager", "graph": "graph", "compile": "compile"},
    "bitwise": ["eager", "eager_sync", "graph"],
}


@pytest.mark.parametrize(("factor", "status"), [(1 + 9e-4, "pass"), (1 + 1.2e-3, "numerics_failed")])
def test_an_eager_with_other_kernels_may_round_otherwise_and_a_graph_of_eagers_kernels_may_not(
    tmp_path, factor, status
):
    ours = sidecar(tmp_path / "ours.npz", loss=change(1, factor), hashes=change((1, 0), add=1))
    eager = sidecar(tmp_path / "eager.npz")
    base = records.blank(model="toy", preset="tiny", variant="eager", round=0, status="pass", device="cpu", message="")
    for variant, expected in (("eager_torch", status), ("graph", "numerics_failed")):
        record = base | {"variant": variant, "numerics": base["numerics"] | {"reference": "eager"}, "extra": {}}
        parity.judge(record, base, ours, eager, OTHER_KERNELS)
        assert record["status"] == expected and record["numerics"]["parity"] == "differs"


def test_what_may_be_the_base_is_run_twice():
    twice = [name for name in OTHER_KERNELS["variants"] if parity.is_run_twice(OTHER_KERNELS, name)]
    assert twice == ["eager", "eager_torch"]
    padded = OTHER_KERNELS | {"reference": {"graph": "eager_sync"}}
    assert parity.is_run_twice(padded, "eager_sync") and not parity.is_run_twice(padded, "graph")
