"""graph_worth/config: flags out of a dataclass, mistakes in one line with exit status 2, --describe without torch."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from graph_worth import config
from graph_worth.contract import Declared


@dataclass(frozen=True, kw_only=True)
class Config:
    layers: int = config.option(2, "transformer layers")
    lr: float = config.option(1e-3, "learning rate, raised by 10 % or less")
    data: str = config.option("", "folder of text")
    precision: str = config.option("bf16", "number format", ("bf16", "fp8"))
    tp: int = config.option(1, "tensor parallel ranks", (1, 2, 4))
    bias: bool = config.option(True, "add a bias")
    weight_decay: float = config.option(0.0, "decay")
    min_steps: int = config.option(50, "steps")

    def __post_init__(self):
        if self.precision == "fp8" and self.layers % 2:
            raise ValueError("--layers must be even with --precision fp8")


PRESETS = {"tiny": Config(), "bench": Config(layers=8, precision="fp8", bias=False)}
VARIANTS = {
    "eager": Declared("eager", "eager", ("toy.train",), "toy/train.py:1", True, "kernels one by one"),
    "graph": Declared("graph", "graph", ("toy.train",), "toy/train.py:2", False, "one graph", "bitwise"),
}


def parse(*argv):
    return config.parse("toy", Config, PRESETS, VARIANTS, list(argv))


def mistake(capsys, *argv):
    """The one line that a wrong command line prints."""
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == "" and err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith("python -m toy.train: ")
    return err


def test_without_flags_the_first_preset_and_variant():
    arguments = parse()
    assert arguments.config == PRESETS["tiny"]
    assert arguments.run == config.RunOptions(preset="tiny", variant="eager")


def test_run_options():
    assert parse("--parity").run == config.RunOptions(preset="tiny", variant="eager", parity=True)
    assert parse("--profile", "new/x.json").run.profile == "new/x.json"
    argv = "--preset bench --variant graph --steps 20 --parity --record out/x.json"
    assert parse(*argv.split()).run == config.RunOptions(
        preset="bench", variant="graph", steps=20, parity=True, record="out/x.json"
    )


def test_given_fields_replace_those_of_the_preset_and_no_others():
    argv = "--preset bench --layers 4 --lr 2e-5 --data x/y --tp 2 --weight-decay 0.1"
    arguments = parse(*argv.split())
    assert arguments.config == Config(
        layers=4, lr=2e-5, data="x/y", precision="fp8", tp=2, bias=False, weight_decay=0.1
    )
    assert PRESETS["bench"] == Config(layers=8, precision="fp8", bias=False)


def test_a_field_may_be_set_to_what_python_calls_false():
    changed = parse("--preset", "bench", "--layers", "0", "--lr", "0", "--data", "", "--bias", "false").config
    assert (changed.layers, changed.lr, changed.data, changed.bias) == (0, 0.0, "", False)
    assert type(changed.layers) is int and type(changed.lr) is float
    assert parse("--bias", "True").config.bias is True


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--preset large", ["preset 'large'", "--preset takes one of tiny, bench"]),
        ("--variant fast", ["variant 'fast'", "--variant takes one of eager, graph"]),
        ("--layers two", ["--layers", "'two' is not of type int"]),
        ("--lr fast", ["--lr", "'fast' is not of type float"]),
        ("--bias maybe", ["--bias", "'maybe' is not true or false"]),
        ("--precision fp4", ["--precision", "'fp4' is not one of bf16, fp8"]),
        ("--tp 3", ["--tp", "'3' is not one of 1, 2, 4"]),
        ("--steps many", ["--steps", "int", "'many'"]),
        ("--steps -1", ["--steps -1: takes a number from 0 up"]),
        ("--speed 3", ["--speed"]),
        ("--precision fp8 --layers 3", ["--layers must be even with --precision fp8"]),
        ("--record .", ["--record .", "a file", "folder"]),
        ("--profile /proc/x/y.json", ["--profile /proc/x/y.json", "cannot write in /proc"]),
        (f"--profile {'x' * 250}.json", ["--profile", "cannot write", "name too long"]),
        (f"--record {'x' * 300}", ["--record x", "cannot write in", "File name too long"]),
        ("--record /dev/null", ["--record /dev/null", "takes the path of a file"]),
        ("--min-steps 1000001", ["--min-steps 1000001", "at most 1,000,000 steps"]),
        ("--profile x.pt", ["--profile x.pt", ".json"]),
        ("--profile x.json --parity", ["--profile", "--parity"]),
    ],
)
def test_a_mistake_is_one_line_that_names_what_is_allowed(capsys, argv, told):
    line = mistake(capsys, *argv.split())
    for part in told:
        assert part in line


def test_an_unknown_flag_is_answered_with_the_known_ones(capsys):
    line = mistake(capsys, "--weight_decay", "0.1", "--layers", "4")
    assert "--weight_decay" in line
    assert "--weight-decay" in line and "--layers" in line and "--variant" in line


def test_mistakes_that_building_shows_are_one_line_too(capsys):
    with pytest.raises(SystemExit) as stop, config.mistakes_in_one_line("python -m toy.train"):
        raise ValueError("--data has no text")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "python -m toy.train: --data has no text\n"
    with pytest.raises(SystemExit) as stop, config.mistakes_in_one_line("python -m toy.train"):
        raise KeyboardInterrupt
    assert stop.value.code == 130 and capsys.readouterr().err == "\npython -m toy.train: stopped\n"
    with pytest.raises(KeyError), config.mistakes_in_one_line("python -m toy.train"):
        raise KeyError("not the user's")


ENDS = """
import time, weakref
from graph_worth.harness.command import exit_status
from graph_worth.config import mistakes_in_one_line

