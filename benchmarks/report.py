"""Write the page of a run: `python -m benchmarks.report` is graph_worth.harness.report."""

import sys

from graph_worth.harness.report import main

if __name__ == "__main__":
    sys.exit(main())
