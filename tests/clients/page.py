"""docs/clients.md: what was run of each library and how it compares, made from results kept in docs/clients.json."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from rows import Row

DOCS = Path(__file__).resolve().parents[2] / "docs"
RESULTS, PAGE = DOCS / "clients.json", DOCS / "clients.md"

INTRODUCTION = """\
# What works with which library

Made by `python tests/clients`, which runs each row twice, in plain PyTorch and with every model state on disk, with the
same seeds, and compares all losses and all parameters after a few steps. Models are small and random, and nothing comes
from the network. Don't edit this page: run the program.

- **bitwise**: losses and parameters have the same bits as plain PyTorch's, eager and with its fused AdamW.
- **bitwise to `aot_eager`**: the same bits as those of `torch.compile(model, backend="aot_eager")`. AOTAutograd
  computes some operators otherwise than eager PyTorch, under every backend; how far apart the two are comes after it.
- **within x**: the largest difference of any loss or parameter, relative to the largest value.
- **refused**: the call raises this error, and nothing was changed. **fails**: it does not work yet.

`offload()` stands for `zinf_fx.offload(model)` and `torch.compile(model, backend="zinf")`; `offloading()` for a model
built inside that block; one line for `torch.compile` alone, with the placement among its options.
"""

LIBRARIES = (
    "torch", "torch.distributed.checkpoint", "transformers", "accelerate", "peft", "bitsandbytes", "torchao",
    "schedulefree", "pytorch_optimizer", "prodigyopt", "trl", "lightning", "timm", "torchvision", "diffusers",
    "huggingface_hub", "safetensors",
)  # fmt: skip

Results = Mapping[str, Mapping[str, object]]


def keep(rows: Mapping[str, Row], replace: bool) -> None:
    """Put `rows`, by test, into the results of this version of torch; `replace`: in place of all that it had."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    version = torch.__version__.partition("+")[0]
    kept = {} if replace else {row["test"]: row for row in results.get(version, {}).get("rows", [])}
    for test, row in rows.items():
        kept[test] = {
            "test": test, "library": row.library, "version": _version(row.library), "ran": row.ran,
            "results": row.results,
        }  # fmt: skip
    sorted_rows = sorted(kept.values(), key=lambda row: (LIBRARIES.index(row["library"]), row["test"]))
    results[version] = {"machine": f"{platform.system()} {platform.machine()}, CPU", "rows": sorted_rows}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:  # a part of torch
        return torch.__version__.partition("+")[0]


def write() -> None:
    PAGE.write_text(render(json.loads(RESULTS.read_text())))


def render(results: Results) -> str:
    """Return the page; the version of torch that most was run on comes first."""
    parts = [INTRODUCTION]
    for version in sorted(results, key=lambda version: len(results[version]["rows"]), reverse=True):
        rows = [
            (row["library"], row["version"], row["ran"], "; ".join(row["results"]).replace("|", "\\|"))
            for row in results[version]["rows"]
        ]
        table = [("library", "version", "what was run", "result"), ("---",) * 4, *rows]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in table)
        parts.append(f"\n## torch {version} ({results[version]['machine']})\n\n{lines}")
    return "".join(parts)
