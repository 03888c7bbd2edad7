"""graph_worth/measuring/shared_memory.py: eager steps and graphs in one pool."""

import contextlib
import sys
import threading

import pytest
import torch

from graph_worth import made_variant as variants
from graph_worth.measuring import shared_memory


def test_a_context_inside_itself_is_entered_once_and_again_after_an_error():
    entered = []

    @contextlib.contextmanager
    def pool():
        entered.append("in")
        yield
        entered.append("out")

    memory = shared_memory.once_at_a_time(pool)
    with memory(), memory():
        assert entered == ["in"]
    assert entered == ["in", "out"]
    with pytest.raises(ValueError, match="5"), memory():
        raise ValueError(5)
    with memory():
        assert entered[-1] == "in"


@pytest.fixture
def as_before(monkeypatch):
    """Sharing puts back whatever it changes of torch and this process."""
    changed = [(torch.cuda, "graph_pool_handle"), (torch._C, "_graph_pool_handle"), (variants, "eager_memory")]
    # A test of another file may have imported it. Its handle would keep this test's pool until the next test.
    te_graph = sys.modules.get("transformer_engine.pytorch.graph")
    changed += [(te_graph, "_graph_pool_handle")] if te_graph else []
    for owner, name in changed:
        monkeypatch.setattr(owner, name, getattr(owner, name, None), raising=False)
    yield
    torch._C._set_multithreading_enabled(True)


@pytest.mark.gpu
def test_a_backward_pass_takes_its_memory_from_the_pool(as_before):
    x, threads = torch.ones(2**22, device="cuda", requires_grad=True), []
    pool = shared_memory.share()

    def step():
        y = x.sin()
        y.register_hook(lambda grad: threads.append(threading.current_thread()))
        return torch.autograd.grad(y.sum(), x)

    outside = torch.cuda.memory_reserved() - reserved_in(pool)
    with variants.eager_memory():
        step()
    assert threads == [threading.main_thread()]
    assert torch.cuda.memory_reserved() - reserved_in(pool) == outside


def reserved_in(pool):
    return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(mempool_id=pool.id))


@pytest.mark.gpu
def test_eager_tensors_and_a_graph_take_turns_in_one_pool(as_before):
    x = torch.ones(2**22, device="cuda")
    pool = shared_memory.share()
    with variants.eager_memory(), variants.eager_memory():
        y = x * 2
        del y
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
        z = x * 3
    reserved = torch.cuda.memory_reserved()
    for _ in range(3):
        graph.replay()
        assert float(z[0]) == 3
        with variants.eager_memory():
            assert float((x * 2)[0]) == 2
    assert torch.cuda.memory_reserved() == reserved
    del z, graph, pool
