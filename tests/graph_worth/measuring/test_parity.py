"""graph_worth/measuring/parity: how near two courses are, and where they part first."""

import math
from types import SimpleNamespace

import pytest
import torch

from graph_worth.measuring import parity

NAN, INF = math.nan, math.inf


def course(losses=(1.0, 0.5), hashes=("a", "b"), copies=None, names=("weight", "bias")):
    values = {step: [torch.tensor(each) for each in state] for step, state in (copies or {}).items()}
    return SimpleNamespace(losses=list(losses), hashes=list(hashes), copies=values, names=list(names))


@pytest.mark.parametrize(
    ("own", "said", "step"),
    [
        (course(), "bitwise", 0),
        (course([1.0, 0.505]), "bitwise", 0),
        (course([1.0, 0.505], ["a", "c"]), "1.0e-02", 1),
        (course(hashes=["c", "b"]), "equal losses", 0),
        (course(hashes=["a"]), "equal losses", 0),
        (course([1.0], ["a"]), "no losses", 0),
        (course([1.0, None], ["a", "c"]), "no losses", 1),
        (course([1.0, NAN], ["a", "c"]), "inf", 1),
    ],
)
def test_agreement_names_the_first_step_whose_hashes_differ(own, said, step):
    found = parity.agreement(own, course())
    assert (str(found), found.step) == (said, step)
    assert found.is_within(0.0) == (said == "bitwise") and found.is_within(0.02) == (said not in ("inf", "no losses"))


def test_without_a_hash_nothing_is_bitwise():
    assert not parity.agreement(course(hashes=[]), course(hashes=[])).is_bitwise


@pytest.mark.parametrize(
    ("own", "reference", "allowed", "step"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, None),
        ([1.0, 2.0 + 1e-15], [1.0, 2.0], 0.0, 1),
        ([1.0, 2.002], [1.0, 2.0], 2e-3, None),
        ([1.0, 2.006], [1.0, 2.0], 2e-3, 1),
        ([1.002, 2.002], [1.0, 2.0], 1e-4, 0),
        ([1.0, NAN], [1.0, 2.0], 1e9, 1),
        ([1.0, 2.0], [1.0, NAN], 1e9, 1),
        ([1.0, INF], [1.0, INF], 0.0, None),
        ([0.0], [0.0], 0.0, None),
        ([-1e-9], [0.0], 0.5, 0),
    ],
)
def test_the_first_loss_that_differs(own, reference, allowed, step):
    assert parity.first_loss(own, reference, allowed) == step


EAGER = {0: [[1.0, 8.0], [1.0]], 1: [[2.0, 8.0], [2.0]]}


@pytest.mark.parametrize(
    ("own", "losses", "said"),
    [
        (EAGER, (1.0, 0.5), ""),
        # Less than the rounding of the tensor's largest value, and of a loss.
        ({**EAGER, 0: [[1.0 + 5e-7, 8.0], [1.0]]}, (1.0, 0.5 + 4e-7), ""),
        ({**EAGER, 1: [[2.0, 8.0], [2.5]]}, (1.0, 0.5), "bias differs from eager's after step 1, by 2.5e-01 of its"),
        ({0: [[9.0, 8.0], [9.0]], 1: EAGER[1]}, (3.0, 0.5), "weight differs from eager's after step 0, by 1.0e+00"),
        (EAGER, (1.0, 0.6), "the loss of step 1 is 0.6, eager's 0.5"),
        ({**EAGER, 1: [[9.0, 8.0], [2.0]]}, (1.1, 0.5), "the loss of step 0 is 1.1, eager's 1"),
        ({**EAGER, 1: [[2.0, NAN], [2.0]]}, (1.0, 0.5), "weight differs from eager's after step 1, in NaN or"),
        # Steps for whose copies there was no memory.
        ({1: EAGER[1]}, (1.0, 0.5), ""),
    ],
)
def test_difference_names_the_first_step_and_tensor(own, losses, said):
    eager = course(copies=EAGER)
    found = parity.difference(eager, eager, course(losses, copies=own))
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.parametrize(("value", "is_equal"), [(2.19, True), (2.21, False)])
def test_a_difference_has_to_be_twice_that_of_two_eager_courses(value, is_equal):
    eager, again = (course(copies={**EAGER, 1: [[2.0, 8.0], [bias]]}) for bias in (2.0, 2.1))
    other = course(copies={**EAGER, 1: [[2.0, 8.0], [value]]})
    assert (parity.difference(eager, again, other) == "") == is_equal


@pytest.mark.parametrize(("step", "words"), [(0, "bias differs from eager's after step 0"), (1, "")])
def test_what_one_rounding_of_eager_has_moved_by_then_is_allowed(step, words):
    rounded = course(copies={**EAGER, 1: [[2.0, 8.0], [2.1]]})
    other = course(copies={**EAGER, step: [EAGER[step][0], [EAGER[step][1][0] * 1.08]]})
    eager = course(copies=EAGER)
    assert parity.difference(eager, eager, other)
    assert parity.difference(eager, eager, other, rounded).startswith(words) and bool(words) == (step == 0)
    assert bool(parity.difference(eager, eager, other, rounded)) == bool(words)


def test_equal_values_that_are_not_finite_are_equal():
    broken = course(copies={0: [[NAN, INF]]}, names=["weight"])
    assert parity.scatter(broken, broken) == 0.0
    assert parity.difference(broken, broken, broken) == ""
