"""What every model promises the harness: each folder with a train.py, each of its variants, on the CPU."""

import functools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

from benchmarks import proven, script, trust
from common import record as records
from common import trace
from common.config import needs
from tests import forked

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted(path.parent.name for path in ROOT.glob("*/train.py"))
# As on a machine without a GPU, whatever this one has.
CPU_ONLY = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
# Of eager, which has to show that it learns, and of what is compared with it, in its first steps.
EAGER_STEPS, NUM_STEPS = 20, 6
# Flags that make tiny's steps cheaper. What learns too slowly then shows it in a test of its own, on samples held out:
# test_stable_diffusion_train::test_training_lowers_the_loss_of_samples_held_out.
CHEAPER = {"stable_diffusion": ("--latent-size", "8")}


def train(model, *arguments, python=()):
    command = [sys.executable, *python, "-m", f"{model}.train", *arguments]
    return subprocess.run(command, cwd=ROOT, env=CPU_ONLY, capture_output=True, text=True, timeout=300)


def fork(model, *arguments):
    return forked.run(f"{model}.train", arguments, CPU_ONLY, timeout_s=300)


def describe(model):
    """What the script says of itself; nothing where it fails, which test_describe then shows."""
    try:
        return json.loads(train(model, "--describe").stdout)
    except ValueError:
        return {"variants": {}}


DESCRIBED = {model: describe(model) for model in MODELS}
EACH = [(model, variant) for model in MODELS for variant in DESCRIBED[model]["variants"]]
# Dear, and compared with eager in one process by test_stable_diffusion_train and test_lightning_graph.
DEAR = [("stable_diffusion", variant) for variant in ("eager_torch", "eager_sync", "partial", "lightning_graph")]
PARITY = [pytest.param(*pair, marks=pytest.mark.slow) if pair in DEAR else pair for pair in EACH]
# What looks inside a run is the same code for all variants and models, but for their sections: of each model a plain
# variant and a graphed one, and one that cannot run here.
LOOKED_AT = [pair for pair in EACH if pair[1] in ("eager", "graph") or pair == ("gpt3", "compile")]


@pytest.fixture(scope="module")
def parity_run(tmp_path_factory):
    """parity_run(model, variant, repetition=0): (process, path of the record), run when it is first asked for."""
    folder = tmp_path_factory.mktemp("contract")

    @functools.cache
    def run(model, variant, repetition):
        path = folder / model / f"{variant}.{repetition}.json"
        flags = ("--preset", "tiny", "--variant", variant, *CHEAPER.get(model, ()), "--parity", "--parity-steps")
        flags += (str(num_parity_steps(model, variant, repetition)),)
        # One run is the plain command; equal to a forked one, it vouches for those.
        is_plain = (model, repetition) == ("gpt3", 1)
        return (train if is_plain else fork)(model, *flags, "--record", str(path)), path

    return lambda model, variant, repetition=0: run(model, variant, repetition)


def num_parity_steps(model, variant, repetition=0):
    is_long = (variant, repetition) == ("eager", 0) and model not in CHEAPER
    return EAGER_STEPS if is_long else NUM_STEPS


@pytest.fixture(scope="module")
def look_inside(tmp_path_factory):
    """look_inside(model, variant, "--mllog" or "--profile"): (process, path of what the flag asks for)."""
    folder = tmp_path_factory.mktemp("looks")
    # A warm-up and a window of a few steps, in the words that every Config has.
    short = ("--min-steps", "4", "--min-window-s", "0", "--warmup-min-s", "0", "--warmup-max-s", "0")

    @functools.cache
    def run(model, variant, flag):
        path = folder / model / f"{variant}{flag}.json"
        flags = ("--preset", "tiny", "--variant", variant, *CHEAPER.get(model, ()), *short)
        return fork(model, *flags, flag, str(path)), path

    return run


def read(parity_run, *key):
    """Record and sidecar (None without one) of a run that ended well."""
    process, path = parity_run(*key)
    assert process.returncode == 0, process.stderr
    sidecar = path.with_suffix(".parity.npz")
    if not sidecar.exists():
        return records.read(path), None
    with numpy.load(sidecar) as arrays:
        return records.read(path), {name: arrays[name] for name in arrays.files}


def test_there_are_models():
    assert "gpt3" in MODELS
    assert {model for model, _ in EACH} == set(MODELS)


