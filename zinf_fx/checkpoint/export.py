"""`export_safetensors`: a model's weights as the files that other programs read."""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zinf_fx.arguments import check_model, check_path
from zinf_fx.checkpoint.copying import values_of
from zinf_fx.checkpoint.files import FILES, LOCK, Files, appear, make_file, refusals, unfinished
from zinf_fx.checkpoint.models import Everyone, names_of_tied, tensors_of, together, unwrapped
from zinf_fx.checkpoint.safetensors_format import TensorInFile, TensorInfo, check_dtype, layout
from zinf_fx.config import parse_bytes
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.runtime.memory.host import octets
from zinf_fx.sizes import in_words


def export_safetensors(model: torch.nn.Module, directory: str | Path, max_shard_size: int | str = "5GB") -> None:
    """Write the model's parameters and buffers to safetensors files in `directory`, which is made where it is missing.

    Up to `max_shard_size` (bytes, or a text such as "5GB") they are in one file, `model.safetensors`; else in several,
    with `model.safetensors.index.json`. One tensor that is larger is in a file by itself. Tied weights are written
    once. Of a model of transformers, its configuration is written too, so that `from_pretrained` reads the directory.

    At most 32 MiB of a stored tensor are in memory at a time; of a DTensor, all of it. All ranks call this, and the
    first writes.

    Room for everything is reserved before anything is written. What was in the directory stays valid until all of the
    new weights are on the disk, and is then removed: after a crash, the one or the other is there.

    Raises: CheckpointError on every rank, and what was there is as before; or, where the disk fails after all of the
    new weights appeared, they are there.
    """
    check_model(model, "export_safetensors")
    check_path(directory, "export_safetensors")
    export(model, Path(directory).absolute(), parse_bytes(max_shard_size, "max_shard_size"))


@held_back
def export(model: torch.nn.Module, directory: Path, limit: int, files: Files = FILES) -> None:
    """Export as `export_safetensors` does, with `limit` bytes in a file."""
    wrapped, model = model, unwrapped(model)
    tensors = tensors_of(model)
    everyone = Everyone(wrapped, tensors.values())
    written = {names[0]: tensors[names[0]] for names in names_of_tied(model, tensors)}
    kinds = {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()}
    groups = in_groups(kinds, limit)
    with ExitStack() as stack:
        with together("reserving room for weights", *everyone.ranks):
            folder = stack.enter_context(unfinished(directory, files)) if everyone.is_first else directory
            shards = shards_for(groups, folder, directory)
            if everyone.is_first:
                reserve(shards, files)
        with together("writing weights", *everyone.ranks), closing(ShardWriter(files)) as writer:
            for shard in shards:
                if everyone.is_first:
                    writer.begin(shard)
                for name in shard.places:
                    with closing(values_of(written[name])) as pieces:
                        for piece in pieces:
                            let_through()
                            writer.write(octets(piece))
            writer.finish()
            if everyone.is_first:
                _write_configuration(model, folder)
                commit(shards, folder, directory, files)


