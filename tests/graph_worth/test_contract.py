"""contract.py, script/session.py: mistakes of a script in one line, promises that depend on the config."""

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from examples.minimal import train as minimal
from graph_worth import Pool
from graph_worth.measuring import torch_settings
from llama2_lora import train as llama2_lora
from llama31 import train as llama31
from moe import train as moe

ROOT = Path(__file__).resolve().parents[2]
MINIMAL = (ROOT / "examples" / "minimal" / "train.py").read_text().replace("examples.minimal", "mine")
GRAPH = '@variant("graph_step", kind="graph", help="the whole step in one graph", graphs=1, '
PARITY = 'graphs=1, parity="bitwise"'
STEP = "            run.step(index)\n"


@pytest.fixture
def train(tmp_path):
    """train(*arguments, changes): run the smallest model's script with some of its text replaced."""

    def run(*arguments, **changes):
        text = MINIMAL
        for old, new in changes.get("replaced", ()):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "train.py").write_text(text)
        for name, content in changes.get("files", {}).items():
            (tmp_path / "mine" / name).write_text(content)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "mine.train", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.slow
def test_a_script_outside_of_the_repository_trains_by_its_own_loop(train):
    noted = [(STEP, '            print("step", index)\n' + STEP)]
    done = train("--variant", "graph_step", "--steps", "3", replaced=noted)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("step ") and "ms" not in line] == ["step 0", "step 1", "step 2"]
    assert any(line.split()[:3] == ["graphs", "1", "3"] for line in lines)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            GRAPH,
            GRAPH.replace("graph_step", "eager"),
            "variant 'eager' is declared at mine/train.py:84",
        ),
        (GRAPH, GRAPH.replace('kind="graph"', 'kind="fast"'), "kind 'fast' is not one of eager, graph, compile"),
        (GRAPH, GRAPH + 'reference="none", ', "reference 'none' of graph_step is no variant"),
        (GRAPH, GRAPH + 'reference="graph_step", ', "reference 'graph_step' of graph_step is no step function"),
        ('"eager", kind', '"plain", kind', "no step is declared as @variant('eager', kind='eager')"),
        (GRAPH, GRAPH + "formerly=str(1), ", "of a variant are literals"),
        *(
            (PARITY, f"graphs=1, parity={text}", said)
            for text, said in {
                'float("nan")': "of a variant are literals",
                "1e999": "parity inf is not 'bitwise', None, or a float",
                "-1e-3": "parity -0.001 is not",
                "1.0": "parity 1.0 is not",
                "0": "parity 0 is not",
                '"near"': "parity 'near' is not",
            }.items()
        ),
        *(
            (GRAPH, f"{GRAPH}apart={text}, ", said)
            for text, said in {
                '""': "apart '' is no word of a to z, 0 to 9 and _",
                '"a+b"': "apart 'a+b' is no word",
                '"a" * 41': "of a variant are literals",
                f'"{"a" * 41}"': f"apart '{'a' * 41}' is no word",
                "1": "apart 1 is no word",
                "None": "apart None is no word",
            }.items()
        ),
        ('"eager", kind="eager"', '"eager", apart="alone", kind="eager"', "apart 'alone' of an eager variant"),
        (GRAPH, GRAPH + "**{}, ", "the keywords of a variant stand in its decorator, without **"),
        (
            'parse("mine", Config, presets)',
            'parse("mine", Config, presets, files=["more"])',
            "there is no mine/more.py",
        ),
    ],
)
def test_mistakes_of_a_declaration_are_one_line_before_torch_is_imported(train, old, new, message):
    done = train("--help", replaced=[(old, new)])
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("python -m mine.train: ") and message in done.stderr


def test_variants_stand_apart_by_a_name_that_no_build_has(train):
    builds = ('parse("mine", Config, presets)', 'parse("mine", Config, presets, builds={"large": {"width": 512}})')
    done = train("--help", replaced=[(GRAPH, GRAPH + 'apart="large", '), builds])
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "apart 'large' is the name of a build" in done.stderr
    done = train("--describe", replaced=[(GRAPH, GRAPH + 'apart="alone", '), builds])
    assert json.loads(done.stdout)["apart"] == {"graph_step": "alone"}


@pytest.mark.slow
def test_a_build_that_returns_something_else_is_one_line(train):
    done = train("--steps", "2", replaced=[("    return Training(state=state,", "    return dict(state=state,")])
    assert done.returncode == 2
    assert done.stderr == "python -m mine.train: build returned a dict, not a graph_worth.contract.Training\n"


