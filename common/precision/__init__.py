"""FP8 and NVFP4, and the import of Transformer Engine."""
