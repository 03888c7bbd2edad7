"""common/host_graph: replays against eager bit for bit, what is refused at capture and at replay, shared fate."""

import copy
import gc
import inspect
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from graph_worth.capture.host_graph import CaptureError, HostPool
from graph_worth.folders import ROOT
from graph_worth.parallel import collectives
from tests.helpers.host_graph_cases import X, batches, number_through_a_mask, same

F = nn.functional


def line_of(fn):
    return f"{__file__}:{fn.__code__.co_firstlineno}"


# --- replays compute what eager computes


def test_twenty_training_steps_are_bitwise_eager():
    def build():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(64), nn.Linear(64, 8))
        return net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)

    def step(net, optimizer, x, y):
        optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = batches(22, (4, 16), (4, 8))
    net, optimizer = build()
    eager_losses = [step(net, optimizer, x, y).clone() for x, y in data]
    eager_random = torch.get_rng_state()

    graphed, graphed_optimizer = build()
    losses = [step(graphed, graphed_optimizer, *data[0])]
    x, y = data[1][0].clone(), data[1][1].clone()
    pool = HostPool()
    graph, loss = pool.capture(lambda: step(graphed, graphed_optimizer, x, y), (x, y))
    losses.append(loss.clone())
    for new_x, new_y in data[2:]:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        losses.append(loss.clone())

    assert graph.num_replays == 20
    assert same(losses, eager_losses)
    assert same(graphed.parameters(), net.parameters())
    for state, eager_state in zip(graphed_optimizer.state.values(), optimizer.state.values(), strict=True):
        assert same(state.values(), eager_state.values())
    assert torch.equal(torch.get_rng_state(), eager_random)
    names = graph.operators()
    assert graph.nodes() == {"operator": len(names)}
    assert names[0] == "aten._foreach_zero_.default" and names[-1] == "aten._fused_adamw_.default"
    assert not [name for name in names if name.startswith(("aten.t.", "aten.detach", "aten.empty", "profiler"))]


def test_lstm_forward_and_backward_under_no_grad_and_autocast():
    torch.manual_seed(0)
    lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.5)
    x = batches(1, (3, 7, 6))[0][0].requires_grad_()

    def run(lstm, x):
        y, _ = lstm(x)
        return (y.detach(), *torch.autograd.grad(y.square().mean(), [x, *lstm.parameters()]))

    run(lstm, x)
    graph, results = HostPool().capture(lambda: run(lstm, x), (x,))
    for (new_x,) in batches(3, (3, 7, 6), seed=2):
        state = torch.get_rng_state()
        expected = run(lstm, new_x.clone().requires_grad_())
        torch.set_rng_state(state)
        x.detach().copy_(new_x)
        # The caller's modes do not reach into a replay.
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            graph.replay()
            assert not torch.is_grad_enabled() and torch.is_autocast_enabled("cpu")
        assert same(results, expected)
    assert torch.is_grad_enabled()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(context, x, unused, weight):
        context.save_for_backward(x, weight)
        return x * weight, None

    @staticmethod
    def backward(context, gradient, _):
        x, weight = context.saved_tensors
        return gradient * weight, None, (gradient * x).sum()


def custom_function(x, state):
    weight = state[0, 0].detach().clone().requires_grad_()
    leaf = x.detach().requires_grad_()
    y, _ = Scale.apply(leaf, None, weight)
    return torch.autograd.grad(y.exp().sum(), (leaf, weight))


def in_place_and_views(x, state):
    state.add_(x)
    state[1:].mul_(0.5)
    state[0, 0] = 3.0
    turned = x.clone().t_()
    turned.add_(state.t())
    view = turned.unsqueeze_(0)
    view[..., 1].zero_()
    return state.clone(), view, x.t().reshape(-1), x[:, ::2] * 2


def out_arguments(x, state):
    out, empty = torch.empty_like(x), torch.empty(0)
    torch.add(x, state, out=out)
    torch.mul(out, 2, out=empty)
    torch.cumsum(x, 0, out=state)
    return out, empty


def none_outputs_and_lists(x, state):
    y, rank = torch.topk(x, 2)
    pieces = torch.cat((*torch.split(x, 1), state))
    normed = F.batch_norm(x, state[0].clone(), state[1].abs(), training=True)
    gradients = torch.ops.aten.native_layer_norm_backward(
        x, x, [4], x.mean(1, True), x.std(1, keepdim=True), None, None, [True, False, False]
    )
    return y, rank, pieces, normed, gradients[0], torch.where(x > 0, x, 0.0)


def random_numbers(x, state):
    return torch.rand(3), torch.randn_like(x), F.dropout(x, 0.5), torch.empty(4).uniform_()


def attention(x, state):
    query = x.reshape(1, 1, 3, 4).clone().requires_grad_()
    y = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    return y.detach(), torch.autograd.grad(y.square().sum(), query)[0]


