"""graph_worth/garbage: what is imported is left alone, what a run makes is collected."""

import gc
import weakref

import pytest

from graph_worth import garbage


class Node:
    def __init__(self):
        self.self = self


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.enable()
    gc.unfreeze()


def test_a_run_collects_what_it_makes_and_looks_at_nothing_else():
    garbage.hold()
    assert not gc.isenabled()
    imported = weakref.ref(Node())
    with garbage.of_run():
        assert gc.isenabled()
        made = weakref.ref(Node())
        gc.collect()
        assert made() is None and imported() is not None
        held = Node()
        dropped = weakref.ref(Node())
        before = gc.get_freeze_count()
        garbage.keep()
        assert dropped() is None
        assert gc.get_freeze_count() > before
        assert all(each is not held for each in gc.get_objects())
        kept = weakref.ref(held)
        del held
        gc.collect()
        assert kept() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert kept() is None and imported() is None


def test_what_fails_leaves_nothing_frozen():
    with pytest.raises(ValueError), garbage.of_run():
        raise ValueError
    assert gc.get_freeze_count() == 0
