"""Shards of latents: made, converted, read."""
