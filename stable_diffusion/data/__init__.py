"""Shards of latents: made and read."""
