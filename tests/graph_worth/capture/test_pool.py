"""graph_worth/capture: pools on the host, static inputs, and the CUDA side as far as fakes of torch.cuda can tell."""

import contextlib
import gc

import pytest
import torch

from graph_worth.capture.pool import CaptureError, Pool, StaticInputs

CPU = torch.device("cpu")
CLEAR = "_cuda_clearCublasWorkspaces"
MIB = 2**20


def line_of(fn, offset):
    return f"{__file__}:{fn.__code__.co_firstlineno + offset}"


# --- on the host


def test_a_pool_counts_replays_and_bytes_and_releases():
    pool = Pool(CPU)
    assert (pool.num_replays, pool.bytes()) == (0, 0)
    x = torch.arange(4.0)
    first, y = pool.capture(lambda: (x * 2).add_(1), (x,))
    second, z = pool.capture(lambda: y * 3)
    assert pool.graphs == [first, second]
    assert pool.num_replays == 0, "a capture is no replay"
    assert pool.bytes() == 2 * 4 * 4
    for _ in range(3):
        x.add_(1)
        first.replay()
    second.replay()
    assert (first.num_replays, second.num_replays, pool.num_replays) == (3, 1, 4)
    assert torch.equal(z, (torch.arange(4.0) + 3) * 6 + 3)
    pool.release()
    assert (pool.graphs, pool.num_replays, pool.bytes()) == ([], 0, 0)
    with pytest.raises(CaptureError, match="released"):
        first.replay()
    pool.release()


@pytest.mark.parametrize(
    ("replace", "what"),
    [
        (lambda x: torch.ones(2, 3), "data_ptr"),
        (lambda x: torch.ones(3, 2), "shape"),
        (lambda x: x.data.view(torch.int32), "dtype"),
        (lambda x: torch.ones(3, 2).t(), "stride"),
    ],
)
def test_a_replaced_static_input_is_an_error_on_the_host(replace, what):
    x = torch.zeros(2, 3)
    graph, _ = Pool(CPU).capture(lambda: x + 1, (x,))
    graph.replay()
    x.data = replace(x)
    with pytest.raises(CaptureError, match=f"static input 0 .*{what}"):
        graph.replay()
    assert graph.num_replays == 1


