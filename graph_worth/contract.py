"""The contract between a training script and the harness: `Training`, `@variant` and the command line (no torch here).

    @dataclass(frozen=True, kw_only=True)
    class Config(Timing): ...                      # each field is an `option`
    PRESETS = {"tiny": Config(), "bench": Config(width=512)}

    if __name__ == "__main__":
        args = parse("gpt3", Config, PRESETS)      # answers --help and mistakes before torch is imported

    import torch
    ...
    @variant("eager", kind="eager", parity="bitwise", headline=True)
    def eager_step(state, index): ...
    @variant("graph_step", kind="graph", graphs=1, parity="bitwise", headline=True)
    class GraphedStep: ...
    def build(config, device, ranks) -> Training: ...

    if __name__ == "__main__":
        with session(args, build) as (run, log):   # graph_worth/script/session.py
            for index in log.steps():
                run.step(index)

A variant is declared once, on its code. `parse` reads the literals of the decorators from the source, so that --help
and --describe take a tenth of a second. The worker evaluates `graphs`, `replays` and `when` on the config that it runs.
"""

import ast
import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graph_worth import config as command_line
from graph_worth.config import Arguments, Timing, needs, option
from graph_worth.folders import OWN_STEP, script_of

__all__ = ["Timing", "Training", "needs", "option", "parse", "variant"]
KINDS = ("eager", "graph", "compile")
# A number, None for "at least one, known only after the capture", or a function of the config that returns one.
Count = int | None | Callable


@dataclass(kw_only=True)
class Training:
    """The result of a script's build(config, device, ranks): all variants share it, and its tensors never move.

    Args:
        state: the script's object, which steps and captures get.
        results: results(n) of steps 0 to n - 1: losses, or another number of each step that parity compares. The call
            may wait for the device. A dict, to which each step adds its loss under its index, is allowed, too.
        owned: modules, optimizers, tensors and generators that training changes. `named_state` and `reset` follow from
            it where they are not given: the reset copies all of it back.
        named_state: named_state() gives (name, tensor) of all that training carries from step to step.
        reset: reset() sets everything that a step reads or writes back to the seeded start, in place.
        skip: skip(n) passes n batches over after a reset, where steps read one after another whatever their index.
        batch_class: class of the batch of a step: batches of one shape are one class.
        grad_norms: grad_norms(n) of steps 0 to n - 1.
        compared: compared() is a context of the steps whose losses and state are compared with another variant's.
        apart: apart(variant) says how its training leaves eager's where their bits differ, "" where by roundings alone;
            None where it cannot tell. Of a variant that declares no parity.
        finish: work after a training by hand, such as saving a file; returns lines for a person.
        close: releases data workers and files; what it returns is written by --record.
        config: the config as it can run here, where it differs from the request.
        items: items (samples or tokens) of a step on one GPU.
        unit: name of the items.
        flops: floating-point operations of a step on one GPU.
        flops_convention: how they are counted.
        flops_notes: what belongs beside a rate, such as work that is not counted; in a few words each.
        peak_flops: of the GPU in this precision, FLOP/s.
        card: lines about what runs.
        notes: lines about differences from the request.
    """

    state: Any
    results: Any
    owned: Sequence = ()
    named_state: Any = None
    reset: Any = None
    skip: Callable[[int], None] = lambda count: None
    batch_class: Callable[[int], int] = lambda index: 0
    grad_norms: Callable[[int], list[float]] = lambda count: []
    compared: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    apart: Callable[[Any], str | None] | None = None
    finish: Callable[[], list[str]] | None = None
    close: Callable[[], dict | None] | None = None
    config: Any = None
    items: float = 1.0
    unit: str = "samples"
    flops: float = 0.0
    flops_convention: str = ""
    flops_notes: list[str] = field(default_factory=list)
    peak_flops: float | None = None
    card: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------
# Variants


@dataclass(frozen=True)
class Declared:
    """A variant as its decorator's literals say it, read from source.

    Attributes:
        modules: those that declare it; the first one's place in `place`, as in gpt3/train.py:80.
        takes_index: the code is a step function, step(state, index).
    """

    name: str
    kind: str
    modules: tuple[str, ...]
    place: str
    takes_index: bool
    help: str = ""
    parity: str | float | None = None
    reference: str = "eager"
    headline: bool = False
    builds: tuple[str, ...] = ("",)
    apart: str = ""
    traits: dict = field(default_factory=dict)
    formerly: str = ""


