"""`python -m zinf_fx`: the command line."""

from __future__ import annotations

import sys

from zinf_fx.cli import main

if __name__ == "__main__":
    sys.exit(main())
