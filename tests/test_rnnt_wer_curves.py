"""rnnt/wer_curves: words are learned, eager and graphed; decoding in between changes nothing; the command line."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rnnt import features, wer_arguments, wer_curves
from rnnt.config import PRESETS
from rnnt.model import log_prior
from rnnt.speech_folder import REPOSITORY
from rnnt.state import State
from rnnt.train import MAKE_VARIANT
from tests import forked

pytest.importorskip("soundfile")

CPU = torch.device("cpu")
NUM_UTTERANCES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The shortest utterances of the repository's corpus."""
    out = tmp_path_factory.mktemp("speech")
    chosen = sorted(Path(REPOSITORY).rglob("*.flac"), key=lambda path: (path.stat().st_size, path.name))
    names = {path.stem for path in chosen[:NUM_UTTERANCES]}
    for path in chosen[:NUM_UTTERANCES]:
        place = out / path.relative_to(REPOSITORY)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    for path in Path(REPOSITORY).rglob("*.trans.txt"):
        place = out / path.relative_to(REPOSITORY)
        if place.parent.exists():
            lines = path.read_text().splitlines(keepends=True)
            place.write_text("".join(line for line in lines if line.split()[0] in names))
    return out


@pytest.fixture(scope="module")
def config(folder):
    """Six utterances bear a higher rate and a shorter average than sixty."""
    return replace(PRESETS["corpus_tiny"], data=str(folder), lr=0.012, ema=0.95)


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture(autouse=True)
def features_once(monkeypatch, kept):
    """Each utterance's features are computed once with dither and once without: they take longer than the steps."""
    extract = features.extract

    def kept_or_new(audio, scale, noise=None):
        key = len(audio), float(audio.sum()), noise is None
        if key not in kept:
            kept[key] = extract(audio, scale, noise)
        return kept[key]

    monkeypatch.setattr(features, "extract", kept_or_new)


def curve_of(config, name, num_steps, every):
    state = State(config, CPU)
    points = list(wer_curves.train_and_decode(state, name, num_steps, every))
    hashed = {key: tensor.detach().clone() for key, tensor in state.named_state()}
    state.close()
    return points, hashed


@pytest.mark.slow
def test_words_are_learned_eager_and_graphed_in_the_same_steps(config):
    curves = {name: curve_of(config, name, 160, 80)[0] for name in ("eager", "full")}
    for name, points in curves.items():
        first, last = points
        assert (first["step"], last["step"]) == (80, 160)
        assert last["wer"] <= 0.1 < first["wer"], name
        assert last["loss"] < first["loss"]
        assert all(point["wer_graph"] == point["wer"] and point["labels_equal"] for point in points)
        assert last["num_words"] == 18
        assert last["num_replays"] == (160 if name == "full" else 0)


@pytest.mark.parametrize("name", ["eager", pytest.param("full", marks=pytest.mark.slow)])
def test_decoding_in_between_changes_nothing(config, name):
    config = replace(config, buckets="1")
    (often, with_many), (once, with_one) = (curve_of(config, name, 6, every) for every in (2, 6))
    assert [point["step"] for point in often] == [2, 4, 6] and len(once) == 1
    assert with_many.keys() == with_one.keys()
    assert all(torch.equal(with_many[key], with_one[key]) for key in with_many)
    assert often[-1]["wer"] == once[0]["wer"]
    # The mean over the steps since the last point.
    assert sum(point["loss"] for point in often) / 3 == pytest.approx(once[0]["loss"])


def test_a_last_point_where_steps_are_left_over(config):
    points, _ = curve_of(config, "eager", 5, 3)
    assert [point["step"] for point in points] == [3, 5]


def test_the_prior_is_each_class_s_share():
    prior = log_prior([[0, 0, 2], [2]], 5).exp()
    # Counts 2, 0, 2, 0 and one more each; the blank has one half.
    assert prior.tolist() == pytest.approx([3 / 16, 1 / 16, 3 / 16, 1 / 16, 1 / 2])