def _write_configuration(model: torch.nn.Module, folder: Path) -> None:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    described: Any = model
    config = copy.copy(described.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if described.can_generate():
        described.generation_config.save_pretrained(folder)


WHOLE = "model.safetensors"
"""The file of a model that is in one. Where there is one, it is read, and not the index."""

INDEX = "model.safetensors.index.json"
"""Says which file has which tensor, where there are several."""

# The files of a model that is in several; with a number in front where names without one are taken.
_SHARD = re.compile(r"model(?:-(\d+))?-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Shard:
    """A file to be: what it begins with, and where each tensor is in it."""

    path: Path
    begin: bytes
    places: Mapping[str, TensorInFile]

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.begin) + sum(place.kind.nbytes for place in self.places.values())


def in_groups(kinds: Mapping[str, TensorInfo], limit: int) -> list[dict[str, TensorInfo]]:
    """Divide tensors, in their order, into as many per file as stay within the limit together. Raises: CheckpointError
    for a dtype that such files can't have."""
    groups: list[dict[str, TensorInfo]] = [{}]
    nbytes = 0
    for name, kind in kinds.items():
        check_dtype(kind.dtype, f"'{name}'")
        if groups[-1] and nbytes + kind.nbytes > limit:
            groups.append({})
            nbytes = 0
        groups[-1][name] = kind
        nbytes += kind.nbytes
    return groups


def shards_for(groups: list[dict[str, TensorInfo]], folder: Path, directory: Path) -> list[Shard]:
    """Return the files in `folder`, under names that no shard in `directory` has."""
    taken = {int(match[1] or 1) for match in map(_SHARD.fullmatch, _names_in(directory)) if match}
    number = next(number for number in itertools.count(1) if number not in taken)
    prefix = "model" if number == 1 else f"model-{number}"
    names = [f"{prefix}-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    if len(groups) == 1:
        names = [WHOLE]
    paths = [folder / name for name in names]
    return [Shard(path, *layout(group, path)) for path, group in zip(paths, groups, strict=True)]


def _names_in(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def reserve(shards: list[Shard], files: Files) -> None:
    """Make the files, with room for all that is to be in them. Raises: CheckpointError."""
    total = sum(shard.nbytes for shard in shards)
    for shard in shards:
        with refusals(f"reserving {in_words(total)} for weights", shard.path):
            make_file(files, shard.path, shard.nbytes)


class ShardWriter:
    """Writes files, whose room is reserved; where none was begun, only takes part in gathering what others write.

    A failure is raised by `finish`: until then, other ranks count on this one in their gathers.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._fd: int | None = None
        self._path: Path | None = None
        self._failure: OSError | None = None

    def begin(self, shard: Shard) -> None:
        """Write to this file from now on."""
        self.close()
        if self._failure is None:
            self._path = shard.path
            try:
                self._fd = os.open(shard.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                self._failure = error
            self.write(memoryview(shard.begin))

    def write(self, content: memoryview) -> None:
        """Write the bytes that come next in the file."""
        if self._fd is not None and self._failure is None:
            try:
                self._files.write(self._fd, content)
            except OSError as error:
                self._failure = error

    def finish(self) -> None:
        """Raises: CheckpointError if anything failed."""
        if self._failure is not None:
            assert self._path is not None
            with refusals("writing weights", self._path):
                raise self._failure

    def close(self) -> None:
        """Close the file that was begun, if any."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def commit(shards: list[Shard], folder: Path, directory: Path, files: Files) -> None:
    """Let the new weights appear in the place of those that are in the directory, and then what else is in the folder.

    Raises: CheckpointError, and the old weights are there, or the new ones where all of them had appeared.
    """

    def into(paths: list[Path]) -> dict[Path, Path]:
        return {path: directory / path.name for path in paths}

    first = [shard.path for shard in shards]
    last = folder / INDEX if len(first) > 1 else first.pop()
    new = {last.name, *(path.name for path in first)}
    if first:
        with refusals("writing the index of weights", last):
            last.write_text(json.dumps(_index(shards), indent=2, sort_keys=True) + "\n")
    with refusals("renaming files with weights", directory):
        rest = [path for path in folder.iterdir() if path.name not in (*new, LOCK)]
        try:
            appear(into(first), files)
            appear(into([last]), files)
        except BaseException:
            if last.exists():  # else the new weights count, and nothing of them may go
                for path in first:
                    files.remove(directory / path.name)
            raise
        # The index counts only where there is no model in one file.
        for name in sorted({*_names_in(directory)} - new, key=lambda name: name != WHOLE):
            if name in (WHOLE, INDEX) or _SHARD.fullmatch(name):
                files.remove(directory / name)
        appear(into(rest), files)


def _index(shards: list[Shard]) -> dict[str, object]:
    kinds = [place.kind for shard in shards for place in shard.places.values()]
    counts = {"total_parameters": sum(kind.numel for kind in kinds), "total_size": sum(kind.nbytes for kind in kinds)}
    return {"metadata": counts, "weight_map": {name: shard.path.name for shard in shards for name in shard.places}}
