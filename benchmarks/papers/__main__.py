"""The tables of the ZeRO and ZeRO-Infinity papers, beside the figures that the papers' own formulas give.

    python benchmarks/papers [--json]

Letters mark figures that differ by more than rounding, and notes say why. Nothing is measured or planned here:
`zinf-fx estimate` plans, and `benchmarks/dgx2.py` simulates the papers' runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from papers import comparisons
from papers.comparison import comparison_text


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    tables = comparisons()
    if options.json:
        print(json.dumps([asdict(table) for table in tables], indent=1))
    else:
        print("\n".join(map(comparison_text, tables)), end="")


if __name__ == "__main__":
    main()
