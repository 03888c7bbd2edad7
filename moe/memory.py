"""Bytes of each scope before its capture, in it and after it: predicted, and measured by a run (no torch here).

    python -m moe.memory --preset gpt_oss_120b                     as many layers as fit
    python -m moe.memory --preset gpt_oss_120b --layers 4 --gib 77
    python -m moe.memory --run runs/h200x1/moe-gpt_oss_120b-l3/20261125T101500Z-a7d396c1.json

A capture runs nothing, but takes memory as an eager step does, and keeps it for its graphs. In a process of its own a
scope so needs what eager needs: the graphs' part beside the rest. Where eager steps alternate with replays, as they do
while they are compared, the graphs' part comes on top, unless both share a pool. Predictions are arithmetic of
moe/config.py; a tenth is added to activations.
"""

import json
import sys
from bisect import bisect_right
from dataclasses import fields, replace
from pathlib import Path

from common.config import Parser, mistakes_in_one_line, parse_with_fields, require_known
from common.training.memory_fit import gib
from moe import config as moe_config
from moe.config import GIB, PRESETS, Config

# The part of a layer's kept bytes that the graphs of each scope hold. A scope of the whole pass holds the loss as well.
PARTS = ("attention", "router", "experts")
SCOPES = {
    "eager": 0,
    "graph_attn": 1,
    "graph_attn_router": 2,
    "graph_attn_router_preprocess": 2,
    "graph_layer": 3,
    "graph_fwd_bwd": 3,
    "graph_step": 3,
}
HOLD_LOSS = ("graph_fwd_bwd", "graph_step")
# Of an H200: 139 less what CUDA takes.
DEFAULT_GIB = 137


