"""The messages of failed captures: each real text has its cause."""

import pytest
import torch

from graph_worth.capture import host_graph_rules as rules
from graph_worth.capture.errors import explained
from graph_worth.capture.graph_error import CaptureError
from graph_worth.capture.pool import Pool
from graph_worth.your_step import record, user_file
from graph_worth.your_step.doctor import diagnose
from graph_worth.your_step.findings import REMEDIES, STOPS
from graph_worth.your_step.trial import Trial

# What CUDA 13.0 says for errors 900 to 908, as PyTorch passes it on.
CUDA = {
    900: "operation not permitted when stream is capturing",
    901: "operation failed due to a previous error during capture",
    902: "operation would result in a merge of separate capture sequences",
    903: "capture was not ended in the same stream as it began",
    904: "capturing stream has unjoined work",
    905: "dependency created on uncaptured work in another stream",
    906: "operation would make the legacy stream depend on a capturing blocking stream",
    907: "operation not permitted on an event last recorded in a capturing stream",
    908: "attempt to terminate a thread-local capture sequence from another thread",
}
# (text of PyTorch; words of its cause)
OTHERS = [
    ("Attempting CUDA graph capture of step() for an instance of Adam but param_groups' capturable is False.", "steps"),
    ("lr as a Tensor is not supported for capturable=False and foreach=True", "learning rate"),
    ("If capturable=True, params and state_steps must be on supported devices: ['cuda', 'xpu'].", "lies on the CPU"),
    ("Attempt to increase offset for a CUDA generator not in capture mode.", "does not know"),
    ("Offset increment outside graph capture encountered unexpectedly.", "has not ended"),
    ("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture", "random state"),
    ("Please ensure to utilize the CUDAGeneratorImpl::set_state_index method during capturing", "random state"),
    ("Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.", "pinned"),
    ("During CUDA graph capture, autograd node 'X' has a stale reference to the default stream", "gradients"),
    ("captures_underway.empty() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp", "another capture"),
    ("accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run", "next replay"),
    # Of torch._inductor.cudagraph_trees, in 2.11 and 2.13.
    ("TODO: graph recording observed an input tensor deallocate during graph  recording that did not", "checkpoint"),
    ("Unable to hit fast path of CUDAGraphs because of pending, uninvoked backwards. Consider", "backward pass"),
    ("Unable to hit fast path of CUDAGraphs because outputs from a previous step still require backward.", "waits"),
    (
        "Error: accessing gradient tensor output of CUDAGraphs that has been overwritten by a subsequent run.",
        "added up",
    ),
    ("CUDA out of memory. Tried to allocate 2.00 GiB", "does not fit"),
    ("CUDA error: an illegal memory access was encountered", "given back"),
]


@pytest.mark.parametrize("number", CUDA)
def test_an_error_of_cuda_is_known_by_its_text(number):
    cause, remedy = explained(f"CUDA error: {CUDA[number]} (at my_step.py:7)")
    assert f"CUDA error {number}" in cause and remedy


# Reason of a host graph, words of its cause.
REASONS = {
    rules.READS: "reads a value",
    rules.LENGTHS: "reads a value",
    rules.SHAPE: "shape",
    rules.NEW: "data of the host",
    rules.RANDOM: "random state",
    rules.UNKNOWN_GENERATOR: "does not know",
    rules.RESIZES: "given back",
    rules.GONE: "given back",
    rules.MOVED: "given back",
    rules.COLLECTIVE: "collective",
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_of_a_host_graph_has_its_cause_whatever_its_message_says(reason):
    cause, remedy = explained("a text", reason)
    assert REASONS[reason] in cause and remedy
    assert explained(f"aten.mm at a.py:3 cannot be captured: it {reason}") in (("", ""), (cause, remedy))


def test_each_reason_of_the_rules_has_a_kind_of_finding_with_a_remedy():
    own = {value for name, value in vars(rules).items() if name.isupper() and isinstance(value, str)}
    assert own == set(REASONS)
    # A watched step draws from any generator, and replays nothing.
    assert own - record.KINDS.keys() == {rules.UNKNOWN_GENERATOR, rules.GONE, rules.MOVED}
    assert {reason for _, _, reason in rules.PATCHED} <= record.KINDS.keys()
    assert set(record.KINDS.values()) <= REMEDIES.keys()


def test_an_error_of_a_host_graph_carries_reason_and_place():
    with pytest.raises(CaptureError) as error:
        Pool(torch.device("cpu")).capture(lambda: torch.ones(2, device="cpu").sum().item())
    found = error.value
    assert found.reason == rules.READS and found.place.startswith(f"{__file__}:") and found.place in str(found)


@pytest.mark.parametrize(("message", "words"), OTHERS)
def test_a_message_of_torch_has_its_cause(message, words):
    cause, remedy = explained(message)
    assert words in cause and remedy


def test_an_unknown_message_has_no_cause():
    assert explained("size mismatch, m1: [2 x 3]") == ("", "")


def test_step_that_raises_an_error_of_compiled_graphs_is_told_the_remedy():
    message = "TODO: graph recording observed an input tensor deallocate during graph  recording that did not occur"

    assert "compile around the checkpoint" in user_file.said(RuntimeError(message))
    assert "compile around" not in user_file.said(RuntimeError("shapes differ"))


@pytest.mark.parametrize(
    "why", ["of pending, uninvoked backwards", "outputs from a previous step still require backward"]
)
def test_warning_of_compiled_graphs_is_a_finding_with_its_line(tmp_path, why):
    path = tmp_path / "my_step.py"
    path.write_text(
        "import torch, warnings\n"
        "def build(device):\n"
        "    model = torch.nn.Linear(4, 4).to(device)\n"
        "    def step(batch):\n"
        "        loss = model(batch).mean()\n"
        f"        warnings.warn('Unable to hit fast path of CUDAGraphs because {why}.')\n"
        "        loss.backward()\n"
        "        return loss\n"
        "    return step, [torch.randn(2, 4)], [model]\n"
    )
    found = diagnose(f"{path}:build", torch.device("cpu"))

    (finding,) = [each for each in found.findings if each.kind == "compiled graphs"]
    assert finding.where == f"{path}:6" and "waits for its backward pass" in finding.evidence
    assert "cudagraph_mark_step_begin()" in finding.remedy


def test_finding_of_a_failed_capture_has_the_lines_of_cudas_log():
    trial = Trial.__new__(Trial)
    error = CaptureError(
        f"CUDA error: {CUDA[900]} (at my_step.py:7)", place="my_step.py:7", log=["cuCall in loader: no"]
    )

    found = trial._failed(error, STOPS).finding

    assert found.where == "my_step.py:7" and "CUDA's log: cuCall in loader: no" in found.evidence
