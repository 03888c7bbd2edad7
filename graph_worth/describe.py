"""The answer to --describe: a script as plain data, for the harness."""

import dataclasses


def describe(model: str, presets: dict, variants: dict, facts: dict, changed_presets: dict) -> dict:
    """Describe a script: its presets, what the decorators of its variants say, and its facts.

    Args:
        model: The package.
        presets: Name -> config.
        variants: Of `graph_worth.contract.scan`.
        facts: All optional: "builds", name -> {field of the config: value} of builds beside the preset itself;
            "parity_variables", of the environment; "sweeps", quantity that benchmarks.sweep may vary -> its fields (the
            first takes the value, others keep their ratio to it); and "presets_need", a function of a preset's name and
            its config that gives `graph_worth.config.needs`.
        changed_presets: Preset -> the config that flags made of it, for its needs.
    """
    declared = variants.values()
    described = {
        "model": model,
        "presets": {name: dataclasses.asdict(preset) for name, preset in presets.items()},
        "variants": {name: variant.help for name, variant in variants.items()},
        "kinds": {variant.name: variant.kind for variant in declared},
        "bitwise": [variant.name for variant in declared if variant.parity == "bitwise"],
        "tolerance": {variant.name: variant.parity for variant in declared if isinstance(variant.parity, float)},
        "reference": {variant.name: variant.reference for variant in declared if variant.reference != "eager"},
        "traits": {variant.name: dict(variant.traits) for variant in declared if variant.traits},
        "headline": [variant.name for variant in declared if variant.headline],
        "formerly": {variant.formerly: variant.name for variant in declared if variant.formerly},
        "apart": {variant.name: variant.apart for variant in declared if variant.apart},
        "variant_builds": {variant.name: list(variant.builds) for variant in declared},
        **facts,
        "builds": {"": {}, **(facts.get("builds") or {})},
    }
    if "presets_need" in facts:
        needed = {name: facts["presets_need"](name, config) for name, config in {**presets, **changed_presets}.items()}
        described["presets_need"] = needed
    return described