@pytest.mark.parametrize("model", MODELS)
def test_describe(model):
    answer = train(model, "--describe")
    assert answer.returncode == 0, answer.stderr
    described = json.loads(answer.stdout)
    assert described["model"] == model
    assert {"tiny", "bench"} <= set(described["presets"])
    assert "eager" in described["variants"]
    assert all(isinstance(line, str) and line for line in described["variants"].values())
    fields = {"--" + name.replace("_", "-") for name in described["presets"]["tiny"]}
    assert fields == {flag["flag"] for flag in described["flags"]}
    swept = [field for fields in described.get("sweeps", {}).values() for field in fields]
    assert all(isinstance(described["presets"]["tiny"][field], int | str) for field in swept)
    assert set(described.get("reference", {}).values()) <= set(described["variants"])
    assert set(described["kinds"]) == set(described["variants"])
    assert set(described["kinds"].values()) <= {"eager", "graph", "compile"} and described["kinds"]["eager"] == "eager"
    assert set(described["presets_need"]) == set(described["presets"]) == set(described["promised"])
    assert described["presets_need"]["tiny"] == needs(gpus=False)
    assert described["presets_need"]["bench"] == needs(gpus=True)
    for preset, need in described["presets_need"].items():
        assert (need["submitted"] is not None) == preset.startswith("mlperf")
        if need["submitted"]:
            num_ranks = need["submitted"]["nodes"] * need["submitted"]["gpus_per_node"]
            script.require_world_size(described, preset, num_ranks, asked="its nodes and GPUs")
    for promised in described["promised"].values():
        assert set(promised) == set(described["variants"])
        for variant, promise in promised.items():
            none = promise == {"graphs": 0, "replays_per_step": 0}
            assert (
                none if described["kinds"][variant] == "eager" else described["kinds"][variant] == "compile" or not none
            )


@pytest.mark.parametrize("flag", ["--describe", "--help"])
@pytest.mark.parametrize("model", MODELS)
def test_answers_at_once_and_without_torch(model, flag):
    imported = train(model, flag, python=("-X", "importtime")).stderr
    names = {line.rpartition("|")[2].strip() for line in imported.splitlines() if line.startswith("import time:")}
    assert "argparse" in names
    assert not names & {"torch", "numpy"}
    assert any(answers_within(0.5, model, flag) for _ in range(3))


def answers_within(limit_s, model, flag):
    start = time.perf_counter()
    train(model, flag)
    return time.perf_counter() - start < limit_s


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--variant", "nope"), ("--variant", "'nope'", "eager")),
        (("--preset", "nope"), ("--preset", "'nope'", "tiny")),
        (("--steps", "many"), ("--steps", "'many'", "int")),
        (("--nope",), ("--nope",)),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_mistake_is_one_line_and_exit_status_two(model, arguments, words):
    answer = train(model, *arguments)
    assert answer.returncode == 2
    assert answer.stdout == "" and len(answer.stderr.splitlines()) == 1
    assert all(word in answer.stderr for word in words)


def test_a_forked_script_starts_processes_as_a_plain_one_does():
    code = "import multiprocessing; print(multiprocessing.get_start_method())"
    said = forked.run("timeit", ["-n1", "-r1", code], CPU_ONLY, timeout_s=60).stdout
    assert said.splitlines()[0] == multiprocessing.get_all_start_methods()[0]


@pytest.mark.parametrize("model", MODELS)
def test_two_eager_runs_are_equal(parity_run, model):
    (first, arrays), (second, again) = (read(parity_run, model, "eager", repetition) for repetition in (0, 1))
    assert first["status"] == second["status"] == "pass", first["message"]
    assert len(again["hashes"]) == NUM_STEPS
    assert (arrays["hashes"][:NUM_STEPS] == again["hashes"]).all()


@pytest.mark.parametrize("model", MODELS)
def test_eager_learns(parity_run, model):
    """A model that does not learn would pass every comparison: all that is hashed moves, and the loss falls."""
    record, arrays = read(parity_run, model, "eager")
    moved = (arrays["hashes"] != arrays["hashes"][:1]).any(0)
    assert moved.mean() > 0.9, arrays["names"][~moved]
    losses = record["numerics"]["loss"]
    assert len(losses) == num_parity_steps(model, "eager")
    assert sum(losses[-5:]) < sum(losses[:5]) or model in CHEAPER


@pytest.mark.parametrize("model, variant", PARITY)
def test_tiny_passes_or_says_why_not(parity_run, model, variant):
    process, _ = parity_run(model, variant)
    record, arrays = read(parity_run, model, variant)
    assert json.loads(process.stdout.splitlines()[-1]) == record
    assert (record["model"], record["preset"], record["variant"]) == (model, "tiny", variant)
    assert record["device"] == "cpu"
    assert record["statistic_ms"] is None and not record["steps"]["gpu_ms"]
    if record["status"] == "unsupported":
        assert record["message"] and arrays is None
        return
    assert record["status"] == "pass", record["message"]
    assert record["message"] == ""
    num_steps = num_parity_steps(model, variant)
    assert len(record["numerics"]["loss"]) == len(record["numerics"]["grad_norm"]) == len(arrays["hashes"]) == num_steps
    assert record["flops_per_step"] > 0 and record["flops_convention"] and record["items_per_step"] > 0


