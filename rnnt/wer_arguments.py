"""The command line of rnnt/wer_curves.py, apart from it so that --help and mistakes need no torch."""

import dataclasses
from pathlib import Path

from common.config import Parser, parse_with_fields, require_known, require_writable
from rnnt.config import GENERATED, PRESETS, VARIANTS, Config

# As many losses as a state keeps.
MAX_STEPS = 4096
# Until the learning rate has fallen to a fifth and less.
STEPS = {"corpus": 1500, "corpus_tiny": 600}


def parse(argv=None):
    """(values of this command's flags, config). A mistake is one line on stderr and exit status 2."""
    parser = Parser(
        prog="python -m rnnt.wer_curves", description="Word error rate over training steps.", allow_abbrev=False
    )
    parser.add_argument("--preset", metavar="NAME", default="corpus", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--variants", metavar="A,B", default="eager,full", help=f"some of {', '.join(VARIANTS)}")
    steps = ", ".join(f"{name} {count}" for name, count in STEPS.items())
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of each (the preset's: {steps}; others 1500)")
    parser.add_argument("--every", type=int, default=100, metavar="K", help="steps between two points")
    parser.add_argument("--target", type=float, default=0.1, metavar="W", help="word error rate to end with at most")
    parser.add_argument("--out", default="", metavar="PATH", help="where to write the curves (.json)")
    values, given = parse_with_fields(parser, Config, argv)
    try:
        require_known("preset", values["preset"], PRESETS)
        values["variants"] = list(dict.fromkeys(values["variants"].split(",")))
        if values["steps"] is None:
            values["steps"] = STEPS.get(values["preset"], 1500)
        for name in values["variants"]:
            require_known("variants", name, VARIANTS)
        if not 1 <= values["steps"] <= MAX_STEPS:
            raise ValueError(f"--steps {values['steps']}: takes a number from 1 to {MAX_STEPS}")
        if not 1 <= values["every"] <= values["steps"]:
            raise ValueError(f"--every {values['every']}: takes a number from 1 to --steps, {values['steps']}")
        if not 0 <= values["target"] <= 1:
            raise ValueError(f"--target {values['target']}: takes a word error rate from 0 to 1")
        if values["out"]:
            require_writable("--out", Path(values["out"]))
        config = dataclasses.replace(PRESETS[values["preset"]], **given)
        if config.data in GENERATED:
            raise ValueError(
                f"--data {config.data} has no words: take --preset corpus, or --data with corpus or a folder"
            )
    except ValueError as error:
        parser.error(str(error))
    return values, config
