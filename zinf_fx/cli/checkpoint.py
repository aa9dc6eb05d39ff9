"""`zinf-fx checkpoint list | inspect | verify | convert`: what checkpoints there are, and what is in them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from zinf_fx.checkpoint.catalog import CheckpointDirectory, checkpoints_in
from zinf_fx.checkpoint.convert import convertible, to_distributed, to_safetensors
from zinf_fx.checkpoint.load import damages_of
from zinf_fx.checkpoint.manifest import Manifest, SavedTensor, manifest_of
from zinf_fx.config import parse_bytes
from zinf_fx.errors import CheckpointError
from zinf_fx.sizes import in_words
from zinf_fx.tables import counted, table


def run(options: argparse.Namespace) -> int | None:
    """Do what is asked for; 1 when a checkpoint turns out to be damaged. Raises: CheckpointError."""
    return {"list": _list, "inspect": _inspect, "verify": _verify, "convert": _convert}[options.action](options)


def _list(options: argparse.Namespace) -> None:
    checkpoints = _checkpoints_in(options.directory)
    if options.json:
        print(json.dumps([_described(checkpoint) for checkpoint in checkpoints], indent=1))
        return
    rows = []
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        size, ranks = (in_words(manifest.nbytes), str(manifest.ranks)) if manifest is not None else ("", "")
        step = "" if checkpoint.step is None else f"{checkpoint.step:,}"
        how = "" if manifest is None else "generation" if manifest.in_store_nbytes else "copy"
        saved, state = manifest.time if manifest else "", checkpoint.damage or "whole"
        rows.append([checkpoint.path.name, step, saved, size, ranks, how, state])
    print(table(rows, ("checkpoint", "step", "saved", "size", "ranks", "form", "state"), left=(0, 2, 5, 6)))


def _inspect(options: argparse.Namespace) -> None:
    manifest = manifest_of(options.directory)
    if options.json:
        print(json.dumps(_contents(manifest), indent=1))
        return
    kept = manifest.in_store_nbytes
    print(
        f"{options.directory}: {in_words(manifest.nbytes)} in {counted(len(manifest.tensors), 'tensor')}, saved "
        f"{manifest.time} by {counted(manifest.ranks, 'rank')} of {manifest.made_by}"
        + (f"; {in_words(kept)} are in files of the store that they were in\n" if kept else "\n")
    )
    parts = _parts(manifest)
    rows = [[name, part["kind"], f"{part['tensors']:,}", in_words(part["nbytes"])] for name, part in parts.items()]
    print(table(rows, ("part", "kind", "tensors", "bytes"), left=(0, 1)))
    if plain := _plain_values(manifest):
        print()
        print(table([[name, json.dumps(value)] for name, value in plain.items()], ("value", ""), left=(0, 1)))
    print()
    files = [[file.path, in_words(file.nbytes), in_words(manifest.taken_of(file))] for file in manifest.files]
    print(table(files, ("file", "size", "of this checkpoint")))
    if options.tensors:
        print()
        print(
            table([_row(tensor) for tensor in manifest.tensors], ("tensor", "dtype", "shape", "bytes"), left=(0, 1, 2))
        )


def _verify(options: argparse.Namespace) -> int:
    damages: dict[str, list[str]] = {}
    for checkpoint in _checkpoints_in(options.directory):
        if checkpoint.manifest is None:
            damages[str(checkpoint.path)] = [str(checkpoint.damage)]
            continue
        with _progress(checkpoint.manifest.nbytes, checkpoint.path, options) as bar:
            damages[str(checkpoint.path)] = damages_of(checkpoint.path, checkpoint.manifest, bar.update)
    if options.json:
        print(json.dumps(damages, indent=1))
    else:
        for path, damages_of_path in damages.items():
            print(f"{path}: {'DAMAGED' if damages_of_path else 'whole'}")
            for damage in damages_of_path:
                print(f"  {damage}")
    return int(any(damages.values()))


def _convert(options: argparse.Namespace) -> None:
    limit = parse_bytes(options.max_shard_size, "max-shard-size")
    manifest = manifest_of(options.directory)
    if options.format == "dcp":
        parts = [options.part] if options.part is not None else convertible(manifest)
        tensors = manifest.by_name()
    else:
        parts = [options.part or "model"]
        tensors = {tensor.name: tensor for tensor in manifest.tensors}
    nbytes = sum(
        tensor.nbytes for name, tensor in tensors.items() if name.startswith(tuple(f"{part}/" for part in parts))
    )
    with _progress(nbytes, options.directory, options) as bar:
        if options.format == "dcp":
            written = to_distributed(options.directory, manifest, parts, options.output, bar.update)
        else:
            written = to_safetensors(options.directory, manifest, parts[0], options.output, limit, bar.update)
    if options.json:
        print(json.dumps([str(path) for path in written], indent=1))
    for path in () if options.json else written:
        print(f"{path}: {in_words(path.stat().st_size)}")


def _checkpoints_in(directory: Path) -> list[CheckpointDirectory]:
    checkpoints = checkpoints_in(directory)
    if not checkpoints:
        raise CheckpointError(f"{directory} has no checkpoints: name a directory that one or several were saved to")
    return checkpoints


@contextmanager
def _progress(nbytes: int, path: Path, options: argparse.Namespace) -> Iterator[tqdm]:
    shown = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "desc": path.name}
    hidden = True if options.json else None  # None: where stderr is no terminal
    with tqdm(total=nbytes, disable=hidden, file=sys.stderr, leave=False, **shown) as bar:
        yield bar


def _described(checkpoint: CheckpointDirectory) -> dict[str, object]:
    manifest = checkpoint.manifest
    known = {} if manifest is None else {"saved": manifest.time, "nbytes": manifest.nbytes, "ranks": manifest.ranks}
    known |= {} if manifest is None else {"nbytes_in_store_files": manifest.in_store_nbytes}
    return {"path": str(checkpoint.path), "step": checkpoint.step, **known, "damage": checkpoint.damage}


def _contents(manifest: Manifest) -> dict[str, object]:
    return {
        "made_by": manifest.made_by,
        "saved": manifest.time,
        "ranks": manifest.ranks,
        "nbytes_in_store_files": manifest.in_store_nbytes,
        "parts": _parts(manifest),
        "values": _plain_values(manifest),
        "files": [asdict(file) for file in manifest.files],
        "tensors": [
            dict(zip(("name", "dtype", "shape", "nbytes"), _facts(tensor), strict=True)) for tensor in manifest.tensors
        ],
        "same": dict(manifest.same),
    }


def _parts(manifest: Manifest) -> dict[str, dict]:
    """Return by name the kind of each part, and its tensors. Plain values are left out."""
    parts = {
        name: {"kind": values["kind"], "tensors": 0, "nbytes": 0}
        for name, values in manifest.values.items()
        if values["kind"] != "value"
    }
    for tensor in manifest.tensors:
        if (part := parts.get(tensor.part)) is not None:
            part["tensors"] += 1
            part["nbytes"] += tensor.nbytes
    return parts


def _plain_values(manifest: Manifest) -> dict[str, object]:
    values = {name: entry for name, entry in manifest.values.items() if entry["kind"] == "value"}
    return {name: entry.get("value", entry.get("ranks")) for name, entry in values.items()}


def _facts(tensor: SavedTensor) -> tuple[str, str, list[int], int]:
    return tensor.name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes


def _row(tensor: SavedTensor) -> list[str]:
    name, dtype, shape, nbytes = _facts(tensor)
    return [name, dtype, str(shape), in_words(nbytes)]