@pytest.mark.parametrize("model, variant", PARITY)
def test_graphs_replay_as_promised_and_equal_eager_bit_for_bit(parity_run, model, variant):
    record, arrays = read(parity_run, model, variant)
    capture = record["capture"]
    assert capture["num_replays"] == capture["expected_replays"]
    described = DESCRIBED[model]
    assert record["promised"] == described["promised"]["tiny"][variant]
    assert record["extra"]["kind"] == described["kinds"][variant]
    if record["status"] == "unsupported":
        pytest.skip(record["message"])
    if described["kinds"][variant] == "graph":
        assert capture["num_graphs"] > 0
    if capture["num_graphs"] == 0:
        assert capture["num_replays"] == 0
        return
    assert capture["num_replays"] > 0
    # Where shapes decide which numbers are drawn, what is padded is compared with what is padded.
    eager, reference = read(parity_run, model, described.get("reference", {}).get(variant, "eager"))
    assert arrays["names"].tolist() == reference["names"].tolist()
    differ = numpy.argwhere(arrays["hashes"] != reference["hashes"][:NUM_STEPS])
    assert not len(differ), f"first at step {differ[0][0]}: {arrays['names'][differ[0][1]]}"
    for name in ("loss", "grad_norm"):
        assert record["numerics"][name] == eager["numerics"][name][:NUM_STEPS], name


@pytest.mark.parametrize("model", MODELS)
def test_some_variant_graphs(parity_run, model):
    """On any machine, so that the capture is tested where there is no GPU."""
    variants = [variant for name, variant in EACH if name == model and (name, variant) not in DEAR]
    assert any(read(parity_run, model, variant)[0]["capture"]["num_graphs"] for variant in variants)


@pytest.mark.parametrize("model, variant", LOOKED_AT)
def test_log_passes_the_official_checker_by_our_rules(look_inside, model, variant):
    mlp_compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    process, path = look_inside(model, variant, "--mllog")
    assert process.returncode == 0, process.stderr
    checker = mlp_compliance.make_checker("training", "5.1.0", quiet=False, werror=False)
    passes = mlp_compliance.main(str(path), str(ROOT / "common" / "mllog_rules.yaml"), checker)[0]
    status = json.loads(process.stdout.splitlines()[-1])["status"]
    assert passes == (status == "pass"), f"{checker.overwritable} {checker.not_overwritable}"
    last = json.loads(path.read_text().splitlines()[-1].removeprefix(":::MLLOG "))
    assert last["key"] == "run_stop"
    assert last["metadata"]["status"] == ("success" if status == "pass" else "aborted")


@pytest.mark.parametrize("model, variant", LOOKED_AT)
def test_a_timed_run_proves_its_work(look_inside, model, variant):
    process, _ = look_inside(model, variant, "--mllog")
    record = json.loads(process.stdout.splitlines()[-1])
    assert records.check(record) is None and trust.contradiction(record) is None
    if record["status"] == "unsupported":
        return
    given, num_steps = record["proof"], len(record["steps"]["gpu_ms"])
    assert given["steps"] == list(range(num_steps)) and given["state_step"] == num_steps - 1
    assert given["loss"] == record["numerics"]["loss"] and None not in given["grad_norm"][1:]
    assert sum(tensor["start"] != tensor["after"] for tensor in given["state_sample"]) > 0.7 * len(
        given["state_sample"]
    )
    assert given["late_change"] is False and given["growth_bytes"] is not None
    eager = json.loads(look_inside(model, "eager", "--mllog")[0].stdout.splitlines()[-1])
    if variant not in DESCRIBED[model].get("reference", {}):
        assert proven.wrong_numbers(record, [eager]) is None


@pytest.mark.parametrize("model, variant", LOOKED_AT)
def test_profile_has_the_sections_of_the_step(look_inside, model, variant):
    process, path = look_inside(model, variant, "--profile")
    assert process.returncode == 0, process.stderr
    record = json.loads(process.stdout.splitlines()[-1])
    assert record["statistic_ms"] is None and not record["steps"]["gpu_ms"]
    if record["status"] == "unsupported":
        assert not path.exists()
        return
    assert record["status"] == "pass", record["message"]
    sections = trace.sections(json.loads(path.read_text()))
    # A graph of the whole iteration is one section, whatever is in it.
    assert {"data", "replay" if "replay" in sections else "optimizer"} <= set(sections) and len(sections) >= 3
    assert all(ms > 0 for ms in sections.values())