@pytest.mark.parametrize(
    "fn",
    [
        custom_function,
        in_place_and_views,
        out_arguments,
        none_outputs_and_lists,
        number_through_a_mask,
        random_numbers,
        attention,
        torch.inference_mode()(lambda x, state: (F.linear(x, state).relu_(), x.flatten() * 2)),
    ],
)
def test_replays_are_eager_on_new_inputs(fn):
    (x, state), *rest = batches(4, (3, 4), (3, 4))
    x, state = x.clone(), state.clone()
    # Another graph of the pool, captured first: its replay spoils everything that fn leaves behind.
    pool = HostPool()
    earlier, _ = pool.capture(lambda: x + 1)
    graph, results = pool.capture(lambda: fn(x, state))
    for new_x, new_state in rest:
        x.copy_(new_x)
        state.copy_(new_state)
        eager_state = new_state.clone()
        torch.manual_seed(3)
        expected = fn(new_x.clone(), eager_state)
        torch.manual_seed(3)
        earlier.replay()
        graph.replay()
        as_tuple = [(value,) if isinstance(value, torch.Tensor) else value for value in (results, expected)]
        assert same(*as_tuple)
        assert torch.equal(state, eager_state)


# --- refused at capture

INTEGERS = torch.tensor([1, 2, 1, 2])
SEQUENCES = torch.ones(3, 2, 1)
LENGTHS = torch.tensor([3, 2])
OWN_GENERATOR = torch.Generator()

# fmt: off
REFUSED = [
    ("Tensor.item", lambda: X[0].item()),
    ("Tensor.__bool__", lambda: 1 if X.sum() > 0 else 2),
    ("Tensor.tolist", lambda: X.tolist()),
    ("Tensor.__array__", lambda: numpy.asarray(X)),
    ("Tensor.__repr__", lambda: print(X)),
    ("torch.equal", lambda: torch.equal(X, X)),
    ("aten.index.Tensor", lambda: X[X > 1]),
    ("aten.index_put_.default", lambda: X.__setitem__(X > 1, X[:3])),
    ("aten.repeat_interleave.Tensor", lambda: torch.repeat_interleave(X, INTEGERS)),
    ("aten.bincount.default", lambda: torch.bincount(INTEGERS)),
    ("torch.tensor_split", lambda: torch.tensor_split(X, INTEGERS)),
    ("aten._pack_padded_sequence.default", lambda: nn.utils.rnn.pack_padded_sequence(SEQUENCES, LENGTHS)),
    ("aten.lift_fresh.default", lambda: torch.tensor(1.0, device="cpu")),
    ("torch.frombuffer", lambda: torch.frombuffer(bytearray(8), dtype=torch.float32)),
    ("torch.manual_seed", lambda: torch.manual_seed(1)),
    ("torch.get_rng_state", lambda: torch.random.fork_rng().__enter__()),
    ("aten.rand.generator", lambda: torch.rand(2, generator=OWN_GENERATOR)),
    ("aten.resize_.default", lambda: torch.empty(3).resize_(5)),
    ("aten.set_.source_Tensor", lambda: torch.empty(3).set_(X)),
    ("aten._to_sparse.default", lambda: torch.eye(2).to_sparse() * 2),
    ("aten._efficientzerotensor.default", lambda: torch._efficientzerotensor(2)),
    ("HostPool.capture", lambda: HostPool().capture(lambda: X + 1)),
]
# fmt: on


@pytest.mark.parametrize(("operator", "fn"), REFUSED, ids=[f"{i}-{name}" for i, (name, _) in enumerate(REFUSED)])
def test_refused_at_capture(operator, fn):
    attributes = torch.manual_seed, torch.random.get_rng_state, torch.frombuffer
    pool = HostPool()
    with pytest.raises(CaptureError) as error:
        pool.capture(fn)
    text = str(error.value)
    assert text.startswith(f"{operator} at {line_of(fn)} cannot be captured"), text
    assert pool.bytes() == 0 and pool.graphs == []
    assert attributes == (torch.manual_seed, torch.random.get_rng_state, torch.frombuffer)
    # The same call goes through outside, and another capture is possible.
    assert torch.get_rng_state().numel() > 0
    pool.capture(lambda: X + 1)[0].replay()


