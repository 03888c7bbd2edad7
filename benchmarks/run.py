"""Measure a model, eager against graphs: `python -m benchmarks.run` is graph_worth.harness.run."""

import sys

from graph_worth.harness.run import main

if __name__ == "__main__":
    sys.exit(main())
