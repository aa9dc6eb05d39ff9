"""`load_safetensors`: weights from files that any program wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from zinf_fx.checkpoint.agreement import together
from zinf_fx.checkpoint.elements import fill
from zinf_fx.checkpoint.files import lies_within
from zinf_fx.checkpoint.naming import Everyone, names_of_tied, tensors_of, unwrapped
from zinf_fx.checkpoint.safetensors_file import Place, places_in
from zinf_fx.checkpoint.weight_files import INDEX, WHOLE
from zinf_fx.errors import CheckpointError

_SHOWN = 3  # of many names, in an error


def load_safetensors(model: torch.nn.Module, path: str | Path) -> None:
    """Replace the model's parameters and buffers by those in a safetensors file, in a directory with one or several, or
    in the files that an index names.

    Names and shapes have to be those of the model's state dict; of tied weights, one name is enough. Values are
    converted to the model's dtypes, as `load_state_dict` does. Stored tensors take them in pieces of 16 MiB, with
    64 MiB on their way to the disk; of many ranks, each reads its own parts, of files that all of them find under the
    path.

    Raises: CheckpointError on every rank when the files don't fit the model, which is as before then, or when they
    can't be read to their end; StoreError.
    """
    model, path = unwrapped(model), Path(path)
    tensors = tensors_of(model)
    everyone = Everyone(tensors.values())
    with together("comparing weights with the model", *everyone.ranks):
        places = places_of(path)
        _check_fit(model, tensors, places, path)
    with together("loading weights", *everyone.ranks):
        by_file: dict[Path, list[str]] = {}
        for name, place in places.items():
            by_file.setdefault(place.path, []).append(name)
        for file, names in by_file.items():
            opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for name in sorted(names, key=lambda name: places[name].offset):
                    fill(tensors[name], opened, places[name])
            finally:
                os.close(opened)


def places_of(path: Path) -> dict[str, Place]:
    """Where each tensor is. Raises: CheckpointError."""
    found = next((one for one in (path / WHOLE, path / INDEX) if one.is_file()), None) if path.is_dir() else path
    if found is None or not found.is_file():
        raise CheckpointError(
            f"'{path}' has no weights: give a safetensors file, an index, or a directory with '{WHOLE}' or '{INDEX}'"
        )
    if found.suffix != ".json":
        return places_in(found)
    try:
        weight_map: Mapping[str, str] = json.loads(found.read_text())["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{found}' is no index of safetensors files: {error!r}. Give one, or a file") from error
    by_file = {name: places_in(_file_of(found, name)) for name in files}
    missing = [name for name, file in weight_map.items() if name not in by_file[file]]
    if missing:
        raise CheckpointError(
            f"'{found}' names {_some(missing)}, which the files don't have: they are not of one checkpoint"
        )
    return {name: by_file[file][name] for name, file in weight_map.items()}


def _file_of(index: Path, name: object) -> Path:
    """The file that an index names. Raises: CheckpointError for what is none of its directory."""
    if not isinstance(name, str) or not lies_within(name):
        raise CheckpointError(f"'{index}' names {name!r}, which is no file in its directory: give another index")
    file = index.parent / name
    if file.exists() and not file.is_file():
        raise CheckpointError(f"'{index}' names '{name}', which is no file: copy it anew")
    return file


def _check_fit(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Place], path: Path
) -> None:
    """Raises: CheckpointError unless each of the model's tensors has one value of its shape in the files."""
    given = [names for names in names_of_tied(model, dict(tensors)) if any(name in places for name in names)]
    known = {name for names in given for name in names}
    wrong = []
    if missing := [name for name in tensors if name not in known]:
        wrong.append(f"it lacks {_some(missing)}")
    if unexpected := [name for name in places if name not in tensors]:
        wrong.append(f"the model has no {_some(unexpected)}")
    for name, place in places.items():
        if name in tensors and tuple(tensors[name].shape) != place.kind.shape:
            wrong.append(f"'{name}' is {place.kind}, the model's has shape {list(tensors[name].shape)}")
        elif name in tensors and place.kind.dtype.is_complex and not tensors[name].is_complex():
            wrong.append(f"'{name}' is {place.kind}, the model's is real")
    if wrong:
        more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointError(
            f"'{path}' doesn't fit {type(model).__name__}: {'; '.join(wrong[:_SHOWN])}{more}. Nothing was loaded: give "
            "the checkpoint of this model, or rename its tensors"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