# Keywords of @variant that the command line needs: literals.
LITERALS = ("kind", "help", "parity", "reference", "headline", "builds", "apart", "traits", "formerly")
_APART = re.compile("[a-z][a-z0-9_]{0,39}")


@dataclass(frozen=True)
class VariantCode:
    """A variant's code and its promises.

    Attributes:
        code: step(state, index), or a maker of an object with `step`, called with (state, capture).
        warm_up: step(state, index) that warms up a step function.
    """

    name: str
    code: Any
    graphs: Count
    replays: Count
    when: Callable | None
    warm_up: Callable

    def promised(self, config) -> tuple[int | None, int | None]:
        """(graphs, replays a step) for a config."""
        graphs, replays = (count(config) if callable(count) else count for count in (self.graphs, self.replays))
        return graphs, replays


# Module -> the variants that it declares.
_declared: dict[str, list[VariantCode]] = {}


def variant(
    name: str,
    *,
    graphs: Count = 0,
    replays: Count | str = "graphs",
    when: Callable | None = None,
    warm_up: Callable | None = None,
    **literals,
):
    """Declare a step function, or a class of captures, as a variant.

    Args:
        name: as on the command line and in run files. Scopes have one name in all models: graph_layer, graph_fwd_bwd,
            graph_networks, graph_step.
        graphs: graphs of the capture: a number, None (1 or more), or a function of the config.
        replays: replays of a step, as `graphs`; the number of graphs unless given.
        when: when(config) tells whether this code is the variant's; a second declaration may then have the same name.
        warm_up: step(state, index) that warms up in the place of a step function, as where graphs have other shapes.
        literals: kind: "eager", "graph", or "compile" for code that torch.compile makes.
            help: a line for --help; the first line of the docstring unless given.
            parity: "bitwise", a relative difference of losses that is allowed, or None: that of two reference runs.
            reference: the variant, a step function, that parity compares with ("eager").
            headline: whether `make bench` runs the variant when no VARIANTS are given.
            builds: names of the builds that have this variant; "" is the preset as it is.
            apart: variants of one such name are measured in a process of their own, with eager and its control and no
                other variant: for code that changes the process in which others are timed, as a compiler's.
            traits: name -> text of what sets the variant apart from the model's other ones: layer, arithmetic, batches
                (ratios are formed between variants of equal ones), kernels (where they round otherwise than those of
                the reference), extra_work (of an eager: beside what eager does, so it should never be the fastest),
                draws (of a reference of its own: where it draws other random numbers than eager, so losses differ), and
                part (of a graph: the small part of a step that it holds by choice).
            formerly: an earlier name of the variant.
    """
    module = sys._getframe(1).f_globals["__name__"]
    promised: Any = graphs if replays == "graphs" else replays
    unknown = literals.keys() - set(LITERALS)
    if unknown:
        raise TypeError(f"variant {name}: unknown keyword {sorted(unknown)[0]}")

    def declare(code):
        _declared.setdefault(module, []).append(VariantCode(name, code, graphs, promised, when, warm_up or code))
        return code

    return declare


def variants_of(module) -> list[VariantCode]:
    """Return the variants that an imported module declares, in order."""
    return _declared.get(module.__name__, [])


def scan(modules: Sequence[str]) -> dict[str, Declared]:
    """Read from source which variants modules declare, by name.

    Raises:
        ValueError: a variant is declared twice, an argument is no literal, a kind or parity is unknown, `apart` is no
            word, or a reference is no step function; the text names file and line.
    """
    variants: dict[str, Declared] = {}
    for module in modules:
        path = path_of(module)
        for node, call in _decorated(ast.parse(path.read_text())):
            place = f"{'/'.join(path.parts[-len(module.split('.')) :])}:{call.lineno}"
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            try:
                name = ast.literal_eval(call.args[0])
                literals = {key: ast.literal_eval(keywords[key]) for key in LITERALS if key in keywords}
            except (ValueError, IndexError):
                raise ValueError(f"{place}: name, {', '.join(LITERALS)} of a variant are literals") from None
            if None in keywords:
                raise ValueError(f"{place}: the keywords of a variant stand in its decorator, without **")
            earlier = variants.get(name)
            if earlier is not None:
                if "when" not in keywords:
                    raise ValueError(f"{place}: variant {name!r} is declared at {earlier.place} already")
                changed = {"modules": (*earlier.modules, module)}
                variants[name] = Declared(**vars(earlier) | changed)
                continue
            if literals.get("kind") not in KINDS:
                raise ValueError(f"{place}: kind {literals.get('kind')!r} is not one of {', '.join(KINDS)}")
            parity = literals.get("parity")
            # Written so that NaN is refused.
            if not (parity in (None, "bitwise") or (isinstance(parity, float) and 0 <= parity < 1)):
                raise ValueError(f"{place}: parity {parity!r} is not 'bitwise', None, or a float from 0.0 to below 1.0")
            if "apart" in literals:
                _require_apart(place, literals["apart"], literals["kind"])
            text = (ast.get_docstring(node) or "").split("\n")[0].rstrip(".")
            takes_index = isinstance(node, ast.FunctionDef) and "capture" not in {arg.arg for arg in node.args.args}
            fields = {"name": name, "modules": (module,), "place": place, "takes_index": takes_index, "help": text}
            variants[name] = Declared(**fields | literals)
    _require_references(modules[0], variants)
    return variants


