"""rnnt/config: parameters, FLOP, limits, the learning rate and the messages."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rnnt import config as rnnt
from rnnt.model import RNNT

BENCH, TINY = rnnt.PRESETS["bench"], rnnt.PRESETS["tiny"]


@pytest.mark.parametrize("config", [BENCH, TINY], ids=["bench", "tiny"])
def test_parameters_are_those_of_the_model(config):
    with torch.device("meta"):
        model = RNNT(config)
    assert rnnt.num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    assert rnnt.num_parameters(BENCH) == 49_071_616


def test_the_benchmark_s_flops():
    # Facts of the benchmark, counted with FlopCounterMode: 36.16, 69.85 and 80.20 GFLOP forward.
    for shape, expected in (((409, 56), 36.16e9), ((557, 125), 69.85e9), ((641, 125), 80.20e9)):
        assert rnnt.forward_flops(BENCH, *shape) == pytest.approx(expected, rel=2e-4)
    # Without symbols there is the encoder alone, and without frames the prediction network.
    encoder, prediction = rnnt.forward_flops(BENCH, 409, -1), rnnt.forward_flops(BENCH, 0, 56)
    joint = rnnt.forward_flops(BENCH, 409, 56) - encoder - prediction
    assert (encoder, prediction, joint) == pytest.approx((23.40e9, 0.51e9, 12.25e9), rel=5e-3)
    assert rnnt.training_flops(BENCH, 409, 56) == pytest.approx(3 * 36.16e9 - 2.097e6 * 409, rel=2e-4)


def lstm_by_products(layer, x):
    """FlopCounterMode does not see torch's LSTM: the same products, as one matrix product each."""
    time, batch, _ = x.shape
    x.flatten(0, 1) @ layer.weight_ih_l0.t()
    h = x.new_empty(time, batch, layer.hidden_size)
    h.flatten(0, 1) @ layer.weight_hh_l0.t()
    return h, None


@pytest.mark.parametrize("config", [BENCH, TINY], ids=["bench", "tiny"])
@pytest.mark.parametrize("shape", [(20, 6), (21, 1)])
def test_flops_are_those_that_are_counted(config, shape, monkeypatch):
    monkeypatch.setattr(nn.LSTM, "forward", lstm_by_products)
    frames, tokens = shape
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model = RNNT(config)
        lengths = torch.empty(2, dtype=torch.int32)
        f, _ = model.encoder(torch.empty(frames, 2, config.features), lengths)
        model.joint(f, model.prediction(torch.empty(2, tokens, dtype=torch.int64)))
    assert counter.get_total_flops() == 2 * rnnt.forward_flops(config, frames, tokens)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"init_scale": 0.0}, "--init-scale 0.0: takes a finite number above 0"),
        ({"forget_bias": float("nan")}, "--forget-bias nan: takes a finite number"),
        ({"batch": 0}, "--batch 0: takes a number from 1 up"),
        ({"ema": 1.0}, "--ema 1.0: takes a number from 0 up, below 1"),
        ({"loss_scale": 0.5}, "--loss-scale 0.5: takes a number from 1"),
        ({"buckets": "51"}, "--buckets 51: takes auto or a number from 1 to 50"),
        ({"data": "synthetic", "frames": 17}, "--frames 17: takes at most 16, see --max-frames"),
        ({"data": "synthetic", "tokens": 7}, "--tokens 7: takes at most 6, see --max-tokens"),
        ({"data": ""}, "--data takes synthetic, lengths or a folder of speech"),
        ({"data": "speech", "features": 224}, "--features 224: speech has 240"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_learning_rate_warms_up_holds_and_falls_by_epochs():
    config = replace(TINY, lr=0.5, lr_warmup=4, lr_hold=3, lr_gamma=0.5, lr_epoch=2)
    rates = [rnnt.learning_rate(config, index) for index in range(13)]
    assert rates[:8] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5])
    assert rates[8:] == pytest.approx([0.5, 0.25, 0.25, 0.125, 0.125])
    assert rnnt.learning_rate(config, 10**6) == rnnt.MIN_LR
    assert rnnt.learning_rate(replace(config, lr=1e-7), 10**6) == 1e-7


def test_memory_grows_with_the_batch_and_is_refused_by_name():
    sizes = [rnnt.predicted_bytes(replace(BENCH, batch=batch)) for batch in (1, 8, 192)]
    assert sizes == sorted(sizes)
    rnnt.require(BENCH, sizes[1])
    rnnt.require(BENCH, None)
    with pytest.raises(ValueError, match=rf"--batch 192 needs .* \({sizes[2]:,} bytes\), .* lower --batch"):
        rnnt.require(rnnt.PRESETS["full"], sizes[1])


def test_where_cudnn_s_persistent_kernels_run():
    assert rnnt.persistent_lstms(BENCH) and rnnt.persistent_lstms(rnnt.PRESETS["bench_b32"])
    assert not rnnt.persistent_lstms(rnnt.PRESETS["full"])
    assert not rnnt.persistent_lstms(replace(BENCH, precision="bf16"))
    assert not rnnt.persistent_lstms(replace(BENCH, batch=12))
    assert not rnnt.persistent_lstms(replace(BENCH, features=240))
