"""Reads inside of torch's operators and backward formulas, and what happens beside a step: threads, filled memory."""

import threading
import time

import pytest
import torch

from graph_worth.measuring import torch_settings
from graph_worth.your_step.doctor import diagnose
from graph_worth.your_step.findings import NOTE

STEP = """
import copy, threading
import torch

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, incoming):
        (x,) = ctx.saved_tensors
        {backward}
        return 2 * x * incoming


def build(device):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    batches = [torch.randn(6, 8, device=device) for _ in range(3)]
    scratch = torch.zeros(6, 8, device=device)
    {build}

    def step(batch):
        x = model(batch)
        {step}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step, batches, [model, optimizer]
"""
SQUARE = "loss = Own.apply(x).mean()"
# Of torch 2.13 on a GPU, by its sources; the test with a GPU below asks CUDA.
READING = {
    "product": "loss = torch.sigmoid(x).prod()",
    "cumulative product": "loss = torch.sigmoid(x).cumprod(-1).mean()",
    "deviations": "loss = (x * torch.normal(x.detach(), x.detach().abs())).mean()",
    "index_fill": "loss = x.index_fill(1, batch.argmax(-1)[:1].clamp(max=3), x.detach().min()).mean()",
    "masked_fill": "loss = x.masked_fill(x > 0, x.mean()).square().mean()",
    "trace": "loss = (x.T @ x).trace()",
    "covariance": "loss = torch.cov(x.T).square().mean()",
    "matrix exponential": "loss = torch.linalg.matrix_exp(x.T @ x / 100).mean()",
}
SOUND = {
    "largest": "loss = x.max() - x.min() + x.median()",
    "deviation": "loss = (x / x.std()).square().mean() + x.var(-1).mean()",
    "quantile": "loss = torch.quantile(x, 0.3)",
    "draws": "loss = x[torch.multinomial(torch.ones(6, device=x.device), 3)].mean()",
    "store through a mask": "y = x.detach().clone(); y[y > 0] = 0.0; loss = (x - y).square().mean()",
    "determinant": "loss = torch.linalg.slogdet(x.T @ x + torch.eye(4, device=x.device))[1]",
    "embedding": "loss = (x[:1] * torch.embedding_renorm_(x.detach().clone(), batch.argmax(0), 0.1, 2.0)).mean()",
    "norm": "loss = x.norm() + x.amax() + torch.logsumexp(x, -1).mean() + x.topk(2).values.sum()",
}


def _found(tmp_path, step, build="pass", backward="pass"):
    # A file of its own: Python takes an edit of equal size within a second for the same file.
    path = tmp_path / f"hidden_step_{len(list(tmp_path.glob('*.py')))}.py"
    path.write_text(STEP.format(step=step, build=build, backward=backward))
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    torch_settings.prepare(device)
    return diagnose(f"{path}:build", device), path.read_text().splitlines()


def _lines(found, lines, kind):
    """The source of the lines at which findings of a kind stand."""
    numbers = [each.where.rpartition(":")[2] for each in found.findings if each.kind == kind and each.level != NOTE]
    return [lines[int(number) - 1].strip() for number in numbers]


@pytest.mark.parametrize("step", READING.values(), ids=READING)
def test_read_inside_of_an_operator_or_its_backward_is_named_with_its_line(tmp_path, step):
    found, lines = _found(tmp_path, step)

    assert _lines(found, lines, "host read") == [step], found.text()
    assert found.status == 6 and not found.whole_is_right


@pytest.mark.parametrize("step", SOUND.values(), ids=SOUND)
def test_read_that_a_gpu_does_not_make_is_no_finding(tmp_path, step):
    found, _ = _found(tmp_path, step)

    assert found.status == 0, found.text()


def test_read_inside_of_an_operator_in_a_backward_of_the_users_is_named_there(tmp_path):
    backward = "incoming = torch.normal(incoming, incoming.abs())"

    found, lines = _found(tmp_path, SQUARE, backward=backward)

    assert _lines(found, lines, "host read") == [backward], found.text()


@pytest.mark.parametrize("words", ["8", "num_classes=8"])
def test_one_hot_in_a_backward_is_sound_with_a_number_of_classes_alone(tmp_path, words):
    line = "torch.nn.functional.one_hot(x.argmax(-1), {})"

    assert _found(tmp_path, SQUARE, backward=line.format(words))[0].status == 0
    found, lines = _found(tmp_path, SQUARE, backward=line.format("-1"))

    assert _lines(found, lines, "host read") == [line.format("-1")], found.text()


@pytest.mark.gpu
@pytest.mark.parametrize("step", [*READING.values(), *SOUND.values()], ids=[*READING, *SOUND])
def test_gpu_waits_in_the_operators_that_read_and_in_no_others(step):
    scope = {"torch": torch, "batch": torch.randn(6, 8, device="cuda")}
    scope["x"] = torch.randn(6, 4, device="cuda", requires_grad=True)

    def run():
        exec(step, scope)
        scope["loss"].backward()

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        if step in SOUND.values():
            run()
        else:
            with pytest.raises(RuntimeError, match="synchronizing"):
                run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.slow
def test_thread_of_build_that_draws_is_named_and_one_that_does_not_is_none(tmp_path):
    draws = (
        "threading.Thread(target=lambda: [scratch.normal_() for _ in range(10**6)], daemon=True, name='draws').start()"
    )

    found, lines = _found(tmp_path, SQUARE, build=draws)
    named = _lines(found, lines, "thread")
    _end("draws")

    assert named == [draws], found.text()
    quiet = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    assert _found(tmp_path, SQUARE, build=quiet)[0].status == 0