@pytest.mark.slow
def test_a_mistake_that_build_finds_is_one_line(train):
    refuses = "    if config.width % 4:\n        raise ValueError(f'--width {config.width}: takes a multiple of 4')\n"
    done = train(
        "--width",
        "6",
        replaced=[("    state = State(config, device)\n", refuses + "    state = State(config, device)\n")],
    )
    assert done.returncode == 2 and done.stderr == "python -m mine.train: --width 6: takes a multiple of 4\n"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--steps", "5"), ("--parity",)])
def test_a_loop_that_ends_early_fails(train, flags):
    done = train(*flags, replaced=[(STEP, STEP + "            if index == 2:\n                break\n")])
    assert done.returncode == 1
    assert "failed: the loop in mine/train.py made 3 of " in done.stdout


@pytest.mark.slow
def test_a_loop_that_leaves_a_step_out_fails(train):
    done = train("--steps", "5", replaced=[(STEP, "            if index != 2:\n    " + STEP)])
    assert done.returncode == 1 and "failed: the loop in mine/train.py made 4 of 5 steps" in done.stdout


@pytest.mark.slow
def test_two_codes_of_one_name_are_told_apart_by_the_config(train):
    both = (
        '@variant("graph_step", kind="graph", graphs=lambda c: c.batch, replays=1, when=lambda c: c.batch == 1)\n'
        'def other(state, capture):\n    """never captured"""\n    raise ValueError("the other code")\n\n\n'
    )
    narrow = [(GRAPH, both + GRAPH + "when=lambda c: c.batch != 1, ")]
    assert train("--variant", "graph_step", "--steps", "2", replaced=narrow).returncode == 0
    done = train("--variant", "graph_step", "--steps", "2", "--batch", "1", replaced=narrow)
    assert done.returncode == 1 and "failed: the other code" in done.stdout
    unknown = [(GRAPH, GRAPH + "when=lambda c: c.batch == 1, ")]
    done = train("--variant", "graph_step", "--steps", "2", replaced=unknown)
    assert done.returncode == 3 and "unsupported: graph_step has no code for these settings" in done.stdout


@pytest.mark.slow
def test_a_graph_that_was_promised_and_not_made_fails(train):
    done = train("--variant", "graph_step", "--steps", "2", replaced=[(GRAPH, GRAPH.replace("graphs=1", "graphs=2"))])
    assert done.returncode == 1 and "failed: 1 graphs made, 2 promised" in done.stdout


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("script, form, make", [
    (minimal, minimal, partial(minimal.State, minimal.Config())),
    (moe, moe, partial(moe.State, moe.PRESETS["tiny"])),
    (moe, moe.GraphedLayer, partial(moe.State, replace(moe.PRESETS["tiny"], microbatches=1))),
    (llama31, llama31, partial(llama31.State, replace(llama31.PRESETS["tiny"], layer="torch"))),
    (llama2_lora, llama2_lora, partial(llama2_lora.State, llama2_lora.PRESETS["tiny"], kind="handwritten")),
], ids=["minimal", "moe", "moe_layer", "llama31", "llama2_lora"])  # fmt: skip
def test_a_plain_torch_form_trains_as_eager(script, form, make, device, monkeypatch):
    """The lines of a docstring as they stand; on a CPU host graphs stand in."""
    if device == "cpu" and script is minimal:
        pytest.skip("a host graph's capture trains a step, which minimal's form does not undo")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic kernels ask for it
    plain, losses = [part for part in form.__doc__.split("\n\n") if "torch.cuda.set_stream" in part], []
    assert len(plain) == (2 if form is llama2_lora else 1)
    names = vars(script) | {"pool": Pool(torch.device(device)), "num_steps": 8}
    for code in map(textwrap.dedent, ("for index in range(num_steps): eager_step(state, index)", *plain)):
        if device == "cpu":
            recorded = r"\1def recorded():\n\1    global x, hidden, grad\n\3\n\1\2, _ = pool.capture(recorded)\n"
            code = code.replace("torch.cuda.CUDAGraph()", "None")
            code = re.sub(r"( *)with torch\.cuda\.graph\((\S+), .*\n(.*)\n", recorded, code)
            code = re.sub(r"(torch\.cuda\.|shared).*", "", code)
        torch.manual_seed(0)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream), torch_settings.deterministic_kernels():
            state = make(device=torch.device(device))
            if stream:
                stream.synchronize()  # the code sets another stream
            exec(code, names | {"state": state})
            losses.append([float(state.losses[index]) for index in range(8)])
    eager, *graphed = losses
    assert all(form == pytest.approx(eager, rel=1e-3) for form in graphed) and eager[-1] < 0.95 * eager[0]
