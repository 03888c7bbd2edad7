"""graph_worth/harness/ask: the builds that a command line measures, and the variants in each."""

import pytest

from graph_worth.harness import ask, run
from graph_worth.harness.processes import launch

GPU = {"names": ["NVIDIA H100 80GB HBM3"]}
TORCH = ["--layer", "torch", "--precision=bf16", "--weights", "bf16"]


def builds(*argv, model="llama31"):
    """{name of a build: its variants without the control}, of a model on one GPU."""
    asked = ask.ask_of(run.parse(["--model", model, *argv]), model, launch.describe_here() | {"gpus": GPU})
    return {build.name: [name for name in build.variants if name != ask.CONTROL] for build in asked.builds}


@pytest.mark.parametrize(
    "argv",
    [
        ("--preset", "slice_70b", "--variants", "graph_step,compile"),
        ("--preset", "bench", "--variants", "graph_step,compile", "--", *TORCH),
    ],
    ids=["preset", "flags"],
)
def test_a_build_that_changes_nothing_is_measured_with_the_preset(argv):
    assert builds(*argv) == {"": ["eager", "graph_step"], "+compiled": ["eager", "compile"]}


def test_a_build_that_changes_the_preset_has_an_eager_of_its_own():
    argv = ("--preset", "bench", "--variants", "graph_fwd_bwd,compile")
    assert builds(*argv) == {
        "": ["eager", "graph_fwd_bwd"],
        "validate": ["eager", "graph_fwd_bwd"],
        "torch_bf16+compiled": ["eager", "compile"],
    }
    # Some of its flags alone leave it out: it would undo them.
    assert builds(*argv, "--", *TORCH[:2]).keys() == {"", "validate"}


@pytest.mark.parametrize(
    ("model", "graph", "argv"),
    [
        ("llama31", "graph_step", ("--preset", "slice_70b", "--", *TORCH)),
        ("gpt3", "graph_layer", ("--preset", "bench", "--", *TORCH[:3])),
        ("llama2_lora", "graph_step", ("--preset", "slice", "--", *TORCH[:3])),
    ],
)
def test_compiled_code_shares_no_worker_with_other_graphs(model, graph, argv):
    names = ["eager", graph, "compile", "reduce_overhead", "graph_parameterized"]
    assert builds("--variants", ",".join(names), *argv, model=model) == {
        "": ["eager", graph],
        "+compiled": ["eager", "compile"],
        "+reduce_overhead": ["eager", "reduce_overhead"],
        "+parameterized": ["eager", "graph_parameterized"],
    }
    assert builds("--variants", "eager,reduce_overhead", *argv, model=model) == {
        "+reduce_overhead": ["eager", "reduce_overhead"]
    }


def test_another_eager_keeps_the_build_of_variants_that_stand_together():
    argv = ("--preset", "tiny", "--variants", "eager_twin,graph_alone")
    assert builds(*argv, model="tests.lying_model") == {
        "": ["eager", "eager_twin"],
        "+alone": ["eager", "graph_alone"],
    }


@pytest.mark.parametrize(("gpus", "given", "threads"), [({}, None, "1"), ({}, "4", "4"), (GPU, None, None)])
def test_a_worker_without_a_gpu_has_one_thread_unless_the_user_says_more(gpus, given, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    args = run.parse(["--model", "rnnt", "--preset", "tiny"])
    (build,) = ask.ask_of(args, "rnnt", launch.describe_here() | {"gpus": gpus}).builds
    assert build.environment.get("OMP_NUM_THREADS") == threads
