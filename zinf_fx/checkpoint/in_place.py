"""Where the tensors of a model are in files, so that they can be read from there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zinf_fx.checkpoint.importing import check_format, misfit, places_of
from zinf_fx.checkpoint.naming import as_named
from zinf_fx.checkpoint.published import Published, as_published
from zinf_fx.checkpoint.safetensors_file import Kind, TensorInFile
from zinf_fx.checkpoint.training.files import MANIFEST
from zinf_fx.checkpoint.training.loading import check_files, manifest_of
from zinf_fx.checkpoint.training.manifest import Manifest, SavedTensor
from zinf_fx.checkpoint.training.parts.module import FORMATS, of_format
from zinf_fx.errors import CheckpointError

_MODEL = "model"


def located(
    model: torch.nn.Module, path: Path, wanted: Mapping[str, torch.Tensor]
) -> dict[str, TensorInFile | Published]:
    """By name, where the parameters and buffers of a model are: in a checkpoint that `save_checkpoint` wrote, or in
    safetensors files, as `load_safetensors` takes them. `wanted`: the model's, by their plain names.

    Raises: CheckpointError for what is neither, for a checkpoint in which a tensor is not in one piece, and for codes
    and scales that don't fit each other.
    """
    if not (path / MANIFEST).is_file():
        places, wrong = as_published(as_named(model, places_of(path), wanted), wanted)
        if wrong:
            check_format(path)
            raise misfit(path, wrong)
        return places
    manifest = manifest_of(path)
    check_files(path, manifest)
    formats = manifest.values.get(_MODEL, {}).get(FORMATS, {})
    found: dict[str, TensorInFile | Published] = {}
    for whole, saved in manifest.by_name().items():
        part, _, name = whole.partition("/")
        if part == _MODEL:
            how = formats.get(name)
            quantised = None if how is None else of_format(how)
            file, offset = _in_one_piece(path, manifest, saved)
            found[name] = TensorInFile(file, Kind(saved.dtype, saved.shape), offset, quantised)
    return as_named(model, found, wanted)


def _in_one_piece(path: Path, manifest: Manifest, saved: SavedTensor) -> tuple[Path, int]:
    """The file of a tensor's bytes, and the offset of the first. Raises: CheckpointError where they are scattered."""
    pieces = [piece for box in saved.boxes for piece in box.pieces]
    if not pieces:
        return path / manifest.files[0].path, 0
    first = pieces[0]
    for piece in pieces:
        follows = piece.offset == first.offset + piece.start * saved.dtype.itemsize
        if len(saved.boxes) > 1 or piece.file != first.file or not follows:
            raise CheckpointError(
                f"'{saved.name}' of the checkpoint in {path} is in several pieces, as several ranks or disks saved it: "
                "to be read in place, it has to be in one; save the model with one rank and one store"
            )
    return path / manifest.files[first.file].path, first.offset
