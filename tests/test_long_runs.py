"""Five hundred steps of each model by its script: graphs equal eager in each, and so does a run that resumes.

Learning rates change, gradients overflow, numbers of microbatches change, and the state of the middle step goes back
into the tensors that live graphs read (tests/helpers/long_run.py).
"""

import json
import os

import pytest

from tests.helpers import forked

CPU_ONLY = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Model -> its reference, graphs, and flags beside those of tiny: a schedule and a ramp where it has them.
RUNS = {
    "gpt3": ("eager", ("graph_layer",), ()),
    "llama2_lora": ("eager", ("graph_layer",), ()),
    "llama31": ("eager", ("graph_attn", "graph_microbatch"), ("--ramp", "1,3,2", "--validate-every", "7")),
    "moe": ("eager", ("graph_layer", "graph_step"), ()),
    "rnnt": ("eager_padded", ("graph_step",), ("--lr-warmup", "5", "--lr-hold", "9", "--lr-epoch", "4")),
    "stable_diffusion": (
        *("eager", ("graph_step",)),
        ("--batch", "2", "--latent-size", "8", "--workers", "0", "--lr-warmup", "9"),
    ),
}
# In FP16 their loss scale doubles until gradients overflow.
SCALED = ("rnnt", "stable_diffusion")


def trained(folder, model, variant, num_steps, growth_interval):
    """The result of a run that has passed."""
    flags = RUNS[model][2]
    if model in SCALED:
        flags += ("--precision", "fp16", "--growth-interval", growth_interval)
    path = folder / f"{variant}.json"
    words = [model, "--variant", variant, "--steps", str(num_steps), "--parity", *flags]
    answer = forked.run("tests.helpers.long_run", [*words, "--record", str(path)], CPU_ONLY, timeout_s=3600)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return json.loads(path.read_text())


def require_equal_courses(folder, model, graphs, num_steps, growth_interval):
    """Losses, norms and all state after each step, and the steps behind the checkpoint once more."""
    eager = trained(folder, model, RUNS[model][0], num_steps, growth_interval)
    for result in (eager, *(trained(folder, model, name, num_steps, growth_interval) for name in graphs)):
        name = result["variant"]
        assert result["steps"] == len(result["state_hashes"]) == num_steps
        assert result["resumed"] == eager["state_hashes"][num_steps // 2 :], name
        for fact in ("state_hashes", "losses", "grad_norms", "closing"):
            # As text: the norm of a step that overflowed is NaN, which equals NaN there.
            assert json.dumps(result[fact]) == json.dumps(eager[fact]), (name, fact)
    assert (model in SCALED) == bool(eager["closing"].get("num_skipped_steps"))
    return eager


@pytest.mark.slow
@pytest.mark.parametrize("model", RUNS)
def test_twenty_steps_with_a_checkpoint_in_the_middle(model, tmp_path):
    require_equal_courses(tmp_path, model, RUNS[model][1][:1], 20, growth_interval="2")


@pytest.mark.long
@pytest.mark.parametrize("model", RUNS)
def test_five_hundred_steps_with_a_checkpoint_in_the_middle(model, tmp_path):
    losses = require_equal_courses(tmp_path, model, RUNS[model][1], 500, growth_interval="20")["losses"]
    assert sum(losses[-50:]) < sum(losses[:50])
