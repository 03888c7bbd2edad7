"""rnnt/greedy_decoder_kernels against plain torch: on a GPU, and through Triton's interpreter without one."""

import torch

from rnnt import greedy_decoder
from rnnt.greedy_decoder import EagerDecoder
from tests.decoder_cases import encoded, model
from tests.triton_interpreter import DEVICE, on_device, run_interpreted


@on_device
@torch.no_grad()
def test_parts_of_a_step():
    """Each kernel against plain torch, from one state in the middle of a search."""
    from rnnt import greedy_decoder_kernels

    net = model(2.0, device=DEVICE)
    f, lengths = encoded(6, 9).to(DEVICE), torch.tensor([9, 1, 0, 4, 9, 7], dtype=torch.int32, device=DEVICE)
    one, other = (EagerDecoder(net, 6, 2, 11).search for _ in range(2))
    names = ("x", "c", "recurrent", "g", "joined", "logits", "counters", "labels", "num_active")
    one.start(lengths)
    for _ in range(25):
        one.step(f)
        for name in names:
            getattr(other, name).copy_(getattr(one, name))
        other.lengths.copy_(one.lengths)
        torch._foreach_copy_(other.gates, one.gates)
        for part, arguments in (("join", [f]), ("advance", []), ("rise", [1])):
            getattr(greedy_decoder_kernels, part)(one, *arguments)
            getattr(greedy_decoder, part)(other, *arguments)
            for name in names[:-2]:
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)
            assert one.results() == other.results() and one.num_active == other.num_active
    assert one.num_active == 0


def test_in_the_interpreter():
    run_interpreted(__file__)
