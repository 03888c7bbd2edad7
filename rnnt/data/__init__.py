"""Batches, buckets of lengths, and synthetic utterances."""
