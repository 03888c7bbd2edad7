"""Time this host's calls: `python -m benchmarks.host` is graph_worth.harness.host."""

import sys

from graph_worth.harness.host import main

if __name__ == "__main__":
    sys.exit(main())
