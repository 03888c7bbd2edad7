"""The declaration of a variant: one entry in the table of a model's variants.py.

    VARIANTS = table(
        Declared("eager", "kernels launched one by one", "eager", "stable_diffusion.train:eager", headline=True),
        Declared("graph_step", "the whole iteration in one graph", "graph", "stable_diffusion.train:GraphedStep",
                 graphs=1, replays=1, parity="bitwise", headline=True, formerly="graph"),
    )

No torch is imported here: `--describe` reads the table in a fraction of a second. The constructor is named as text and
imported when a variant is made (`construct`).
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

KINDS = ("eager", "graph", "compile")
MAIN_BUILD = ""

# A number, None for "at least one, known only after the capture", or a function of the config that returns one.
Count = int | None | Callable


@dataclass(frozen=True)
class Declared:
    """One variant of a model.

    Args:
        name: as on the command line and in run files. Scopes have the same name in all models: `graph_layer`,
            `graph_networks`, `graph_fwd_bwd`, `graph_step`, with a mechanism behind it where there are several.
        help: one line for `--help`.
        kind: "eager", "graph", or "compile" for code that torch.compile makes.
        make: "module:name" of the constructor, called as make(state, **options).
        options: keyword arguments of the constructor. A text with a colon is the "module:name" of an object.
        graphs: graphs that the capture makes.
        replays: graph replays in each step.
        reference: variant that parity compares with; a variant that names itself is run twice.
        parity: "bitwise", a relative difference of losses that is allowed, or None: that of two runs of the reference.
        headline: whether `make bench` runs the variant when no VARIANTS are given.
        builds: names of the builds (`BUILDS` of the same file) that have this variant. "" is the preset as it is.
        traits: text for each name in `common.config.TRAITS` that sets the variant apart.
        formerly: name of the variant before scopes were named alike, or "".
    """

    name: str
    help: str
    kind: str
    make: str
    options: dict = field(default_factory=dict)
    graphs: Count = 0
    replays: Count = 0
    reference: str = "eager"
    parity: str | float | None = None
    headline: bool = False
    builds: tuple[str, ...] = (MAIN_BUILD,)
    traits: dict = field(default_factory=dict)
    formerly: str = ""

    def promised(self, config) -> tuple[int | None, int | None]:
        """(graphs, replays a step) for a config."""
        graphs, replays = (count(config) if callable(count) else count for count in (self.graphs, self.replays))
        return graphs, replays


def table(*variants: Declared) -> dict[str, Declared]:
    """Name -> variant, in order.

    Raises:
        ValueError: two variants share a name, a constructor is no "module:name", or a kind or reference is unknown.
    """
    named = {variant.name: variant for variant in variants}
    if len(named) < len(variants):
        raise ValueError("two variants have the same name")
    for variant in variants:
        if ":" not in variant.make:
            raise ValueError(f"variant {variant.name}: constructor {variant.make!r} is not 'module:name'")
        if variant.kind not in KINDS:
            raise ValueError(f"variant {variant.name}: kind {variant.kind!r} is not one of {', '.join(KINDS)}")
        if variant.reference not in named:
            raise ValueError(f"variant {variant.name}: its reference {variant.reference!r} is no variant")
    return named


def construct(variant: Declared | Callable, state):
    """Make the variant from a model's state.

    Args:
        variant: as a model's table declares it, or its constructor, which is called with the state alone.
        state: of the model.

    Raises:
        common.variant.Unsupported: it cannot run here. common.capture.pool.CaptureError: its capture failed.
    """
    if not isinstance(variant, Declared):
        return variant(state)
    options = {
        name: resolved(value) if isinstance(value, str) and ":" in value else value
        for name, value in variant.options.items()
    }
    return resolved(variant.make)(state, **options)


def resolved(path: str):
    """The object at "module:name". A module that runs as the main program is not imported a second time."""
    module, _, name = path.partition(":")
    main = sys.modules["__main__"]
    is_main = getattr(getattr(main, "__spec__", None), "name", None) == module
    return getattr(main if is_main else importlib.import_module(module), name)


def about(variants: dict[str, Declared], builds: dict[str, dict] | None = None) -> dict:
    """The part of a model's ABOUT that follows from its table; see `common.config.describe`.

    Args:
        variants: of `table`.
        builds: name -> {field of the config: value} of builds beside the preset itself. A build without fields, or with
            those of an earlier build, is there to have a worker of its own.
    """
    own = variants.values()
    return {
        "kinds": {each.name: each.kind for each in own},
        "bitwise": [each.name for each in own if each.parity == "bitwise"],
        "tolerance": {each.name: each.parity for each in own if isinstance(each.parity, float)},
        "reference": {each.name: each.reference for each in own if each.reference != "eager"},
        "traits": {each.name: dict(each.traits) for each in own if each.traits},
        "headline": [each.name for each in own if each.headline],
        "formerly": {each.formerly: each.name for each in own if each.formerly},
        "builds": {MAIN_BUILD: {}, **(builds or {})},
        "variant_builds": {each.name: list(each.builds) for each in own},
        "promises": lambda config, name: variants[name].promised(config),
    }