def _require_apart(place, apart, kind):
    if not isinstance(apart, str) or not _APART.fullmatch(apart):
        raise ValueError(f"{place}: apart {apart!r} is no word of a to z, 0 to 9 and _, at most 40")
    if kind == "eager":
        raise ValueError(f"{place}: apart {apart!r} of an eager variant: every process has its eager")


def path_of(module: str) -> Path:
    """Return the file of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"there is no {module.replace('.', '/')}.py")
    return Path(spec.origin)


def _decorated(tree):
    """(definition, call of `variant`) at the top level of a file."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for call in reversed(node.decorator_list):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "variant":
                    yield node, call


def _require_references(module, variants):
    if "eager" not in variants:
        raise ValueError(f"{module}: no step is declared as @variant('eager', kind='eager')")
    for declared in variants.values():
        text = f"{declared.place}: reference {declared.reference!r} of {declared.name} is no"
        if declared.reference not in variants:
            raise ValueError(f"{text} variant")
        if not variants[declared.reference].takes_index or variants[declared.reference].kind != "eager":
            raise ValueError(f"{text} step function")


# ------------------------------------------------------------------------------------------------
# Command line


def parse(
    model: str, config_class, presets: dict, files: Sequence[str] = (), builds=None, argv=None, **facts
) -> Arguments:
    """Parse the command line; see `graph_worth.config.parse`.

    Args:
        model: the package, as in `python -m gpt3.train`.
        config_class: dataclass of options.
        presets: name -> config.
        files: modules of the package besides train.py that declare variants, without the package's name.
        builds: name -> fields of the config, of builds beside the preset.
        argv: command line; the process's unless given.
        facts: parity_variables, sweeps, presets_need: see `graph_worth.describe`. require: require(args) raises a
            ValueError where they cannot run on any device; `build` comes later, when the ranks have met. shared: names
            of modules outside of the package that declare variants, too.

    A config that has require_ranks(world_size) raises a ValueError there where this process's ranks do not fit.
    """
    script = script_of(model)
    with command_line.mistakes_in_one_line(f"python -m {script}"):
        more = [f"{script.rpartition('.')[0]}.{file}" for file in files]
        variants = scan([script, *more, *facts.pop("shared", ())])
        for declared in variants.values():
            if declared.apart in (builds or {}):
                raise ValueError(f"{declared.place}: apart {declared.apart!r} is the name of a build")
        if argv is None:
            _alias_main(model)
    require = facts.pop("require", None)
    args = command_line.parse(model, config_class, presets, variants, argv, facts | {"builds": builds})
    if args.run.worker:
        command_line.end_with_supervisor()
    with command_line.mistakes_in_one_line(f"python -m {script}"):
        if argv is None and hasattr(args.config, "require_ranks"):
            args.config.require_ranks(int(os.environ.get("WORLD_SIZE", "1")))
        if require is not None:
            require(args)
    return args


def _alias_main(model):
    """Let other files of the model import from train.py, which runs as __main__: there is one module of it."""
    if model == OWN_STEP:
        return
    main = sys.modules["__main__"]
    started = getattr(getattr(main, "__spec__", None), "name", None)
    if started != f"{model}.train":
        raise ValueError(f"{started} parses the command line of {model}: parse(...) takes the name of its own folder")
    sys.modules[f"{model}.train"] = main