def test_every_reset_puts_the_prior_into_the_output_bias(config):
    state = State(config, CPU)
    variant = MAKE_VARIANT["eager"](state)
    state.reset()
    first = state.model.joint.linear.bias.detach().clone()
    tokens = [one.tokens for one in state.source.corpus.utterances]
    torch.testing.assert_close(first, log_prior(tokens, config.vocab).to(first.dtype))
    variant.step(0)
    assert not torch.equal(state.model.joint.linear.bias, first)
    state.reset()
    assert torch.equal(state.model.joint.linear.bias, first)
    variant.close()
    state.close()


def test_a_variant_that_is_refused_leaves_the_curves_before_it(config, monkeypatch):
    def points(state, name, num_steps, every):
        if name == "full":
            raise ValueError("--buckets 50: too many pairs")
        yield {"step": 1, "loss": 1.0, "wer": 0.5, "labels_equal": True, "num_skipped_steps": 0}

    monkeypatch.setattr(wer_curves, "train_and_decode", points)
    values = {"variants": ["eager", "full"], "steps": 1, "every": 1}
    curves = wer_curves.curves_of(values, config, torch.device("cpu"), 0, 1)
    assert (curves["eager"]["status"], len(curves["eager"]["points"])) == ("pass", 1)
    assert curves["full"] == {"status": "failed", "message": "--buckets 50: too many pairs", "points": []}


def test_a_curve_reaches_its_target_whole_and_with_both_decoders_alike():
    def curve(wer, labels_equal=True, status="pass"):
        points = [{"step": 1, "wer": 1.0, "labels_equal": True}, {"step": 2, "wer": wer, "labels_equal": labels_equal}]
        return {"status": status, "message": "", "points": points}

    assert wer_curves.reached(curve(0.1), 0.1)
    assert not wer_curves.reached(curve(0.11), 0.1)
    assert not wer_curves.reached(curve(0.0, labels_equal=False), 0.1)
    assert not wer_curves.reached(curve(0.0, status="numerics_failed"), 0.1)
    assert not wer_curves.reached({"status": "unsupported", "message": "", "points": []}, 0.1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--preset", "nope"), "unknown preset 'nope'"),
        (("--variants", "eager,nope"), "unknown variants 'nope', --variants takes one of eager"),
        (("--steps", "5000"), "--steps 5000: takes a number from 1 to 4096"),
        (("--steps", "10", "--every", "11"), "--every 11: takes a number from 1 to --steps, 10"),
        (("--preset", "bench"), "--data synthetic has no words: take --preset corpus"),
        (("--target", "nan"), "--target nan: takes a word error rate from 0 to 1"),
        (("--lr", "7"), "--lr 7.0: takes a number from 0 to 1"),
        (("--record", "x"), "unknown argument '--record'"),
        (("--out", "/proc/x/wer.json"), "--out /proc/x/wer.json: cannot write"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        wer_arguments.parse(arguments)
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("python -m rnnt.wer_curves: ") and message in lines[0]


def test_the_command_writes_its_curves_and_says_what_was_missed(folder, tmp_path):
    path = tmp_path / "new" / "wer.json"
    flags = ["--preset", "corpus_tiny", "--data", str(folder), "--variants", "eager,compile", "--steps", "4"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = forked.run("rnnt.wer_curves", [*flags, "--every", "2", "--out", str(path)], environment, timeout_s=120)
    assert ran.returncode == 1, ran.stderr
    assert "no timing" in ran.stdout and "eager: 10 % wrong or less never, MISSED" in ran.stdout
    written = json.loads(path.read_text())
    assert written["curves"]["compile"]["status"] == "unsupported"
    assert [point["step"] for point in written["curves"]["eager"]["points"]] == [2, 4]
    assert written["config"]["data"] == str(folder) and "no timing" in written["note"]
