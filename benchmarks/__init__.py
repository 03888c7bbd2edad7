"""The harness: it measures training scripts and knows no model."""
