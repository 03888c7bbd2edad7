"""common/marks: sections that autograd enters and leaves."""

import contextlib

import pytest
import torch

from common.marks import gradient_section, opening_sections, section


class Named(torch.autograd.Function):
    """Twice its input; its backward writes its name down."""

    @staticmethod
    def forward(ctx, x, name, order):
        ctx.name, ctx.order = name, order
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        ctx.order.append(ctx.name)
        return 2 * grad, None, None


@pytest.fixture
def order():
    return []


@pytest.fixture
def watched(order):
    @contextlib.contextmanager
    def follow(name):
        order.append(f"{name} begins")
        yield
        order.append(f"{name} ends")

    return opening_sections(follow, inner=True)


def test_a_gradient_section_holds_what_lies_between_its_tensors(order, watched):
    x = torch.ones(3, requires_grad=True)
    y = Named.apply(x, "inner", order)
    z = Named.apply(y, "middle", order)
    with watched:
        gradient_section("part", z, y)
        Named.apply(z, "outer", order).sum().backward()
    assert order == ["outer", "part begins", "middle", "part ends", "inner"]
    assert x.grad.tolist() == [8.0] * 3


def test_it_ends_at_a_leaf_and_begins_at_the_root(order, watched):
    x = torch.ones((), requires_grad=True)
    with watched:
        z = Named.apply(x, "all", order)
        gradient_section("part", z, x)
        z.backward()
    assert order == ["part begins", "all", "part ends"]


def test_a_profile_has_sections_alone(order):
    x = torch.ones(3, requires_grad=True)
    with opening_sections(lambda name: order.append(name) or contextlib.nullcontext()):
        with section("backward"):
            pass
        gradient_section("part", 2 * x, x)
    assert order == ["backward"]


@pytest.mark.parametrize("with_gradients", [True, False])
def test_where_nobody_watches_or_nothing_has_a_gradient_there_is_none(order, watched, with_gradients):
    x = torch.ones(3, requires_grad=with_gradients)
    z = Named.apply(x, "all", order)
    with contextlib.nullcontext() if with_gradients else watched:
        gradient_section("part", z, x)
    if with_gradients:
        z.sum().backward()
    assert order == (["all"] if with_gradients else [])
