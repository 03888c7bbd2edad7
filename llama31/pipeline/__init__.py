"""One stage of a pipeline."""
