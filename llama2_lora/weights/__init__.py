"""Frozen weights and adapters."""
