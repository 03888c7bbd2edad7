"""common/measuring/shared_memory.py: eager steps and graphs in one pool."""

import contextlib

import pytest
import torch

from common import variant as variants
from common.measuring import shared_memory


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


@pytest.mark.gpu
def test_eager_tensors_and_a_graph_take_turns_in_one_pool(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", torch.cuda.graph_pool_handle)
    monkeypatch.setattr(torch._C, "_graph_pool_handle", torch._C._graph_pool_handle)
    monkeypatch.setattr(variants, "eager_memory", variants.eager_memory)
    pool = shared_memory.share()
    x = torch.ones(2**22, device="cuda")
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
