"""A part of a checkpoint as safetensors files with whole tensors, which any program reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from zinf_fx.checkpoint.commit import unfinished
from zinf_fx.checkpoint.files import FILES
from zinf_fx.checkpoint.safetensors_file import Kind, check_dtype
from zinf_fx.checkpoint.training.dequantising import Values, values_in
from zinf_fx.checkpoint.training.loading import check_files
from zinf_fx.checkpoint.training.manifest import Manifest
from zinf_fx.checkpoint.training.open_files import opened
from zinf_fx.checkpoint.training.reading import Reader
from zinf_fx.checkpoint.weight_files import ShardWriter, commit, in_groups, reserve, shards_for
from zinf_fx.errors import CheckpointError
from zinf_fx.runtime.memory.buffers import octets
from zinf_fx.runtime.tensor.boxes import Box


@dataclass(frozen=True)
class _Elements:
    """Elements of a tensor on their way to a file, where they are values."""

    values: Values
    memory: torch.Tensor
    writer: ShardWriter

    def wait(self) -> torch.Tensor:
        return self.memory

    def store(self) -> None:
        values = self.values.made_of(self.memory)
        self.writer.write(octets(values))

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class _InFile:
    """A whole tensor, as what comes next in a file."""

    values: Values
    writer: ShardWriter

    @property
    def box(self) -> Box:
        return Box.whole(self.values.saved.shape)

    @property
    def held(self) -> list[range]:
        return [range(self.box.numel)] if self.box.numel else []

    def chunks(self, elements: range) -> list[range]:
        return self.values.chunks  # what is held is all

    def open_for_writing(self, elements: range) -> _Elements:
        return _Elements(
            self.values, torch.empty(len(elements), dtype=self.values.saved.dtype, device="cpu"), self.writer
        )


def to_safetensors(
    source: Path,
    manifest: Manifest,
    part: str,
    target: Path,
    limit: int,
    report: Callable[[int], object],
) -> list[Path]:
    """Write the tensors of a part, such as "model", as `export_safetensors` does; returns the files. Other names of
    one tensor are left out. `limit`: bytes in a file. `report` is told of bytes that were written.

    Raises: CheckpointError, with nothing changed in `target`, when there is no such part, when it is damaged, or for
    what such files can't have; StoreError.
    """
    mine = [one.name for one in manifest.tensors if one.name.startswith(f"{part}/")]
    if not mine:
        names = sorted({tensor.part for tensor in manifest.tensors})
        raise CheckpointError(
            f"the checkpoint in {source} has no tensors of '{part}': it has those of {', '.join(names)}"
        )
    every = values_in(source, manifest, part)
    tensors = {name.removeprefix(f"{part}/"): every[name] for name in mine}
    check_files(source, manifest)
    kinds = {name: Kind(one.dtype, one.shape) for name, one in tensors.items()}
    for name, kind in kinds.items():
        check_dtype(kind.dtype, f"'{name}'")
    with ExitStack() as rooms:
        folder = rooms.enter_context(unfinished(target, FILES))
        shards = shards_for(in_groups(kinds, limit), folder, target)
        reserve(shards, FILES)
        writer = rooms.enter_context(closing(ShardWriter(FILES)))
        handles = rooms.enter_context(opened([source / file.path for file in manifest.files]))
        reader = rooms.enter_context(closing(Reader(handles, report)))
        for shard in shards:
            writer.begin(shard)
            for name in shard.places:
                reader.read(tensors[name].saved, _InFile(tensors[name], writer))
            reader.end()
        writer.finish()
        commit(shards, folder, target, FILES)
    return [target / shard.path.name for shard in shards]