def predicted(config: Config, scope: str) -> dict[str, int]:
    """Bytes that torch has reserved for one scope.

    Args:
        config: of the model.
        scope: one of SCOPES.

    Returns:
        "before" the capture: the state. "after" it, which is also its peak: the graphs' inputs and pool beside it.
        "step": the eager rest of a step too. "beside_eager": in the place of that rest whole eager steps, which
        alternate with replays and have memory of their own.
    """
    c, kept, num_parts = config, moe_config.kept_bytes(config), SCOPES[scope]
    loss, running, state = moe_config.loss_bytes(c), moe_config.running_bytes(c), moe_config.state_bytes(c)
    eager = c.layers * sum(kept.values()) + loss + running
    held = c.layers * sum(kept[part] for part in PARTS[:num_parts])
    held += running if num_parts == len(PARTS) else 0
    held += loss if scope in HOLD_LOSS else 0
    # Each microbatch has its input of a part at a place of its own; whole layers are chained.
    inputs = 2 * c.tokens * c.hidden * c.layers * (c.microbatches - 1) if 0 < num_parts < len(PARTS) else 0
    pool, rest, eager = ((num_bytes * 110) // 100 for num_bytes in (held + inputs, eager - held, eager))
    return {
        "before": state,
        "after": state + pool,
        "step": state + pool + rest,
        "beside_eager": state + pool + eager,
    }


def layers_that_fit(config: Config, scope: str, key: str, budget_bytes: int) -> int:
    """Return the most layers with which predicted()[key] is within the budget; 0 where not even one is."""
    depths = range(1, config.layers + 1)
    return bisect_right(depths, budget_bytes, key=lambda layers: predicted(replace(config, layers=layers), scope)[key])


def measured(path: Path) -> tuple[Config, str, dict[str, dict]]:
    """Read a run.

    Args:
        path: a run file of `make bench`, or what --record of moe.train wrote.

    Returns:
        (config, name, scope -> facts). Facts: "added", bytes by which torch's reserved memory grew as the variant was
        made; and "before", "peak" and "after" its capture, each with "reserved" and "allocated" bytes. Older runs have
        "added" alone, those of --record have not.

    Raises:
        ValueError: it is no run of moe, or of a CPU.
    """
    try:
        run = json.loads(path.read_text())
        builds = run.get("builds") or {"": {"config": run["config"], "variants": {run["variant"]: {"capture": run}}}}
        build, model, name = next(iter(builds.values())), run["model"], f"{run['model']}-{run['preset']}"
        own = {field.name for field in fields(Config)}
        config = Config(**{name: value for name, value in build["config"].items() if name in own})
        captures = {scope: each["capture"] for scope, each in build["variants"].items()}
        found = {scope: dict((each.get("memory") or {}).get("capture") or {}) for scope, each in captures.items()}
    except OSError as error:
        raise ValueError(f"--run {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
        raise ValueError(f"--run {path}: no run of moe") from None
    if model != "moe":
        raise ValueError(f"--run {path}: a run of {model}, not of moe")
    on_gpu = bool(run.get("host", {}).get("gpus")) or run.get("device") == "cuda"
    if not on_gpu:
        raise ValueError(f"--run {path}: a run on a CPU, whose memory is not predicted")
    for scope, each in captures.items():
        if "bytes_added" in each:
            found[scope]["added"] = each["bytes_added"]
    return config, name, found


def table(config: Config, whole: Config, budget_bytes: int, found: dict[str, dict] | None = None) -> list[str]:
    """Return the lines of a Markdown table, in GiB.

    Args:
        config: of the model, with the number of layers that the bytes are of.
        whole: with all of its layers, for the depths that fit.
        budget_bytes: that torch may reserve.
        found: as `measured` says; a measured number stands behind the predicted one. None: predictions alone.
    """
    lines = [
        "| scope | before capture | in it | after it | added | eager beside it | layers alone | layers beside eager |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for scope in SCOPES:
        if found is not None and scope not in found:
            continue
        own, facts, cells = predicted(config, scope), (found or {}).get(scope, {}), []
        for ours, theirs in (("before", "before"), ("after", "peak"), ("after", "after")):
            cells.append(gib(own[ours]) + _behind(facts.get(theirs)) if SCOPES[scope] else "")
        cells.append(gib(own["after"] - own["before"]) + (f", {gib(facts['added'])}" if "added" in facts else ""))
        cells.append(gib(own["beside_eager"]))
        cells += [str(layers_that_fit(whole, scope, key, budget_bytes)) for key in ("step", "beside_eager")]
        lines.append(f"| {scope} | {' | '.join(cells)} |")
    return lines


def _behind(of_torch):
    return f", {gib(of_torch['reserved'])} ({gib(of_torch['allocated'])})" if of_torch else ""


def main(argv=None) -> None:
    """Print the table of a preset, or of a run's config beside what was measured."""
    parser = Parser(prog="python -m moe.memory", allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("--preset", metavar="NAME", default="gpt_oss_120b", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--gib", type=int, default=DEFAULT_GIB, help="GiB that torch may reserve (137: of an H200)")
    parser.add_argument("--run", metavar="PATH", default="", help="run file of make bench, or of --record")
    with mistakes_in_one_line("moe", "memory"):
        own, given = parse_with_fields(parser, Config, argv)
        if own["gib"] < 1:
            raise ValueError(f"--gib {own['gib']}: takes a number from 1 up")
        require_known("preset", own["preset"], PRESETS)
        budget, found = own["gib"] * GIB, None
        if own["run"]:
            if given:
                raise ValueError("--run takes the sizes of the run: give it alone, or with --gib")
            config, name, found = measured(Path(own["run"]))
            whole = config
        else:
            name, whole = own["preset"], replace(PRESETS[own["preset"]], **given)
            config = whole if "layers" in given else moe_config.fit(whole, budget)
        print(f"{name}: {config.layers} layers, {moe_config.num_parameters(config) / 1e9:.2f} G parameters, GiB")
        print("\n".join(table(config, whole, budget, found)))
        if found is not None:
            print("Behind each prediction: measured, reserved by torch (and of it in use).")


if __name__ == "__main__":
    main(sys.argv[1:])
