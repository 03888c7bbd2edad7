"""llama2_lora --tp: two ranks that share each layer against one process, graphed against eager, and their parts."""

import math
import os
from dataclasses import replace

import pytest
import torch

from common.data.checkpoint import open_checkpoint
from common.data.safetensors_file import File, open_file
from graph_worth.made_variant import Unsupported
from graph_worth.parallel import collectives
from llama2_lora import plan, train
from llama2_lora import state as states
from llama2_lora.config import PRESETS, REPLICATED, Config, flops_per_step, layer_weights
from llama2_lora.kernels.scaling import Formats
from llama2_lora.kernels.torch_operators import dropout_key
from llama2_lora.layers.handwritten import QKV
from llama2_lora.state import State, require_kind
from llama2_lora.weights import frozen as shards
from llama2_lora.weights.frozen import RandomWeights
from tests.helpers import gloo_ranks
from tests.helpers.llama2_lora_case import (
    CPU,
    TINY,
    follow_eager,
    losses_of_graphs,
    own_rank,
    shorten_corpus,
    write_checkpoint,
)

# At tiny's rate gradient norms jump, and differences grow with them.
CALM = replace(TINY, dropout=0.0, lr=1e-3)
STEPS = 20
# (precision, dtype of activations, largest differences of losses and norms in 20 steps). Measured: 1.9e-7 and 1.4e-6,
# 1.1e-7 and 5.7e-7, 1.1e-4 and 7.3e-4, 7.4e-5 and 6.1e-4.
PRECISIONS = {
    "fp32": ("bf16", torch.float32, 2e-6, 2e-5),
    "fp8_fp32": ("fp8", torch.float32, 2e-6, 2e-5),
    "bf16": ("bf16", torch.bfloat16, 5e-4, 5e-3),
    "fp8": ("fp8", torch.bfloat16, 5e-4, 5e-3),
}


def make_state(config, main=torch.bfloat16):
    """This rank's, or that of one process. main: dtype of activations."""
    made_of = Formats.of
    with pytest.MonkeyPatch.context() as patch:
        shorten_corpus(patch)  # in the ranks' processes, too
        patch.setattr(states.Formats, "of", lambda config: made_of(config, main))
        return State(config, CPU, "handwritten", *own_rank())


def whole_adapters(state, flat):
    """name -> matrix of the whole model, of a flat tensor of this rank."""
    every = flat.new_empty(state.tensor.size * len(flat))
    collectives.all_gather_into_(every, flat, state.tensor.group)
    return dict(state.adapters.named_whole(every.chunk(state.tensor.size)))


# --- training


def trained(config, precision):
    precision, main, *_ = PRECISIONS[precision]
    state = make_state(replace(config, precision=precision), main)
    losses, norms, _ = follow_eager(state, STEPS)
    replicated = state.adapters.replicated(state.adam.masters[0])
    return losses, norms, replicated.double().sum().item(), replicated.abs().max().item()


def tp2():
    return [trained(replace(CALM, tp=2), each) for each in os.environ["PRECISIONS"].split(",")]


def assert_close(ours, theirs, losses, norms):
    assert ours[0] == pytest.approx(theirs[0], rel=losses)
    assert ours[1] == pytest.approx(theirs[1], rel=norms)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["fp32,fp8_fp32", "bf16,fp8"])
def test_two_ranks_of_a_layer_train_as_one_process_does(names, monkeypatch):
    monkeypatch.setenv("PRECISIONS", names)
    torch.use_deterministic_algorithms(False)
    first, second = gloo_ranks.run(__name__, "tp2", 2)
    assert first == second  # also in the sum of the replicated adapters
    for name, ours in zip(names.split(","), first, strict=True):
        assert_close(ours, trained(CALM, name), *PRECISIONS[name][2:])
        assert len(set(ours[0])) == STEPS


EXACT = replace(CALM, precision="bf16", documents="separate")


def tp2_cp2():
    return trained(replace(EXACT, tp=2, cp=2), "fp32")


def dp2_tp2():
    return trained(replace(EXACT, tp=2), "fp32")


def dp2():
    return trained(EXACT, "fp32")


