"""FP8, and the import of Transformer Engine."""
