"""Tests of the contract of every model: each folder with a train.py, each variant, trained by hand on the CPU."""

import ast
import contextlib
import functools
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from graph_worth.config import flag_of, needs
from graph_worth.harness import script
from graph_worth.made_variant import Unsupported
from graph_worth.measuring import kernel_trace
from tests.helpers import contracts, forked
from tests.helpers.once import once

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted(path.parent.name for path in ROOT.glob("*/train.py"))
# Of a model outside of the suite, sections beside "data" and gradient norms are optional.
SUITE = ("gpt3", "llama2_lora", "llama31", "moe", "rnnt", "stable_diffusion")
LOOP = """if __name__ == '__main__':
    with session(args, build) as (run, log):
        for index in log.steps():
            run.step(index)"""
# As on a machine without a GPU, whatever this one has.
CPU_ONLY = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Of eager, which has to show that it learns; of what is compared with it, in its first steps; of CHEAPER's models.
EAGER_STEPS, NUM_STEPS, FEW_STEPS = 20, 6, 3
# Flags that make tiny's steps cheaper. What learns too slowly then shows it in a test of its own:
# tests/stable_diffusion/test_train.py::test_training_lowers_the_loss.
CHEAPER = {"stable_diffusion": ("--batch", "2", "--latent-size", "8", "--workers", "0")}


def train(model, *arguments, python=()):
    command = [sys.executable, *python, "-m", f"{model}.train", *arguments]
    return subprocess.run(command, cwd=ROOT, env=CPU_ONLY, capture_output=True, text=True, timeout=300)


def fork(model, *arguments):
    return forked.run(f"{model}.train", arguments, CPU_ONLY, timeout_s=300)


def describe(model):
    """Return the script's --describe, without variants where it fails; test_describe then shows the failure."""
    try:
        return json.loads(train(model, "--describe").stdout)
    except ValueError:
        return {"variants": {}}


DESCRIBED = {model: describe(model) for model in MODELS}
EACH = [(model, variant) for model in MODELS for variant in DESCRIBED[model]["variants"]]
# Dear, and compared with eager in one process by tests/stable_diffusion/test_train.py and test_lightning_graph.py.
DEAR = ("eager_torch", "graph_networks", "graph_step_lightning")
DEAR = [("stable_diffusion", variant) for variant in DEAR]
PARITY = [pytest.param(*pair, marks=pytest.mark.slow) if pair in DEAR else pair for pair in EACH]
# What looks inside a run is the same code for all variants and models, but for their sections: of each model eager and
# the first graphed one, and one that cannot run here.
GRAPHED = [pair for pair in EACH if DESCRIBED[pair[0]]["kinds"][pair[1]] == "graph" and pair not in DEAR]
FIRST = [next(pair for pair in GRAPHED if pair[0] == model) for model in dict(GRAPHED)]
LOOKED_AT = [
    pytest.param(*pair, marks=pytest.mark.slow) if pair == ("stable_diffusion", "graph_step") else pair
    for pair in EACH
    if pair[1] == "eager" or pair in FIRST or pair == ("gpt3", "compile")
]


@pytest.fixture(scope="module")
def parity_run(tmp_path_factory):
    """parity_run(model, variant, run=fork): (process, path of its result), run when it is first asked for."""

    @functools.cache
    def run(model, variant, run=fork):
        flags = ("--parity", "--steps", str(NUM_STEPS if run is train else num_parity_steps(model, variant)))
        return run_once(tmp_path_factory, f"{model}-{variant}-{run.__name__}", run, model, variant, flags)

    return run


def run_once(tmp_path_factory, name, run, model, variant, flags, file=""):
    """(process, path of its result, or of a file that it writes). flags may name that file, {folder}/file."""

    def make(folder):
        own = [flag.replace("{folder}", str(folder)) for flag in flags]
        fixed = ("--preset", "tiny", "--variant", variant, *CHEAPER.get(model, ()))
        process = run(model, *fixed, *own, "--record", str(folder / "result.json"))
        return {name: getattr(process, name) for name in ("returncode", "stdout", "stderr")}

    folder, said = once(tmp_path_factory, name, make)
    return SimpleNamespace(**said), folder / (file or "result.json")


def num_parity_steps(model, variant):
    if model in CHEAPER:
        return FEW_STEPS
    return EAGER_STEPS if variant == "eager" else NUM_STEPS


@pytest.fixture(scope="module")
def look_inside(tmp_path_factory):
    """look_inside(model, variant, *flags): (process, path of its result, or of the file that the flags ask for)."""

    @functools.cache
    def run(model, variant, *flags):
        name, file = "-".join([model, variant, "look", *flags]), "look.json" if flags else ""
        flags = ("--steps", "2", *flags, *(["{folder}/look.json"] if flags else []))
        return run_once(tmp_path_factory, name, fork, model, variant, flags, file)

    return run


def result_of(path):
    """Return the path of look_inside's result, beside the file that its flag asks for."""
    return path.with_name("result.json")


