"""graph_worth/measuring/flops.py: what is counted of a step, and what is named because it is not."""

import pytest
import torch

from graph_worth.measuring import flops
from graph_worth.your_step.state import StepState

STEP = """
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as modes

@torch.library.custom_op("counted::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

twice.register_autograd(lambda context, gradient: 2 * gradient)

def build(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    def step(batch):
        optimizer.zero_grad()
        out = model(batch)
        loss = LOSS
        loss.backward()
        optimizer.step()
        return loss
    return step, [torch.randn(8, 16) for _ in range(2)], [model, optimizer]
"""
# Both products of the forward pass, the gradients of both weights, and that of the second layer's input.
WANTED = 2 * 8 * (2 * 16 * 32 + 3 * 32 * 4)


@pytest.mark.parametrize(
    ("loss", "wanted", "named"),
    [
        ("out.square().mean() + torch.linalg.vector_norm(out)", WANTED, ""),
        ("twice(out).square().mean()", WANTED, "counted::twice"),
        ("attention(*[out.view(1, 1, 8, 4)] * 3).sum()", WANTED, "_scaled_dot_product_flash_attention_for_cpu"),
        ("out.mean() * (1 // (1 - bool(modes())))", 0.0, "the step raised ZeroDivisionError"),
    ],
)
def test_matrix_products_are_counted_and_what_is_not_counted_is_named(tmp_path, loss, wanted, named):
    path = tmp_path / "step.py"
    path.write_text(STEP.replace("LOSS", loss))
    state = StepState(f"{path}:build", torch.device("cpu"), "test")
    before = [tensor.clone() for _, tensor in state.named_state()]

    found, notes = flops.of_step(lambda: state.train(0), state.reset)

    assert found == wanted
    assert named in "".join(notes) and len(notes) == bool(named)
    assert all(map(torch.equal, before, [tensor for _, tensor in state.named_state()]))
