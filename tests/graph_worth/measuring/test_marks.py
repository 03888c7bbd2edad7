"""common/marks: places in a step that are looked at, or cost nothing."""

import contextlib

import pytest
import torch

from graph_worth.measuring.marks import mark, opening_sections, section, watching_marks


def test_sections_are_opened_by_name():
    order = []

    @contextlib.contextmanager
    def follow(name):
        order.append(f"{name} begins")
        yield
        order.append(f"{name} ends")

    with opening_sections(follow), section("backward"):
        order.append("work")
    assert order == ["backward begins", "work", "backward ends"]
    assert section("a") is section("b"), "nothing is opened any more"


def test_a_section_lets_errors_through():
    with pytest.raises(KeyError), section("optimizer"):
        raise KeyError("x")


def test_a_mark_is_seen_where_it_stands_and_where_its_tensors_gradient_is_ready():
    seen = []
    x = torch.ones(3, requires_grad=True)
    y = 2 * x
    with watching_marks(lambda: seen.append("mark")):
        mark(y)
        seen.append("forward ends")
        y.sum().backward()
        mark(torch.ones(1))
    mark()
    assert seen == ["mark", "forward ends", "mark", "mark"]
