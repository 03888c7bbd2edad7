"""rnnt/greedy_decoder: labels of the eager and the graph decoder against a search of one utterance after the other."""

import dataclasses

import pytest
import torch

from rnnt.config import PRESETS
from rnnt.greedy_decoder import EagerDecoder, GraphDecoder
from tests.decoder_cases import BLANK, CONFIG, encoded, model


@torch.no_grad()
def one_by_one(net, f, lengths, per_frame=30, total=300):
    """The search as it is usually written: an utterance, its frames, the labels of a frame."""
    training = net.training
    net.eval()
    found = []
    for encoder_output, length in zip(f, lengths.tolist(), strict=True):
        labels = []
        for frame in encoder_output[:length]:
            for _ in range(min(per_frame, total - len(labels))):
                # The answer to all labels so far.
                g = net.prediction(torch.tensor([labels], dtype=torch.int64), None)[:, -1:]
                best = net.joint(frame.view(1, 1, -1), g).argmax().item()
                if best == BLANK:
                    break
                labels.append(best)
        found.append(labels)
    net.train(training)
    return found


LENGTHS = {
    "mixed": [9, 1, 0, 12, 5],
    "equal": [12, 12, 12, 12, 12],
    "one frame": [1, 1, 1, 1, 1],
    "nothing": [0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("blank_bias", [2.0, 4.0])
@pytest.mark.parametrize("unrolled", [1, 4])
def test_labels_of_both_are_those_of_a_search_one_by_one(blank_bias, unrolled):
    net = model(blank_bias)
    eager = EagerDecoder(net, 5)
    graph = GraphDecoder(net, 5, 12, unrolled=unrolled)
    seen = set()
    # One decoder after another batch: nothing of the one before may be left.
    for seed, lengths in enumerate([*LENGTHS.values(), LENGTHS["mixed"]]):
        f, lengths = encoded(5, 12, seed), torch.tensor(lengths, dtype=torch.int32)
        expected = one_by_one(net, f, lengths)
        assert eager.decode(f, lengths) == expected
        assert graph.decode(f, lengths) == expected
        seen.add(sum(map(len, expected)) / max(1, int(lengths.sum())))
    # Blanks and labels, frames with several of them.
    assert any(0.2 < rate < 3 for rate in seen), seen
    graph.close()


@pytest.mark.parametrize("num_layers", [1, 3])
def test_other_numbers_of_layers(num_layers):
    net = model(2.0, dataclasses.replace(CONFIG, prediction_layers=num_layers))
    f, lengths = encoded(4, 12), torch.tensor([12, 5, 12, 8], dtype=torch.int32)
    expected = one_by_one(net, f, lengths)
    assert len({label for labels in expected for label in labels}) > 3
    graph = GraphDecoder(net, 4, 12)
    assert EagerDecoder(net, 4).decode(f, lengths) == graph.decode(f, lengths) == expected
    graph.close()


def test_labels_vary():
    expected = one_by_one(model(2.0), encoded(5, 12), torch.tensor([12] * 5))
    assert len({tuple(labels) for labels in expected}) == 5
    assert len({label for labels in expected for label in labels}) > 8


@pytest.mark.parametrize(("per_frame", "total"), [(3, 300), (30, 7), (3, 9), (1, 1)])
def test_limits(per_frame, total):
    """Without a blank every frame ends at its limit, and utterances at theirs."""
    net = model(-1000.0)
    f, lengths = encoded(3, 6), torch.tensor([6, 2, 1], dtype=torch.int32)
    expected = one_by_one(net, f, lengths, per_frame, total)
    assert [len(labels) for labels in expected] == [min(length * per_frame, total) for length in lengths.tolist()]
    limits = {"max_symbols_per_frame": per_frame, "max_symbols": total}
    assert EagerDecoder(net, 3, **limits).decode(f, lengths) == expected
    graph = GraphDecoder(net, 3, 6, **limits)
    assert graph.decode(f, lengths) == expected
    graph.close()


def test_smaller_batches_and_shorter_ones():
    net = model(2.0)
    eager, graph = EagerDecoder(net, 4), GraphDecoder(net, 4, 12)
    for batch, frames in [(4, 12), (2, 12), (3, 5), (1, 1), (4, 12)]:
        f, lengths = encoded(batch, frames, seed=batch), torch.arange(frames, frames - batch, -1).clamp(min=1).int()
        expected = one_by_one(net, f, lengths)
        assert eager.decode(f, lengths) == graph.decode(f, lengths) == expected
    # As the encoder makes it, a transposed view.
    f = encoded(12, 4, seed=9).transpose(0, 1)
    lengths = torch.tensor([12, 11, 2, 7], dtype=torch.int32)
    assert eager.decode(f, lengths) == graph.decode(f, lengths) == one_by_one(net, f, lengths)
    graph.close()


def test_what_lies_behind_an_utterance_does_not_matter():
    net = model(2.0)
    f, lengths = encoded(3, 8), torch.tensor([8, 3, 0], dtype=torch.int32)
    expected = one_by_one(net, f, lengths)
    for row, length in enumerate(lengths.tolist()):
        f[row, length:] = float("nan")
    graph = GraphDecoder(net, 3, 8)
    assert EagerDecoder(net, 3).decode(f, lengths) == graph.decode(f, lengths) == expected
    graph.close()


def test_refresh_reads_moved_weights_in_place():
    net = model(2.0)
    eager, graph = EagerDecoder(net, 3), GraphDecoder(net, 3, 8)
    f, lengths = encoded(3, 8), torch.tensor([8, 6, 7], dtype=torch.int32)
    before = graph.decode(f, lengths)
    for module in (net.prediction, net.joint):
        for index, weight in enumerate(module.parameters()):
            with torch.no_grad():
                weight.add_(0.7 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(index)))
        eager.refresh()
        graph.refresh()
        expected = one_by_one(net, f, lengths)
        assert expected != before
        assert eager.decode(f, lengths) == graph.decode(f, lengths) == expected
    graph.close()


def test_graph_reads_one_replay_late():
    net, f, lengths = model(2.0), encoded(3, 8), torch.tensor([8, 6, 7], dtype=torch.int32)
    eager, graph = EagerDecoder(net, 3), GraphDecoder(net, 3, 8, unrolled=4)
    for decoded in (eager, graph):
        decoded.load(f, lengths)
    num_steps = eager.loop()
    # Each step is a label or a blank of the slowest utterance.
    slowest = max(len(labels) + length for labels, length in zip(eager.results(), lengths.tolist(), strict=True))
    assert slowest - 1 <= num_steps <= slowest
    assert graph.loop() == 4 * (-(-num_steps // 4) + 1)
    assert graph.pool.num_replays == -(-num_steps // 4) + 1
    assert graph.results() == eager.results()
    graph.close()


def test_a_finished_search_stands_still():
    net, f, lengths = model(2.0), encoded(2, 6), torch.tensor([6, 3], dtype=torch.int32)
    graph = GraphDecoder(net, 2, 6)
    expected = graph.decode(f, lengths)
    counters = graph.search.counters[:4].clone()
    for _ in range(20):
        graph.graph.replay()
    assert torch.equal(graph.search.counters[:4], counters) and graph.results() == expected
    graph.close()


def test_more_than_a_decoder_holds():
    net = model(2.0)
    with pytest.raises(ValueError, match="3 utterances, the decoder was made for 2: raise its batch"):
        EagerDecoder(net, 2).decode(encoded(3, 4), torch.tensor([4, 4, 4]))
    graph = GraphDecoder(net, 2, 4)
    for batch, frames in ((3, 4), (2, 5)):
        with pytest.raises(ValueError, match=f"{batch} utterances of {frames} frames, .* holds 2 of 4: raise"):
            graph.decode(encoded(batch, frames), torch.full((batch,), frames))
    graph.close()


# --- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8])
def test_labels_on_the_gpu(batch):
    """Eager and graph alike at the benchmark's sizes in FP16; in FP32 those of plain torch on the CPU."""
    cases = ((PRESETS["bench"], torch.float16, 19.5), (CONFIG, torch.float32, 2.0))
    with torch.cuda.stream(torch.cuda.Stream()):
        for config, dtype, blank_bias in cases:
            net = model(blank_bias, config, dtype, "cuda")
            eager, graph = EagerDecoder(net, batch), GraphDecoder(net, batch, 205)
            on_host = EagerDecoder(model(blank_bias, config), batch)
            num_labels = 0
            for seed in range(3):
                f = encoded(batch, 205, seed, config)
                lengths = (205 - 23 * seed * torch.arange(batch)).clamp(min=0).int()
                found = eager.decode(f.to("cuda", dtype), lengths.cuda())
                assert found == graph.decode(f.to("cuda", dtype), lengths.cuda())
                num_labels += sum(map(len, found))
                if dtype == torch.float32:
                    assert found == on_host.decode(f, lengths)
            assert num_labels > 50
            graph.close()
