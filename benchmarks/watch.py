"""Look at a script as it is: `python -m benchmarks.watch` is graph_worth.harness.watch."""

import sys

from graph_worth.harness.watch import main

if __name__ == "__main__":
    sys.exit(main())
