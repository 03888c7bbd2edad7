"""rnnt/other_variants: torch.compile leaves the state as it was."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from common.variant import Capture
from rnnt.config import Config
from rnnt.model import RNNT
from rnnt.other_variants import CompiledNetworks

TOY = Config(features=16, encoder_hidden=256, prediction_hidden=256, joint_hidden=16, vocab=16)


def toy_state():
    model = RNNT(TOY).half()
    state = SimpleNamespace(config=TOY, device=torch.device("cpu"), model=model)
    state.encoder, state.prediction, state.joint = model.encoder, model.prediction, lambda f, g: f
    state.inputs = SimpleNamespace(reset=lambda: None, dummy_batch=lambda frames, tokens: None)
    state.plan = SimpleNamespace(require_few_pairs=lambda name: [(8, 4), (16, 4)])
    return state


def test_the_compiled_networks_leave_everything_as_eager_needs_it(monkeypatch):
    import torch._dynamo.config
    import torch._inductor.config

    # Compiled variants on a CPU. The host graph has no foreign makers.
    monkeypatch.setattr("rnnt.other_variants.require_compiler", lambda device: None)
    monkeypatch.setattr("common.variant.require_compiler", lambda device: None)
    monkeypatch.setattr("common.variant.Pool.adopt", lambda pool, is_borrowed: contextlib.nullcontext())
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *a: function(*a))
    state, during = toy_state(), []

    def seen():
        dynamo = torch._dynamo.config
        settings = [torch._inductor.config.fallback_random, dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit]
        return [*settings, *map(state.__dict__.get, ("encoder", "prediction", "joint"))]

    def step(state, index):
        during.append(seen())

    monkeypatch.setattr("rnnt.other_variants.padded_step", step)
    monkeypatch.setattr("rnnt.other_variants.train_on", step)
    before = seen()
    variant = CompiledNetworks(state, Capture(strategy="", state=state, device=state.device))
    assert seen() == before and len(during) == 3
    for _ in range(2):
        variant.enter()
        assert seen() == during[0] == during[-1]
        assert all(own != other for own, other in zip(seen(), before, strict=True))
        variant.leave()
        assert seen() == before

    def fails(state, batch):
        raise RuntimeError("does not compile")

    monkeypatch.setattr("rnnt.other_variants.train_on", fails)
    with pytest.raises(RuntimeError, match="does not compile"):
        CompiledNetworks(state, Capture(strategy="", state=state, device=state.device))
    assert seen() == before