# --- static inputs


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.zeros(2)}, r"a batch of \['tokens'\] where the graph reads \['mask', 'tokens'\]"),
        (
            {"tokens": torch.zeros(2), "mask": torch.zeros(1)},
            r"input 'mask' is \(1,\) torch.float32, captured as \(3,\) torch.float32",
        ),
        (
            {"tokens": torch.zeros(2, dtype=torch.int64), "mask": torch.zeros(3)},
            r"input 'tokens' is \(2,\) torch.int64, captured as \(2,\) torch.float32",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_named(batch, message):
    """A shape that broadcasts and a type that converts do not fit either."""
    inputs = StaticInputs({"tokens": torch.zeros(2), "mask": torch.zeros(3)})
    with pytest.raises(ValueError, match=message):
        inputs.load(batch)


# --- on CUDA, with a fake of torch.cuda


class FakeGraph:
    """torch.cuda.CUDAGraph's calls, logged; like the real one it takes its arguments in __new__ and __init__."""

    log: list
    invalid = False

    def __new__(cls, keep_graph=False):
        graph = super().__new__(cls)
        graph.kept_by_new = keep_graph
        return graph

    def __init__(self, keep_graph=False):
        self.kept = keep_graph and self.kept_by_new

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.handle = pool
        self.log.append(("begin", pool, capture_error_mode, gc.isenabled()))

    def capture_end(self):
        self.log.append(("end", gc.isenabled()))
        if self.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture\nmore lines")

    def instantiate(self):
        self.log.append("instantiate")

    def replay(self):
        self.log.append("replay")

    def reset(self):
        self.log.append("reset")

    def pool(self):
        return self.handle


@pytest.fixture
def cuda(monkeypatch):
    """(device, log) of a pretended GPU with a side stream; every test leaves the collector as it was."""
    log = []
    handles = iter([(0, 1), (0, 2), (0, 3)])
    monkeypatch.setattr(FakeGraph, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "side")
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty cache"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch._C, CLEAR, lambda: log.append("clear workspaces"), raising=False)
    yield torch.device("cuda"), log
    assert gc.isenabled()
    gc.enable()


def synchronises():
    raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be")


def test_an_invalidated_capture_is_ended_and_told_with_the_users_line(cuda, monkeypatch):
    """Ending it raises as well; the first error is the one that is told."""
    device, log = cuda
    monkeypatch.setattr(FakeGraph, "invalid", True)
    pool = Pool(device)
    with pytest.raises(CaptureError) as error:
        pool.capture(synchronises)
    assert str(error.value) == (
        "CUDA error: operation not permitted when stream is capturing " + f"(at {line_of(synchronises, 1)})"
    )
    assert isinstance(error.value.__cause__, RuntimeError)
    assert log[-2:] == [("end", False), "clear workspaces"] and "instantiate" not in log
    assert gc.isenabled()
    assert pool.graphs == []


def test_the_users_line_is_the_last_one_outside_torch(cuda):
    device, _ = cuda

    def inside_torch():
        torch.nn.functional.linear(torch.zeros(2, 3), torch.zeros(2, 3), bias=torch.zeros(5))
        return torch.nn.Linear(3, 2)(torch.zeros(4, 5))

    def below():
        return torch.nn.Linear(3, 2)(torch.zeros(4, 5))

    for fn in (inside_torch, below):
        with pytest.raises(CaptureError, match="shape|size|mat1") as error:
            Pool(device).capture(fn)
        assert str(error.value).endswith(f"(at {line_of(fn, 1)})")


def test_a_swallowed_error_is_found_when_the_capture_ends(cuda, monkeypatch):
    device, log = cuda
    monkeypatch.setattr(FakeGraph, "invalid", True)

    def swallows():
        with contextlib.suppress(RuntimeError):
            synchronises()

    with pytest.raises(CaptureError, match="previous error during capture"):
        Pool(device).capture(swallows)
    assert "instantiate" not in log and gc.isenabled()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), KeyError("x")])
def test_out_of_memory_and_what_is_no_cuda_error_go_through(cuda, monkeypatch, error):
    device, log = cuda
    monkeypatch.setattr(FakeGraph, "invalid", True)

    def fails():
        raise error

    with pytest.raises(type(error)) as raised:
        Pool(device).capture(fails)
    assert raised.value is error
    assert log[-2:] == [("end", False), "clear workspaces"] and gc.isenabled()


def test_adopt_counts_the_replays_of_graphs_that_others_capture(cuda):
    device, log = cuda
    pool = Pool(device)
    before = torch.cuda.CUDAGraph()
    with pool.adopt():
        # The other library's stream cannot take memory that an eager warm-up has cached.
        assert log == ["clear workspaces", "empty cache"]
        foreign, never_captured = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        assert isinstance(foreign, FakeGraph) and foreign.kept, "a graph that another library made is kept"
        assert pool.graphs == []
        foreign.capture_begin(pool=(7, 7))
        foreign.capture_end()
    assert torch.cuda.CUDAGraph is FakeGraph and log[-1] == "clear workspaces"
    with pytest.raises(KeyError), Pool(device).adopt():
        raise KeyError
    assert torch.cuda.CUDAGraph is FakeGraph and log[-2:] == ["empty cache", "clear workspaces"]
    after = torch.cuda.CUDAGraph()
    for graph in (before, after, never_captured):
        graph.replay()
    assert pool.num_replays == 0
    foreign.replay()
    foreign.replay()
    assert pool.num_replays == 2 and log.count("replay") == 5, "the replays themselves must happen"
    assert len(pool.graphs) == 1 and pool.graphs[0].graph is foreign
    pool.release()
    assert log[-1] == "reset" and pool.num_replays == 0