class Slow:
    pass

def end():
    print("ends", flush=True)
    time.sleep(60)

slow = Slow()
weakref.finalize(slow, end)
"""


@pytest.mark.parametrize(
    "program", ["with mistakes_in_one_line('toy'): pass", "raise SystemExit(exit_status('toy', lambda: 0))"]
)
def test_ctrl_c_while_python_ends_prints_nothing(program):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS + program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ends\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300) == ("", "") and process.returncode == -signal.SIGINT


def test_help_names_presets_variants_fields_and_choices(capsys):
    """A help text may hold a percent sign."""
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    for part in ("one of tiny, bench", "one of eager, graph", "--weight-decay FLOAT", "10 % or less", "(1, 2, 4)"):
        assert part in text


@pytest.mark.parametrize("preset", ["tiny", "bench"])
def test_help_tells_every_value_of_the_preset_and_the_exit_statuses(capsys, preset):
    with pytest.raises(SystemExit):
        parse(*(["--preset", preset] if preset == "bench" else []), "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert f"with the values of preset {preset}:" in text and "[tiny]" in text and "[eager]" in text
    for name, value in vars(PRESETS[preset]).items():
        said = text.rpartition(f" {config.flag_of(name)} ")[2].partition(" --")[0]
        assert value == "" or f"[{str(value).lower() if isinstance(value, bool) else value}]" in said, name
    assert "exit status: 0 pass, 3 unsupported, 4 oom, 1 failed, 2 mistake" in text


def test_describe_is_one_line_of_json(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--describe")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    description = json.loads(out)
    about = [
        "kinds",
        "bitwise",
        "tolerance",
        "reference",
        "traits",
        "headline",
        "formerly",
        "builds",
        "apart",
        "variant_builds",
    ]
    assert set(description) == {"model", "presets", "variants", *about}
    assert description["kinds"] == {"eager": "eager", "graph": "graph"} and description["bitwise"] == ["graph"]
    assert description["model"] == "toy"
    assert description["variants"] == {"eager": "kernels one by one", "graph": "one graph"}
    assert list(description["presets"]) == ["tiny", "bench"], "the first one is the default"
    assert description["presets"]["bench"] == vars(PRESETS["bench"])


def test_describe_checks_the_flags_beside_it(capsys):
    """The harness describes with the flags of a session, so that a mistake costs no record."""
    assert "--layers must be even" in mistake(capsys, "--describe", "--precision", "fp8", "--layers", "3")
