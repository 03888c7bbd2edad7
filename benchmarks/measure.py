"""Measure a step of your own: `python -m benchmarks.measure` is graph_worth.harness.measure."""

import sys

from graph_worth.harness.measure import main

if __name__ == "__main__":
    sys.exit(main())