def test_bytes_on_cuda_counts_each_memory_pool_once(cuda, monkeypatch):
    sizes = [((0, 1), 2), ((0, 1), 20), ((7, 7), 1), ((0, 0), 400)]
    segments = [{"segment_pool_id": handle, "total_size": size << 20} for handle, size in sizes]
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", lambda: segments)
    pool = Pool(cuda[0])
    pool.capture(lambda: None)
    pool.capture(lambda: None)
    with pool.adopt():
        foreign = torch.cuda.CUDAGraph()
        foreign.capture_begin(pool=(7, 7))
        foreign.capture_end()
    assert pool.bytes() == 23 << 20


def test_a_torch_that_keeps_no_graph_instantiates_it_itself(cuda, monkeypatch):
    device, log = cuda
    monkeypatch.delattr(FakeGraph, "instantiate")
    graph, _ = Pool(device).capture(lambda: None)
    graph.replay()
    assert log[-2:] == ["clear workspaces", "replay"] and not graph.graph.kept


# --- workspaces of cuBLAS


def capture_by_reduce_overhead():
    compiled = torch.compile(lambda x: x @ x + 1, mode="reduce-overhead", dynamic=False, fullgraph=True)
    x = torch.ones(64, 64, device="cuda")
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)


def fit_with_lightning():
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = lightning.Trainer(
        accelerator="cuda",
        devices=[torch.cuda.current_device()],
        plugins=[LightningEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4))


def parameterize_a_product():
    from graph_worth.capture.parameterized.region import capture

    capture(lambda x: [x @ x], [torch.ones(64, 64, device="cuda")]).release()


@pytest.mark.gpu
@pytest.mark.parametrize("free", [capture_by_reduce_overhead, fit_with_lightning, parameterize_a_product])
def test_a_graph_replays_after_others_have_freed_eagers_workspaces(free, monkeypatch):
    # Lightning sets it.
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    device = torch.device("cuda", torch.cuda.current_device())
    original, cleared = getattr(torch._C, CLEAR), []

    def clear():
        cleared.append(True)
        original()

    with torch.cuda.stream(torch.cuda.Stream(device)):
        # Few results of long sums: cuBLAS adds up parts of each sum in its workspace.
        a = torch.randn(64, 1 << 17, device=device, dtype=torch.bfloat16)
        b = torch.randn(1 << 17, 64, device=device, dtype=torch.bfloat16)
        for _ in range(3):
            torch.mm(a, b)
        pool = Pool(device)
        graph, product = pool.capture(lambda: a @ b)
        assert pool.bytes() > 8 * MIB, "the product has 8 KiB, so the pool has no workspace"
        monkeypatch.setattr(torch._C, CLEAR, clear)
        try:
            free()
        finally:
            torch._dynamo.reset()
        assert cleared, "it frees no workspaces any more"
        gc.collect()
        torch.cuda.empty_cache()
        # These take the memory that was freed.
        others = [torch.full((32 * MIB,), 7, dtype=torch.uint8, device=device) for _ in range(8)]
        for _ in range(3):
            a.normal_()
            b.normal_()
            expected = a @ b
            product.zero_()
            graph.replay()
            assert torch.equal(product, expected)
        assert all(bool((other == 7).all()) for other in others)
        pool.release()


@pytest.mark.gpu
def test_all_graphs_of_a_pool_share_the_memory_of_a_workspace():
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):
        x = torch.randn(64, 64, device=device)
        expected = x @ x
        pool = Pool(device)
        pool.capture(lambda: x @ x)
        first = pool.bytes()
        made = [pool.capture(lambda: x @ x) for _ in range(20)]
        # The products themselves are small: their segments have 2 MiB.
        assert pool.bytes() - first <= 2 * MIB
        for graph, product in made:
            graph.replay()
            assert torch.equal(product, expected)
        pool.release()
