"""capture/parameterized/verify.py with a region that is made up: what the first launches find, without a GPU."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from graph_worth.capture import tensor_places
from graph_worth.capture.graph_error import RegionRefused
from graph_worth.capture.parameterized import verify
from graph_worth.capture.parameterized.words import Unexplained

X = [torch.linspace(-1, 1, 8)]


class Generator:
    """A generator whose offset a launch forgets to advance, or not."""

    def __init__(self):
        self.offset = 0

    def get_state(self):
        return self.offset

    def set_state(self, state):
        self.offset = state

    get_offset = get_state


class Region:
    """launch(inputs, fill) as of a region; `body(inputs, memory)` returns its results."""

    def __init__(self, body):
        self.body = body

    def launch(self, inputs, fill):
        arena = torch.full((64,), fill, dtype=torch.uint8)
        return self.body(inputs, arena.view(torch.float32)), [arena]


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def host(monkeypatch):
    """Copies on the host, found again by their address."""
    copies, original, draws = [], tensor_places.clone, Generator()

    def clone(tensor):
        copies.append(original(tensor))
        return copies[-1]

    def bytes_at(address, size, device):
        (found,) = [tensor for tensor in copies if tensor.data_ptr() == address]
        return found.view(torch.uint8)

    monkeypatch.setattr(tensor_places, "clone", clone)
    monkeypatch.setattr(tensor_places, "bytes_at", bytes_at)
    monkeypatch.setattr(verify.random_state, "generator", lambda device: draws)
    return draws


def doubled(x):
    """Two results; the second one is never written."""
    return [x * 2, torch.empty(4)]


def launched(inputs, memory_):
    memory_[:8].copy_(inputs[0] * 2)
    return [memory_[:8], memory_[8:12]]


def run(body, fn=doubled, times=2):
    verification = verify.Verification(Region(body), fn, X)
    for _ in range(times):
        verification.run()
    return verification


def test_a_launch_like_eager_passes_though_a_result_is_unwritten():
    before = X[0].clone()
    assert run(launched).inexact == set()
    assert torch.equal(X[0], before)


def test_a_wrong_result_and_a_result_that_is_not_written_are_refused():
    with pytest.raises(RegionRefused, match="result 0 of a launch differs from eager in"):
        run(lambda inputs, new: [new[:8].copy_(inputs[0] * 3), new[8:12]])


def test_an_input_that_a_launch_changes_is_refused():
    def body(inputs, new):
        results = launched(inputs, new)
        inputs[0].add_(1)
        return results

    with pytest.raises(RegionRefused, match="input 0 of a launch differs"):
        run(body)


def test_a_launch_that_writes_to_memory_of_an_earlier_one_is_refused():
    first = []

    def body(inputs, new):
        first.append(new)
        first[0][:8].copy_(inputs[0] * 2)
        return [new[:8], new[8:12]]

    with pytest.raises(RegionRefused, match="wrote to memory of an earlier one"):
        run(body)


def test_a_launch_that_draws_unlike_eager_is_refused(host):
    def draws(x):
        host.offset += 4
        return doubled(x)

    with pytest.raises(RegionRefused, match="generator is at 0 after a launch, at 4 after eager"):
        run(launched, draws)


def test_a_result_that_eager_does_not_repeat_is_compared_by_a_tolerance_and_named():
    def noisy(scale):
        return lambda x: [x * 2 + torch.randn(8) * scale, torch.empty(4)]

    assert run(launched, noisy(1e-6)).inexact == {"result 0"}
    with pytest.raises(RegionRefused, match="eager differs from itself by"):
        run(launched, noisy(1.0))


def test_a_rounding_passes_by_its_name_where_kernels_need_not_be_deterministic():
    def rounded(inputs, new):
        results = launched(inputs, new)
        results[0].mul_(1 + 2**-23)
        return results

    with pytest.raises(RegionRefused, match="result 0 of a launch differs"):
        run(rounded)
    # With warnings alone, attention's backward adds in any order.
    for mode in ("default", "warn"):
        torch.set_deterministic_debug_mode(mode)
        assert run(rounded).inexact == {"result 0"}
    with pytest.raises(RegionRefused, match="eager differs from itself by"):
        run(lambda inputs, new: [new[:8].copy_(inputs[0] * 2.01), new[8:12]])


def summed(total, added, rounds_in_eager=False):
    """`inexact` of a region that gives a sum of 32 bits added(gradient) in the place of a gradient of 16."""
    gradient = torch.linspace(1e-3, 3e-3, 64).to(torch.bfloat16)

    def fn(total, gradient):
        # As atomic additions in 16 bits do, a rounding now and then.
        noise = 2**-8 * torch.randint(2, (64,)) if rounds_in_eager else 0
        total.add_(gradient.float() * (1 + noise))
        return []

    def body(inputs, memory_):
        inputs[0].add_(added(inputs[1].float()))
        return []

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)
    check = verify.Verification(Region(body), fn, [total, gradient])
    check.run()
    return check.inexact


@pytest.mark.parametrize("rounds_in_eager", [False, True])
def test_a_gradient_that_is_lost_beside_a_large_sum_is_refused(rounds_in_eager):
    with pytest.raises(RegionRefused, match="input 0 of a launch differs from eager"):
        summed(torch.linspace(-1, 1, 64), torch.zeros_like, rounds_in_eager)


def test_a_sum_may_differ_by_roundings_of_its_gradient_where_eager_itself_does():
    def rounded(gradient):
        return gradient * (1 + 2**-8)

    assert summed(torch.zeros(64), rounded, rounds_in_eager=True) == {"input 0"}
    with pytest.raises(RegionRefused, match="input 0 of a launch differs from eager"):
        summed(torch.zeros(64), rounded)


def test_integers_that_eager_leaves_unwritten_may_be_others_and_no_written_ones():
    numbers = iter(range(100))

    def seeds(x):
        return [x * 2, torch.tensor(next(numbers))]

    def body(inputs, new):
        return [launched(inputs, new)[0], torch.tensor(7)]

    run(body, seeds)
    with pytest.raises(RegionRefused, match="result 1 of a launch differs"):
        run(body, lambda x: [x * 2, torch.tensor(3)])


def test_a_result_that_no_launch_writes_costs_no_further_run():
    runs = []

    def counted(x):
        runs.append(x)
        return doubled(x)

    run(launched, counted)
    assert len(runs) == 2


def test_a_result_on_another_device_passes_unwritten_alone():
    """As seeds of attention in 32 bits: on the CPU in eager, on the GPU in a capture."""

    def elsewhere(x):
        return [x * 2, torch.empty(4, device="meta")]

    run(launched, elsewhere)
    with pytest.raises(RegionRefused, match="result 1 is on cpu, in eager on meta"):
        run(lambda inputs, new: [launched(inputs, new)[0], new[8:12].fill_(1)], elsewhere)


class WordsRegion(Region):
    """A region whose body sees its words, too: body(inputs, memory, the number, the address)."""

    def __init__(self, body):
        super().__init__(lambda inputs, new: body(inputs, new, *self.words))
        # A number that two captures did not agree upon, and an address that was valid once.
        self.words = [5, 0x7D00_0000_1000]
        self.seen = []

    def overwrite(self, unexplained, values):
        for word, value in zip(unexplained, values, strict=True):
            self.words[word.position] = value
        self.seen.append(list(self.words))


def analysis_of(*unexplained):
    return SimpleNamespace(unexplained=unexplained, largest=lambda: 64, name=lambda: "node 3 (k)")


def prove(body):
    region = WordsRegion(body)
    number, address = region.words
    found = analysis_of(Unexplained(3, 0, number, 6, 0), Unexplained(3, 8, address, 9, 1, is_suspect=True))
    verify.Verification(region, doubled, X).prove_unread(found)
    return region


def test_a_proof_names_inexact_results_and_drops_the_addresses_of_its_launches():
    region = WordsRegion(lambda inputs, new, number, address: launched(inputs, new))
    found = SimpleNamespace(first=SimpleNamespace(segments=[], given=[]), unexplained=[])
    assert verify.Verification(region, doubled, X).prove(found) == [] and len(region.seen) == 1

    def noisy(x):
        return [x * 2 + torch.randn(8) * 1e-6, torch.empty(4)]

    assert verify.Verification(region, noisy, X).prove(found) == ["result 0"]


def test_words_that_no_kernel_reads_are_accepted_and_come_back():
    region = prove(lambda inputs, new, number, address: launched(inputs, new))
    assert region.words == [5, 0x7D00_0000_1000]
    assert [words[0] for words in region.seen] == [6, 0, 5]
    assert len({words[1] for words in region.seen}) == 3


def reads_the_number(inputs, new, number, address):
    inputs[0].add_(number)
    return launched(inputs, new)


def test_a_flag_that_shares_its_word_with_unused_bytes_keeps_its_value():
    region = WordsRegion(lambda inputs, new, number, address: launched([inputs[0] * (number & 0xFF)], new))
    region.words[0] = 0x00BBAA01
    found = analysis_of(Unexplained(3, 0, region.words[0], 0x00BBCC01, 0))
    verify.Verification(region, doubled, X).prove_unread(found)
    assert [words[0] for words in region.seen] == [0x00BBCC01, 0x00BB0001, 0x00BBAA01]


def test_a_number_beside_unused_bytes_that_look_like_half_an_address_keeps_its_value(monkeypatch):
    sizes, original = [], verify._scratch

    def scratch(largest, device):
        sizes.append(largest)
        return original(64, device)

    monkeypatch.setattr(verify, "_scratch", scratch)
    region = WordsRegion(lambda inputs, new, number, address: launched([inputs[0] * (address & 0xFF)], new))
    region.words[1] = 0x7D00_3F80_0001
    found = analysis_of(Unexplained(3, 8, region.words[1], 0x3F80_0001, 1, is_suspect=True))
    verify.Verification(region, doubled, X).prove_unread(found)
    assert {words[1] & 0xFFFFFFFF for words in region.seen} == {0x3F800001}
    assert len({words[1] for words in region.seen}) > 1 and sizes == [64 + 2**32]


def reads_a_float(inputs, new, number, address):
    value = ctypes.c_float.from_address(address).value
    return [launched(inputs, new)[0].add_(value), new[8:12]]


def reads_a_flag(inputs, new, number, address):
    results = launched(inputs, new)
    if not ctypes.c_ubyte.from_address(address).value:
        results[0].zero_()
    return results


def writes(value):
    def body(inputs, new, number, address):
        ctypes.memset(address + 8, value, 1)
        return launched(inputs, new)

    return body


@pytest.mark.parametrize("body", [reads_the_number, reads_a_float, reads_a_flag, writes(0), writes(0xFF), writes(1)])
def test_a_word_that_a_kernel_reads_or_an_address_that_it_uses_is_refused_with_the_node(body):
    with pytest.raises(RegionRefused, match=r"differ between two captures.*and matter.*node 3 \(k\)"):
        prove(body)