def _end(name):
    """Wait until a thread has drawn its last number."""
    while any(each.name == name for each in threading.enumerate()):
        time.sleep(0.01)


def test_memory_that_the_host_fills_is_named_where_it_is_read_and_one_of_operators_is_not(tmp_path):
    fill, read = "rows = scratch.cpu().numpy(); counts = iter(range(10**6))", "x = x + scratch[:, :4]"
    for step in (f"rows[:] = next(counts); {read}; {SQUARE}", f"{read}; {SQUARE}; rows[:] = next(counts)"):
        found, lines = _found(tmp_path, step, build=fill)

        if not torch.cuda.is_available():
            assert _lines(found, lines, "host value") == [step], found.text()
    assert _found(tmp_path, f"scratch.copy_(batch); {read}; {SQUARE}")[0].status == 0


@pytest.mark.parametrize("write", ["scratch.zero_()", "torch.add(batch, 1, out=scratch)", "scratch.copy_(batch)"])
def test_scratch_that_is_written_whole_first_need_not_be_handed_over(tmp_path, write):
    found, lines = _found(tmp_path, f"{write}; x = x + scratch[:, :4]; {SQUARE}; loss.item()")

    assert not _lines(found, lines, "not handed over"), found.text()
    found, lines = _found(tmp_path, f"x = x + scratch[:, :4]; {write}; {SQUARE}; loss.item()")
    assert _lines(found, lines, "not handed over"), found.text()


def test_state_of_an_optimizer_that_a_step_makes_anew_before_it_uses_it_is_sound(tmp_path):
    momentum = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)"
    anew = f"[kept.update(momentum_buffer=torch.zeros_like(p)) for p, kept in optimizer.state.items()]; {SQUARE}"

    assert _found(tmp_path, anew, build=momentum)[0].status == 0


REMEDIED = {
    "torch.utils.checkpoint.checkpoint(torch.dropout, x, 0.1, True, use_reentrant=False)": "preserve_rng_state=False",
    "torch.distributions.Categorical(logits=x, validate_args=True)": "set_default_validate_args(False)",
    "torch.nn.utils.rnn.pack_padded_sequence(x[..., None], torch.tensor([6] * 4))": "pad and mask",
}


@pytest.mark.parametrize("call", REMEDIED)
def test_remedy_is_that_of_the_call(tmp_path, call):
    found, lines = _found(tmp_path, f"{call}; {SQUARE}")

    named = [each for each in found.findings if lines[int(each.where.rpartition(":")[2]) - 1].strip().startswith(call)]
    assert any(REMEDIED[call] in each.text() for each in named), found.text()


def test_numbers_and_texts_that_differ_among_batches_are_named_with_their_values(tmp_path):
    step = "mode = batch['mode']; batch = batch['rows']; loss = model(batch).mean() * (1 + mode)"

    def levels(values):
        build = f"batches = [{{'rows': batches[0], 'mode': each}} for each in {values}]"
        path = tmp_path / "step.py"
        path.write_text(STEP.format(step="", build=build, backward="pass").replace("x = model(batch)", step))
        found = diagnose(f"{path}:build", torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))
        return {each.evidence: each.level for each in found.findings if "batch['mode'] is" in each.evidence}

    ((evidence, level),) = levels([3, 5, 3]).items()
    assert "batch['mode'] is 3, 5:" in evidence and level != NOTE
    assert list(levels([True, False]).values()) == [NOTE]
    assert not levels([4, 4])


def test_parts_of_a_sequential_are_shown_with_their_class(tmp_path):
    model = "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(device)"
    build = f"{model}; optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)"

    reads = "model[1].register_forward_hook(lambda module, args, out: out * out.detach().mean().item())"
    found, _ = _found(tmp_path, SQUARE, build=f"{build}; {reads}")

    assert "in 1 (Linear): host read" in found.text()


# Of a GPU's table; a CPU reads nothing in them.
BY_TABLE = {
    "eigenvalues": ("loss = x.mean(); torch.linalg.eig(x.T @ x)", "linalg_eig is held by no graph: it"),
    "a factor": (
        "loss = torch.linalg.lu_factor(x.T @ x)[0].mean()",
        "linalg_lu_factor is held by no graph: it",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU shows what its own torch does")
@pytest.mark.parametrize(("step", "evidence"), BY_TABLE.values(), ids=BY_TABLE)
def test_operator_that_a_graph_refuses_is_named_by_the_table(tmp_path, step, evidence):
    found, lines = _found(tmp_path, step)

    assert _lines(found, lines, "host read") == [step], found.text()
    assert f"{evidence} waits for the GPU in 4 of 4 samples, torch 2" in found.text()


REMEDIES = {
    "loss = (x.repeat_interleave(batch.argmax(-1), 0)).mean()": "x.repeat_interleave(n, output_size=10)",
    "loss = torch.linalg.inv(x.T @ x + torch.eye(4)).mean()": "torch.linalg.inv_ex(square)",
}


@pytest.mark.parametrize("step", REMEDIES)
def test_remedy_is_the_call_that_a_graph_holds(tmp_path, step):
    found, _ = _found(tmp_path, step)

    assert f"a graph holds {REMEDIES[step]} in its place" in found.text()
