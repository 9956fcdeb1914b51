"""`python -m parity` is `assay`."""

import sys

from parity.cli import main

if __name__ == "__main__":
    sys.exit(main())
