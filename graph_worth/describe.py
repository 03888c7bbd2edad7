"""The answer to --describe: a script as plain data, for the harness."""

import dataclasses


def describe(model: str, presets: dict, variants: dict, facts: dict, asked: dict) -> dict:
    """Describe a script: its presets, what the decorators of its variants say, and its facts.

    Args:
        model: The package.
        presets: Name -> config.
        variants: Of `graph_worth.contract.scan`.
        facts: All optional: "builds", name -> {field of the config: value} of builds beside the preset itself;
            "parity_variables", of the environment; "sweeps", quantity that benchmarks.sweep may vary -> its fields (the
            first takes the value, others keep their ratio to it); and "presets_need", a function of a preset's name and
            its config that gives `graph_worth.config.needs`.
        asked: Preset -> the config that flags made of it, for its needs.
    """
    own = variants.values()
    described = {
        "model": model,
        "presets": {name: dataclasses.asdict(preset) for name, preset in presets.items()},
        "variants": {name: each.help for name, each in variants.items()},
        "kinds": {each.name: each.kind for each in own},
        "bitwise": [each.name for each in own if each.parity == "bitwise"],
        "tolerance": {each.name: each.parity for each in own if isinstance(each.parity, float)},
        "reference": {each.name: each.reference for each in own if each.reference != "eager"},
        "traits": {each.name: dict(each.traits) for each in own if each.traits},
        "headline": [each.name for each in own if each.headline],
        "formerly": {each.formerly: each.name for each in own if each.formerly},
        "variant_builds": {each.name: list(each.builds) for each in own},
        **facts,
        "builds": {"": {}, **(facts.get("builds") or {})},
    }
    if "presets_need" in facts:
        needed = {name: facts["presets_need"](name, config) for name, config in {**presets, **asked}.items()}
        described["presets_need"] = needed
    return described
