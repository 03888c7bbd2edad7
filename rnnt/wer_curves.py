"""The word error rate of speech while a variant trains on it: what graphs must not change.

    python -m rnnt.wer_curves --out runs/wer.json                             eager and full on the repository's corpus
    python -m rnnt.wer_curves --preset corpus_tiny --variants eager,graph     any machine, minutes
    python -m rnnt.wer_curves --data DIR --steps 4000 --every 500             speech in LibriSpeech's layout

Each variant is trained from the same seeded start for --steps steps. Every --every steps all utterances are decoded,
greedily, unchanged, with the averaged weights, by the eager and the graphed decoder. Training then goes on as if
nothing had been: weights, data and random numbers are those of a run without it.

Nothing here is a timing: decoding stands between the steps. `rnnt.train` measures the same steps.

Exit status: 0 when each variant ends with --target or less and both decoders always agreed, 1 when not, 2 for a mistake
on the command line.
"""

from common.config import mistakes_in_one_line
from rnnt import config as rnnt_config
from rnnt.wer_arguments import parse

if __name__ == "__main__":
    # Before torch is imported: --help and mistakes are answered at once.
    values, config = parse()

import json
import statistics
import sys
from pathlib import Path

import pandas
import torch

from common import collectives, environment, host_state, measure
from common.variant import CaptureError, Unsupported
from rnnt.evaluation import SpeechEvaluator
from rnnt.state import State
from rnnt.train import MAKE_VARIANT

STATUS = {Unsupported: "unsupported", CaptureError: "capture_failed", FloatingPointError: "numerics_failed"}
NO_TIMING = "no timing: decoding stands between the steps"


def train_and_decode(state: State, name: str, num_steps: int, every: int):
    """Train variant `name` from the seeded start; yields a point after every `every` steps and after the last one.

    A point has step (how many are done), loss (mean of the steps since the last point, nats an utterance), wer and
    wer_graph (of both decoders, errors over words), labels_equal, num_words, num_skipped_steps and num_replays.
    """
    variant = MAKE_VARIANT[name](state)
    try:
        evaluator = SpeechEvaluator(state)
        state.reset()
        replays_before, seen = variant.capture.num_replays, 0
        for index in range(num_steps):
            variant.step(index)
            done = index + 1
            if done % every and done < num_steps:
                continue
            losses = state.read_losses(done)[seen:]
            found = evaluator.word_error_rate()
            yield {
                "step": done,
                "loss": statistics.fmean(losses),
                "wer": found["eager"],
                "wer_graph": found["graph"],
                "labels_equal": found["labels_equal"],
                "num_words": found["num_words"],
                "num_skipped_steps": int(state.scaler.num_skipped),
                "num_replays": variant.capture.num_replays - replays_before,
            }
            seen = done
        evaluator.close()
    finally:
        variant.close()


def curves_of(values, config, device, rank, world_size):
    """variant -> {"status", "message", "points"}; a line for each point as it comes."""
    curves = {}
    for name in values["variants"]:
        curve = curves[name] = {"status": "pass", "message": "", "points": []}
        state = State(config, device, rank, world_size)
        try:
            for point in train_and_decode(state, name, values["steps"], values["every"]):
                curve["points"].append(point)
                if rank == 0:
                    print(_line(name, point), flush=True)
        except (*STATUS, ValueError, RuntimeError) as error:
            # The curves before it stand.
            curve.update(status=STATUS.get(type(error), "failed"), message=str(error)[:300])
        if rank == 0 and curve["message"]:
            print(f"{name}: {curve['status']}: {curve['message']}", flush=True)
        state.close()
    return curves


def _line(name, point):
    equal = "" if point["labels_equal"] else "  graphed decoder DIFFERS"
    skipped = f"  {point['num_skipped_steps']} skipped" if point["num_skipped_steps"] else ""
    numbers = f"step {point['step']:5d}  loss {point['loss']:8.3f}  wrong {100 * point['wer']:6.2f} %"
    return f"{name:12s} {numbers}{skipped}{equal}"


def reached(curve: dict, target: float) -> bool:
    """Whether a curve is whole, ends with `target` or less, and both decoders agreed at each point."""
    points = curve["points"]
    whole = curve["status"] == "pass" and points
    return bool(whole and points[-1]["wer"] <= target and all(point["labels_equal"] for point in points))


def _table(curves, target):
    """A row for each point's step, a column for each variant; then a line for each on whether it got there."""
    points = {name: {point["step"]: point["wer"] for point in curve["points"]} for name, curve in curves.items()}
    frame = pandas.DataFrame(points).sort_index().mul(100).rename_axis("step")
    lines = [frame.to_string(float_format="{:.2f} %".format, na_rep="-", col_space=12)]
    for name, curve in curves.items():
        first = min((step for step, wer in points[name].items() if wer <= target), default=None)
        when = f"first at step {first}" if first else "never"
        lines.append(f"{name}: {100 * target:g} % wrong or less {when}{'' if reached(curve, target) else ', MISSED'}")
    return lines


def main(values, config) -> dict:
    """Train all variants, print the table, write the curves; what is written."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rank, local_rank, world_size = collectives.init(kind)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        if kind == "cpu":
            rnnt_config.require(config, host_state.available_host_bytes())
        if rank == 0:
            print(f"rnnt/{values['preset']}  {rnnt_config.num_parameters(config) / 1e6:,.1f} M parameters  {NO_TIMING}")
        with measure.process_settings(device, False):
            curves = curves_of(values, config, device, rank, world_size)
        out = {
            "kind": "word error rate over training steps",
            "note": NO_TIMING,
            "preset": values["preset"],
            "steps": values["steps"],
            "target": values["target"],
            "config": vars(config).copy(),
            "env": environment.describe_environment(device, world_size),
            "curves": curves,
        }
        if rank == 0:
            print("\n".join(_table(curves, values["target"])))
            if values["out"]:
                path = Path(values["out"])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(out, indent=1) + "\n")
        return out
    finally:
        collectives.shutdown()


if __name__ == "__main__":
    with mistakes_in_one_line("rnnt", "wer_curves"):
        answer = main(values, config)
    sys.exit(0 if all(reached(curve, values["target"]) for curve in answer["curves"].values()) else 1)
