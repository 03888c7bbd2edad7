"""Variants as a run has them: made from a model's table and entered."""

from common.variant_table import construct

from common.variant import enter


def made(variants, name, state):
    """variants: of a model's variants.py."""
    variant = construct(variants[name], state)
    enter(variant)
    return variant
