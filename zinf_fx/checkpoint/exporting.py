"""`export_safetensors`: a model's weights as the files that other programs read."""

from __future__ import annotations

import copy
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from zinf_fx.arguments import check_model, check_path
from zinf_fx.checkpoint.agreement import together
from zinf_fx.checkpoint.commit import unfinished
from zinf_fx.checkpoint.elements import values_of
from zinf_fx.checkpoint.files import FILES, Files
from zinf_fx.checkpoint.naming import Everyone, names_of_tied, tensors_of, unwrapped
from zinf_fx.checkpoint.safetensors_file import Kind, check_dtype
from zinf_fx.checkpoint.weight_files import ShardWriter, commit, in_groups, reserve, shards_for
from zinf_fx.config import parse_bytes
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.runtime.memory.buffers import octets


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
    """As `export_safetensors`, with `limit` bytes in a file."""
    wrapped, model = model, unwrapped(model)
    tensors = tensors_of(model)
    everyone = Everyone(wrapped, tensors.values())
    written = {names[0]: tensors[names[0]] for names in names_of_tied(model, tensors)}
    kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()}
    for name, kind in kinds.items():
        check_dtype(kind.dtype, f"'{name}'")
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
    """Of a model of transformers, what its `save_pretrained` says of it besides the weights."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    config = copy.copy(model.config)
    config.architectures, config.dtype = [type(model).__name__], str(model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
