"""`python -m echelon` is the `echelon` command."""

from __future__ import annotations

import sys

from echelon.cli import main

if __name__ == "__main__":
    sys.exit(main())