@pytest.mark.slow
def test_tensor_context_and_data_ranks_train_together():
    torch.use_deterministic_algorithms(False)
    alone = trained(EXACT, "fp32")
    for ours in gloo_ranks.run(__name__, "tp2_cp2", 4):
        assert_close(ours, alone, 1e-5, 1e-4)
    expected = gloo_ranks.run(__name__, "dp2", 2)
    for rank, ours in enumerate(gloo_ranks.run(__name__, "dp2_tp2", 4)):
        assert_close(ours, expected[rank // 2], 1e-5, 1e-4)


def graphed():
    """By split, FP8 with dropout: layers that keep nothing, something and everything."""
    splits = {2: ({"tp": 2},), 4: ({"tp": 2, "cp": 2}, {"tp": 2})}[own_rank()[1]]
    return [losses_of_graphs(make_state(replace(TINY, keep="1 qkv residual, 1 all", **split)), 3) for split in splits]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_graphed_equal_ranks_eager_bit_for_bit(num_ranks):
    first, second, *_ = gloo_ranks.run(__name__, "graphed", num_ranks)
    assert first == second and all(len(set(losses)) == 3 for losses in first)


# --- gradients


def gradients():
    """name -> gradient of the whole model's matrix in FP32, from adapters without zeros."""
    state = make_state(replace(EXACT, tp=own_rank()[1]), torch.float32)
    generator = torch.Generator().manual_seed(0)
    for layer in state.adapters.layers:
        for name, shape in state.config.adapters.items():
            whole = torch.randn(shape, generator=generator) * 0.05
            layer[name].copy_(shards.shard_of(state.config, name, whole, state.tensor.rank))
    state.load_window(0)
    train.forward_and_backward(state)
    state.adapters.collect()
    state.reduce_gradients()
    state.adam.step()
    return {name: each.tolist() for name, each in whole_adapters(state, state.adapters.main_grad).items()}


def test_each_adapters_gradient_is_that_of_one_process():
    torch.use_deterministic_algorithms(False)
    alone = {name: torch.tensor(each) for name, each in gradients().items()}
    for ranks in gloo_ranks.run(__name__, "gradients", 2):
        assert ranks.keys() == alone.keys() and len(alone) == 4 * TINY.layers
        for name, ours in ranks.items():
            assert float((torch.tensor(ours) - alone[name]).norm() / alone[name].norm()) < 1e-5, name


# --- parts


def test_parts_of_a_matrix_join_to_it():
    config = replace(TINY, tp=2)
    whole = RandomWeights(TINY, CPU)
    parts = [RandomWeights(config, CPU, rank) for rank in range(2)]
    expected, *layers = ({name: each.read(name, 0) for name in config.matrices} for each in (whole, *parts))
    for name in config.matrices:
        assert [tuple(each[name].shape) for each in layers] == [config.shard.matrices[name]] * 2
        assert torch.equal(shards.unsharded(config, name, [each[name] for each in layers]), expected[name])
    # The first rank has the first heads of q, of k and of v, and the first columns of gate and up.
    q, k = TINY.q_width, TINY.kv_width
    rows = [*range(q // 2), *range(q, q + k // 2), *range(q + k, q + k + k // 2)]
    assert torch.equal(layers[0]["qkv"], expected["qkv"][rows])
    rows = [*range(TINY.ffn // 2), *range(TINY.ffn, TINY.ffn * 3 // 2)]
    assert torch.equal(layers[0]["fc1"], expected["fc1"][rows])
    for name in ("embedding", "head"):
        assert torch.equal(torch.cat([each.read(name) for each in parts]), whole.read(name))


def test_a_rank_reads_its_share_of_a_checkpoint(tmp_path, monkeypatch):
    folder, read, num_elements = write_checkpoint(tmp_path / "llama", TINY), File.read, []

    def counted(file, name, part):
        tensor = read(file, name, part)
        num_elements.append(tensor.numel())
        return tensor

    def layer(shard):
        checkpoint = open_checkpoint(folder, TINY, shard=shard)
        return {name: checkpoint.read(name, 1) for name in (*TINY.matrices, "norm1", "norm2")}

    monkeypatch.setattr(File, "read", counted)
    config, whole = replace(TINY, tp=2), layer((0, 1))
    assert sum(num_elements) == layer_weights(TINY) + 2 * TINY.hidden
    num_elements.clear()
    layers = [layer((rank, 2)) for rank in range(2)]
    assert sum(num_elements) == layer_weights(TINY) + 2 * 2 * TINY.hidden
    for name in config.matrices:
        assert torch.equal(shards.unsharded(config, name, [each[name] for each in layers]), whole[name])
    assert all(torch.equal(each["norm1"], whole["norm1"]) for each in layers)
    every = [open_checkpoint(folder, TINY, shard=shard) for shard in ((0, 1), (0, 2), (1, 2))]
    for name in ("embedding", "head"):
        alone, *parts = (each.read(name) for each in every)
        assert torch.equal(torch.cat(parts), alone)


def loaded():
    """Sums of the bytes of a layer's matrices in FP8, joined over ranks, and the adapters that are saved."""
    state = make_state(replace(TINY, tp=own_rank()[1], checkpoint=os.environ["FOLDER"], save_adapter=os.environ["OUT"]))
    found = {}
    for name, matrix in state.stack.weights.layers[2].items():
        part = matrix.value.view(torch.uint8)
        every = part.new_empty(state.tensor.size * part.shape[0], part.shape[1])
        collectives.all_gather_into_(every, part, state.tensor.group)
        joined = shards.unsharded(state.config, name, list(every.chunk(state.tensor.size)))
        found[name] = joined.tolist(), matrix.inverse.item()
    return found, state.finish()


def test_ranks_load_a_checkpoint_and_save_an_adapter_as_one_process_does(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", str(write_checkpoint(tmp_path / "llama", TINY)))
    monkeypatch.setenv("OUT", str(tmp_path / "alone"))
    alone = list(loaded())
    monkeypatch.setenv("OUT", str(tmp_path / "ranks"))
    first, second = gloo_ranks.run(__name__, "loaded", 2)
    assert {name: list(each) for name, each in alone[0].items()} == first[0] == second[0]
    assert first[1][0].endswith("ranks") and second[1] == []
    files = [open_file(tmp_path / name / "adapter_model.safetensors", "") for name in ("alone", "ranks")]
    for name in files[0].entries:
        assert torch.equal(files[0].read(name), files[1].read(name)), name


def masks():
    """Masks of dropout of both adapters in a layer."""
    state = make_state(replace(TINY, precision="bf16", tp=2))
    stack, found = state.stack, []
    for key, width in ((dropout_key(1, QKV), TINY.hidden), (stack._proj_key(1), TINY.q_width // 2)):
        ones, dropped = (torch.ones(TINY.sequence, width, dtype=torch.bfloat16) for _ in range(2))
        stack.operators.quantize(ones, dropped=dropped, key=key)
        found.append(dropped.tolist())
    return found


def test_ranks_share_the_masks_of_replicated_tensors_alone():
    first, second = gloo_ranks.run(__name__, "masks", 2)
    assert first[0] == second[0] and first[1] != second[1]


def test_sizes_are_those_of_a_ranks_part():
    whole = PRESETS["full"]
    config = replace(whole, tp=8)
    assert (config.shard.heads, config.shard.kv_heads, config.shard.ffn, config.shard.vocab) == (8, 1, 3584, 4000)
    assert config.ranks(16).dp == 2 and config.shard.shard == config.shard
    assert layer_weights(config.shard) == layer_weights(whole) / 8
    assert flops_per_step(config) == flops_per_step(whole) / 8
    trained = math.prod(config.adapters["qkv.a"]) + math.prod(config.adapters["proj.b"])
    assert sum(math.prod(config.shard.adapters[name]) for name in REPLICATED) == trained
    # x and the residual stream are whole on each rank, weights are not.
    least = [plan.make_plan(each, "least").bytes for each in (whole, config)]
    assert least[0] / 6 < least[1] < least[0] / 3


# --- what cannot run


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tp": 4}, "--kv-heads 2 is not divisible by --tp 4: take --tp 2"),
        ({"tp": 2, "ffn": 272}, "divided by --tp 2, take multiples of 16"),
        ({"tp": 2, "vocab": 257}, "--vocab 257 is not divisible by --tp 2: take --tp 1"),
        ({"tp": 0}, "--tp 0: takes a number from 1 up"),
        ({"pp": 2}, "--pp 2: takes 1, this model has no pipeline"),
    ],
)
def test_flags_that_do_not_fit(fields, told):
    with pytest.raises(ValueError) as caught:
        Config(**{**vars(TINY), **fields})
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_that_do_not_fit():
    with pytest.raises(ValueError, match="--tp 2 --cp 2 need a multiple of 4 ranks, this run has 6"):
        replace(TINY, tp=2, cp=2).ranks(6)
    with pytest.raises(Unsupported, match="--tp 2 needs handwritten layers"):
        require_kind("torch", replace(TINY, tp=2), CPU)


@pytest.mark.slow
def test_two_ranks_train_by_the_command_line():
    words = ["--preset", "tiny", "--tp", "2", "--variant", "graph_layer", "--steps", "2"]
    first, second = gloo_ranks.run_script("llama2_lora.train", words, 2)
    assert "2 ranks share each layer" in first and "12 replays" in first and not second, first + second