@pytest.mark.slow
def test_where_the_compiler_is_imported_the_line_is_the_users_too():
    code = """
import torch, torch._dynamo
from graph_worth.capture.host_graph import HostPool
x = torch.ones(3)
for _ in range(2):
    try:
        HostPool().capture(lambda: x.nonzero())
    except Exception as error:
        print(str(error).split(" cannot")[0])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["aten.nonzero.default at <string>:7"] * 2


class Reader(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * sum(gradient.tolist())


def test_a_value_read_in_backward_names_its_line():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        CaptureError, match=rf"Tensor.tolist at {__file__}:{Reader.backward.__code__.co_firstlineno + 2} "
    ):
        HostPool().capture(lambda: torch.autograd.grad(Reader.apply(x).sum(), x))


def test_a_swallowed_refusal_still_fails_the_capture():
    def swallow():
        try:
            return X.sum().item()
        except RuntimeError:
            return 0

    def rename():
        try:
            X.tolist()
        except RuntimeError:
            raise ValueError("hidden") from None

    with pytest.raises(CaptureError, match=r"Tensor\.item"):
        HostPool().capture(swallow)
    with pytest.raises(CaptureError, match=r"Tensor\.tolist"):
        HostPool().capture(rename)


def test_an_error_of_the_function_leaves_no_half_graph():
    pool = HostPool()
    graph, kept = pool.capture(lambda: X * 2)
    num_bytes, seed = pool.bytes(), torch.manual_seed

    def broken():
        kept.add_(X + 1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pool.capture(broken)
    assert pool.bytes() == num_bytes and torch.manual_seed is seed
    graph.replay()
    assert torch.equal(kept, X * 2)
    assert torch.equal(pool.capture(lambda: kept + 1)[1], X * 2 + 1)


def test_other_threads_are_left_alone():
    def with_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: (torch.get_rng_state().numel() > 0, X.tolist())).result()

    assert HostPool().capture(with_thread)[1] == (True, [1, 2, 3, 4])


def test_a_replay_inside_a_capture_is_refused():
    graph, _ = HostPool().capture(lambda: X + 1)
    with pytest.raises(CaptureError, match=r"HostGraph\.replay at .* runs inside a capture"):
        HostPool().capture(graph.replay)


def test_reseeding_that_no_mode_sees_is_found():
    generator = torch.Generator().manual_seed(5)
    pool = HostPool()
    pool.register_generator(generator)
    draw = lambda: torch.rand(4, generator=generator)  # noqa: E731
    for reseed in (lambda: generator.manual_seed(5), lambda: torch.default_generator.manual_seed(5)):
        with pytest.raises(CaptureError, match=rf"set since {__file__}:\d+\)"):
            pool.capture(lambda reseed=reseed: (draw(), torch.rand(2), reseed(), draw()))
        with pytest.raises(CaptureError, match="at the end of the capture"):
            pool.capture(lambda reseed=reseed: (draw(), torch.rand(2), reseed()))
    generator.manual_seed(5)
    expected = [draw() for _ in range(3)]
    generator.manual_seed(5)
    graph, drawn = pool.capture(draw)
    assert torch.equal(drawn, expected[0])
    for value in expected[1:]:
        graph.replay()
        assert torch.equal(drawn, value)


def test_collectives_of_torch_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        reduce, barrier = lambda: dist.all_reduce(X), lambda: dist.barrier()
        for fn in (reduce, barrier):
            with pytest.raises(CaptureError, match=rf"c10d\..* at {line_of(fn)} .*NCCL"):
                HostPool().capture(fn)
        bucket = torch.ones(2)
        graph, _ = HostPool().capture(lambda: collectives.all_reduce_mean_(bucket))
        graph.replay()
        assert graph.operators() == ["graphs.all_reduce_mean_.default"]
    finally:
        dist.destroy_process_group()


# --- tensors from outside


class Owner:
    """A weight that can be replaced, and a capture that reads it on a known line."""

    def __init__(self):
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.x = torch.ones(2, 4)

    def __call__(self):
        view = self.weight.t().detach()
        return self.x @ view

    @property
    def line(self):
        return f"{__file__}:{Owner.__call__.__code__.co_firstlineno + 2}"


def rebind(owner):
    owner.weight = nn.Parameter(torch.zeros(4, 4))


def grow(owner):
    owner.weight.untyped_storage().resize_(1 << 20)


@pytest.mark.parametrize(("change", "what"), [(rebind, "gone"), (grow, "memory moved")])
def test_a_changed_external_tensor_stops_the_replay(change, what):
    owner = Owner()
    graph, _ = HostPool().capture(owner)
    graph.replay()
    change(owner)
    gc.collect()
    with pytest.raises(CaptureError, match=rf"^aten\.mm\.default at {owner.line} reads a tensor .*{what}"):
        graph.replay()
    assert graph.num_replays == 1


def test_external_memory_is_freed_when_its_owner_drops_it():
    owner = Owner()
    references = [StorageWeakRef(tensor.untyped_storage()) for tensor in (owner.weight, owner.x)]
    pool = HostPool()
    graph, y = pool.capture(owner)
    graph.replay()
    assert not any(reference.expired() for reference in references)
    assert torch.equal(y, torch.full((2, 4), 4.0))
    del owner, y
    gc.collect()
    assert all(reference.expired() for reference in references)
    assert pool.bytes() > 0


def test_an_operator_that_fails_at_replay_is_named():
    index = torch.tensor([0, 1])
    read = lambda: X.exp().index_select(0, index)  # noqa: E731
    graph, _ = HostPool().capture(read)
    index.fill_(99)
    with pytest.raises(CaptureError, match=rf"aten.index_select.default at {line_of(read)} failed at replay: .*range"):
        graph.replay()
    assert torch.is_grad_enabled() and graph.num_replays == 0


def test_error_in_pythons_library_is_at_the_line_that_called_it():
    here = inspect.currentframe()
    with pytest.raises(CaptureError) as error:
        HostPool().capture(lambda: copy.deepcopy({"x": torch.ones(2)}))
    assert error.value.place == f"{__file__}:{here.f_lineno - 1}"