def read(parity_run, *key):
    """Result of a run that ended well, or said that it cannot run here."""
    process, path = parity_run(*key)
    return result_with_its_exit_status(process, path)


def result_with_its_exit_status(process, path):
    result = json.loads(path.read_text()) if path.exists() else {}
    assert process.returncode == {"pass": 0, "unsupported": 3}.get(result.get("status")), process.stderr
    return result


def test_there_are_models():
    assert MODELS and {model for model, _ in EACH} == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_describe(model):
    answer = train(model, "--describe")
    assert answer.returncode == 0, answer.stderr
    described = json.loads(answer.stdout)
    assert described["model"] == model
    assert {"tiny", "bench"} <= set(described["presets"])
    assert "eager" in described["variants"]
    assert all(isinstance(line, str) and line for line in described["variants"].values())
    swept = [field for fields in described.get("sweeps", {}).values() for field in fields]
    assert all(isinstance(described["presets"]["tiny"][field], int | str) for field in swept)
    assert set(described.get("reference", {}).values()) <= set(described["variants"])
    assert set(described["kinds"]) == set(described["variants"])
    assert set(described["kinds"].values()) <= {"eager", "graph", "compile"} and described["kinds"]["eager"] == "eager"
    presets_need = described.get("presets_need", {})
    assert not presets_need or set(presets_need) == set(described["presets"])
    assert not presets_need or presets_need["tiny"] in (needs(gpus=False), needs(gpus=False, at_most=1))
    for preset, need in presets_need.items():
        assert (need["submitted"] is not None) == preset.startswith("mlperf")
        if need["submitted"]:
            num_ranks = need["submitted"]["nodes"] * need["submitted"]["gpus_per_node"]
            script.require_world_size(described, preset, num_ranks, rank_flags="its nodes and GPUs")
    for each in described["formerly"]:
        said = train(model, "--variant", each)
        new = described["formerly"][each]
        assert (said.returncode, said.stdout) == (2, "")
        assert said.stderr == f"python -m {model}.train: variant {each!r} is now {new!r}\n"


@pytest.mark.parametrize("model", [model for model in MODELS if model in SUITE])
def test_every_preset_has_promises(model):
    for preset in DESCRIBED[model]["presets"]:
        promised = {}
        # Of bench each build has its variants.
        for fields in DESCRIBED[model]["builds"].values() if preset == "bench" else ({},):
            flags = [word for name, value in fields.items() for word in (flag_of(name), str(value))]
            built = contracts.model(model, "--preset", preset, *flags)
            for variant in DESCRIBED[model]["variants"]:
                with contextlib.suppress(Unsupported):
                    promised[variant] = built.promises(variant)
        assert "eager" in promised and (preset != "bench" or set(promised) == set(DESCRIBED[model]["variants"]))
        for variant, promise in promised.items():
            kind, is_none = DESCRIBED[model]["kinds"][variant], promise == (0, 0)
            assert is_none if kind == "eager" else kind == "compile" or not is_none


@pytest.mark.parametrize("model", MODELS)
def test_the_loop_at_the_end_makes_steps_and_nothing_else(model):
    """Blocks of a run make these calls alone."""
    end = ast.parse((ROOT / model / "train.py").read_text()).body[-1]
    assert ast.unparse(end) == LOOP


@pytest.mark.parametrize("model", MODELS)
def test_help_answers_at_once_and_without_torch(model):
    imported = train(model, "--help", python=("-X", "importtime")).stderr
    names = {line.rpartition("|")[2].strip() for line in imported.splitlines() if line.startswith("import time:")}
    assert "argparse" in names
    assert not names & {"torch", "numpy"}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--variant", "nope"), ("--variant", "'nope'", "eager")),
        (("--nope",), ("--nope",)),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_mistake_is_one_line_and_exit_status_two(model, arguments, words):
    answer = train(model, *arguments)
    assert answer.returncode == 2
    assert answer.stdout == "" and len(answer.stderr.splitlines()) == 1
    assert all(word in answer.stderr for word in words)


@pytest.mark.parametrize("model", [name for name in MODELS if name in ("llama2_lora", "llama31")])
def test_fp4_is_refused_in_one_line_where_no_gpu_computes_it(model):
    answer = fork(model, "--preset", "tiny", "--precision", "nvfp4")
    assert (answer.returncode, answer.stderr) == (3, "")
    assert answer.stdout.splitlines()[-1].startswith("unsupported: --precision nvfp4: NVFP4 needs a GPU of compute ")


def test_a_forked_script_starts_processes_as_a_plain_one_does():
    code = "import multiprocessing; print(multiprocessing.get_start_method())"
    said = forked.run("timeit", ["-n1", "-r1", code], CPU_ONLY, timeout_s=60).stdout
    assert said.splitlines()[0] == multiprocessing.get_all_start_methods()[0]


