"""The harness: it measures training scripts and knows no model."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