@pytest.mark.slow
def test_the_plain_command_trains_as_a_forked_one_does(parity_run):
    """That two eager runs of a model are equal follows from graphs that equal eager in another process."""
    forked_one, plain = (read(parity_run, MODELS[0], "eager", run) for run in (fork, train))
    assert forked_one["status"] == plain["status"] == "pass", plain["message"]
    assert len(plain["state_hashes"]) == NUM_STEPS
    assert forked_one["state_hashes"][:NUM_STEPS] == plain["state_hashes"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_eager_learns(parity_run, model):
    """A model that does not learn would pass every comparison: all that is hashed moves, and the loss falls."""
    result = read(parity_run, model, "eager")
    assert len(result["unmoved"]) < 0.1 * result["num_tensors"], result["unmoved"]
    losses = result["losses"]
    assert len(losses) == num_parity_steps(model, "eager")
    assert sum(losses[-5:]) < sum(losses[:5]) or model in CHEAPER


@pytest.mark.parametrize("model, variant", PARITY)
def test_tiny_passes_or_says_why_not(parity_run, model, variant):
    process, _ = parity_run(model, variant)
    result = read(parity_run, model, variant)
    assert '{"' not in process.stdout and len(process.stdout) < 4000
    assert (result["model"], result["preset"], result["variant"]) == (model, "tiny", variant)
    assert result["device"] == "cpu"
    assert result["ms"] is None and not result["step_ms"]
    if result["status"] == "unsupported":
        assert result["message"] and not result["state_hashes"]
        return
    assert result["status"] == "pass", result["message"]
    assert result["message"] == ""
    assert len(result["losses"]) == len(result["state_hashes"]) == result["steps"]
    assert len(result["grad_norms"]) == (result["steps"] if model in SUITE else 0)
    assert result["steps"] == num_parity_steps(model, variant)


@pytest.mark.parametrize("model, variant", PARITY)
def test_graphs_replay_as_promised_and_equal_eager_bit_for_bit(parity_run, model, variant):
    result = read(parity_run, model, variant)
    described = DESCRIBED[model]
    assert result["kind"] == described["kinds"][variant]
    if result["status"] == "unsupported":
        pytest.skip(result["message"])
    promises_none = (result["promised_graphs"], result["promised_replays"]) == (0, 0)
    assert promises_none == (result["kind"] == "eager") or result["kind"] == "compile"
    assert result["replays"] == result["expected_replays"]
    if described["kinds"][variant] == "graph":
        assert result["graphs"] > 0
    if result["graphs"] == 0:
        assert result["replays"] == 0
        return
    assert result["replays"] > 0
    # Where shapes decide which numbers are drawn, what is padded is compared with what is padded.
    eager = read(parity_run, model, described.get("reference", {}).get(variant, "eager"))
    assert result["num_tensors"] == eager["num_tensors"]
    if variant not in described["bitwise"]:
        losses = eager["losses"][: result["steps"]]
        assert result["losses"] == pytest.approx(losses, rel=described["tolerance"][variant])
        return
    for name in ("state_hashes", "losses", "grad_norms"):
        assert result[name] == eager[name][: result["steps"]], name


@pytest.mark.parametrize("model", MODELS)
def test_some_variant_graphs(parity_run, model):
    """On any machine, so that the capture is tested where there is no GPU."""
    variants = [variant for name, variant in EACH if name == model and (name, variant) not in DEAR]
    assert any(read(parity_run, model, variant)["graphs"] for variant in variants)


@pytest.mark.parametrize("model, variant", LOOKED_AT)
def test_a_run_trains_as_eager_does(look_inside, model, variant):
    process, path = look_inside(model, variant)
    result = result_with_its_exit_status(process, path)
    if result["status"] == "unsupported":
        assert process.stdout.splitlines()[-1] == f"unsupported: {result['message']}"
        return
    assert result["status"] == "pass", result["message"]
    assert result["steps"] == len(result["step_ms"]) == len(result["losses"]) == 2
    assert result["ms"] > 0 and result["items_per_s"] > 0 and result["reserved_bytes"] > 0
    assert process.stdout.splitlines()[-1].endswith(f"make bench MODEL={model} measures what a graph is worth")
    if variant not in DESCRIBED[model].get("reference", {}):
        eager = json.loads(look_inside(model, "eager")[1].read_text())
        assert result["losses"] == pytest.approx(eager["losses"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model, variant", LOOKED_AT)
def test_profile_has_the_sections_of_the_step(look_inside, model, variant):
    process, path = look_inside(model, variant, "--profile")
    result = result_with_its_exit_status(process, result_of(path))
    assert result["ms"] is None and not result["step_ms"]
    if result["status"] == "unsupported":
        assert not path.exists()
        return
    assert result["status"] == "pass", result["message"]
    sections = kernel_trace.sections(json.loads(path.read_text()))
    if set(sections) != {"data"} or model in SUITE:
        # A graph of the whole iteration is one section, whatever is in it.
        assert {"data", "replay" if "replay" in sections else "optimizer"} <= set(sections) and len(sections) >= 3
    assert all(ms > 0 for ms in sections.values())
