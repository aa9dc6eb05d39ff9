"""`load_safetensors`: weights from files that any program wrote."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol, TypeGuard

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from zinf_fx.arguments import check_model, check_path
from zinf_fx.checkpoint.entries import FORMATS, of_format
from zinf_fx.checkpoint.export import INDEX, WHOLE
from zinf_fx.checkpoint.files import lies_within
from zinf_fx.checkpoint.manifest import MANIFEST, Manifest, SavedTensor, check_files, manifest_of
from zinf_fx.checkpoint.models import Everyone, as_named, names_of_tied, tensors_of, together, unwrapped
from zinf_fx.checkpoint.quantised_weights import Published, PublishedElements, as_published
from zinf_fx.checkpoint.safetensors_format import TensorInFile, TensorInfo, WeightFiles, places_in
from zinf_fx.config import shortened
from zinf_fx.errors import CheckpointError, ZinfError
from zinf_fx.interrupts import held_back, let_through
from zinf_fx.optim.elements import overwritten
from zinf_fx.plan.files.parsing import parsed
from zinf_fx.quantisation import tables_of
from zinf_fx.regular_files import check_regular, read_regular
from zinf_fx.runtime.tensor.quantised import Quantised
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor, as_parameter, bytes_of, stored_as, take_implementation
from zinf_fx.sizes import pieces_of

_SHOWN = 3  # of many names, in an error
_LARGEST_INDEX = 1 << 28  # bytes


@held_back
def load_safetensors(model: torch.nn.Module, path: str | Path) -> None:
    """Replace the model's parameters and buffers by those in a safetensors file, in a directory with one or several, or
    in the files that an index names.

    Names and shapes have to be those of the model's state dict; of tied weights, one name is enough. Values are
    converted to the model's dtypes, as `load_state_dict` does. Stored tensors take them in pieces of 16 MiB, with
    about two chunks (`Config.chunk`) on their way to the disk; of many ranks, each reads its own parts, of files that
    all of them find under the path.

    Weights that are published as codes and scales (FP8, MXFP4: see `checkpoint.published`) are taken by their values.
    A frozen parameter that was stored as it was, without `frozen_dtype`, takes the codes and scales themselves, row by
    row, unless it is a table of embeddings: it is quantised from then on.

    Raises: CheckpointError on every rank when the files don't fit the model, which is as before then, or when they
    can't be read to their end; StoreError.
    """
    check_model(model, "load_safetensors")
    check_path(path, "load_safetensors")
    wrapped, model, path = model, unwrapped(model), Path(path).absolute()
    tensors = tensors_of(model)
    everyone = Everyone(wrapped, tensors.values())
    with together("comparing weights with the model", *everyone.ranks):
        places, wrong = as_published(as_named(model, places_of(path), tensors), tensors)
        _check_fit(model, tensors, places, path, wrong)
    tables = tables_of(model.modules())
    with together("loading weights", *everyone.ranks), WeightFiles() as files:
        for name in sorted(places, key=lambda name: places[name].begin):
            let_through()
            tensor, place = tensors[name], places[name]
            if isinstance(place, Published) and _takes_codes(tensor, tables):
                _become(tensor, files, place)
            else:
                fill(tensor, files, place)


def _takes_codes(tensor: torch.Tensor, tables: Collection[int]) -> TypeGuard[StoredTensor]:
    """Whether a tensor is a frozen parameter that was stored without a format asked for. `tables`: ids of those that
    are looked up by rows."""
    if not isinstance(tensor, StoredTensor) or not isinstance(tensor, torch.nn.Parameter) or id(tensor) in tables:
        return False
    storage = tensor.stored
    is_whole = not tensor.views and tensor.parameter is tensor and not storage.shard.part_of
    changes = not tensor.requires_grad and tensor.grad is None and not storage.bytes.allocation.is_read_only
    return is_whole and changes and storage.config.frozen_dtype is None


def _become(tensor: StoredTensor, files: WeightFiles, published: Published) -> None:
    with torch.inference_mode(False):
        replacement = as_parameter(stored_as(tensor, quantised_as(published, tensor)))
    fill(replacement, files, published)
    take_implementation(tensor, replacement)


def places_of(path: Path) -> dict[str, TensorInFile]:
    """Return where each tensor is. Raises: CheckpointError."""
    candidates = (path / WHOLE, path / INDEX) if path.is_dir() else (path,)
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"'{path}' has no weights: give a safetensors file, an index, or a directory with '{WHOLE}' or '{INDEX}'"
        )
    if file.suffix != ".json":
        return places_in(file)
    weight_map = _weight_map(file)
    files = list(dict.fromkeys(weight_map.values()))
    by_file = {name: places_in(_file_of(file, name)) for name in files}
    missing = [name for name, its_file in weight_map.items() if name not in by_file[its_file]]
    if missing:
        raise CheckpointError(
            f"'{file}' names {_some(missing)}, which the files don't have: they are not of one checkpoint"
        )
    return {name: by_file[its_file][name] for name, its_file in weight_map.items()}


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        content = parsed(read_regular(index, _LARGEST_INDEX).decode(), "it", "index", CheckpointError)
        if not isinstance(content, dict) or not isinstance(weight_map := content.get("weight_map"), dict):
            raise CheckpointError('it has no field "weight_map" with the names of tensors')
        for name, file in weight_map.items():
            if not name.isprintable():
                raise CheckpointError(f"it has the name {shortened(name)}, which can't be printed")
            if not isinstance(file, str):
                _file_of(index, file)
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"'{index}' is no index of safetensors files: {error}. Give one, or a file") from error
    return weight_map


def _file_of(index: Path, name: object) -> Path:
    """Return the file that an index names. Raises: CheckpointError for what is none of its directory."""
    if not isinstance(name, str) or not lies_within(name):
        raise CheckpointError(f"'{index}' names {name!r}, which is no file in its directory: give another index")
    file = index.parent / name
    try:
        check_regular(os.stat(file), file)
    except FileNotFoundError:
        return file  # whose reader says so
    except OSError as error:
        raise CheckpointError(f"'{index}' names {shortened(name)}, which is no file: copy it anew") from error
    return file


def _check_fit(
    model: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    places: Mapping[str, TensorInFile | Published],
    path: Path,
    wrong: list[str],
) -> None:
    """Raises: CheckpointError unless each of the model's tensors has one value of its shape in the files, or if
    anything is `wrong` with them already."""
    if wrong:
        check_format(path)
        raise misfit(path, wrong)
    given = [names for names in names_of_tied(model, dict(tensors)) if any(name in places for name in names)]
    known = {name for names in given for name in names}
    if missing := [name for name in tensors if name not in known]:
        wrong.append(f"it lacks {_some(missing)}")
    if unexpected := [name for name in places if name not in tensors]:
        wrong.append(f"the model has no {_some(unexpected)}")
    for name, place in places.items():
        if name in tensors and tuple(tensors[name].shape) != place.shape:
            wrong.append(f"'{name}' is {place}, the model's has shape {list(tensors[name].shape)}")
        elif name in tensors and place.is_complex and not tensors[name].is_complex():
            wrong.append(f"'{name}' is {place}, the model's is real")
    if wrong:
        check_format(path)
        raise CheckpointError(
            f"'{path}' doesn't fit {type(model).__name__}: {_few(wrong)}. Nothing was loaded: give the checkpoint of "
            "this model, or rename its tensors"
        )


# The `quant_method` of a model's configuration, and the format of it where that is said, whose weights are read.
_READ = {"fp8": None, "mxfp4": None, "compressed-tensors": ("float-quantized", "int-quantized", "naive-quantized")}


def check_format(path: Path) -> None:
    """Check files that don't fit their model. Raises: CheckpointError where the configuration beside them says that
    they have a format that isn't read."""
    try:
        file = (path if path.is_dir() else path.parent) / "config.json"
        said = parsed(read_regular(file, _LARGEST_INDEX).decode(), str(file), "configuration", CheckpointError)
        said = said.get("quantization_config") or said["compression_config"]
        method, kind = said["quant_method"], said.get("format") or said.get("quant_algo")
    except (OSError, ZinfError, ValueError, LookupError, TypeError, AttributeError):  # it says nothing of a format
        return
    if method in _READ and (_READ[method] is None or kind in _READ[method]):
        return
    bits = f", {said['bits']} bits" if isinstance(said.get("bits"), int) else ""
    raise CheckpointError(
        f"'{path}' is quantised by {method!r}{f' ({kind})' if kind else ''}{bits}, as its config.json says, and this "
        "format is not supported: those of FP8, MXFP4 and int8 with a scale for each row are. Nothing was loaded: give "
        "the checkpoint that isn't quantised, whose frozen matrices frozen_dtype='nf4' keeps in 4 bits"
    )


def misfit(path: Path, wrong: list[str]) -> CheckpointError:
    """Return the error for files whose codes and scales don't fit each other, in these ways."""
    return CheckpointError(
        f"'{path}' has weights whose codes and scales don't fit each other: {_few(wrong)}. Nothing was loaded: copy it "
        "anew, or let the library that wrote it dequantise it"
    )


def _few(wrong: list[str]) -> str:
    return "; ".join(wrong[:_SHOWN]) + (f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_MODEL = "model"


def located(
    model: torch.nn.Module, path: Path, wanted: Mapping[str, torch.Tensor]
) -> dict[str, TensorInFile | Published]:
    """Return by name where the parameters and buffers of a model are: in a checkpoint that `save_checkpoint` wrote, or
    in safetensors files, as `load_safetensors` takes them. `wanted`: the model's, by their plain names.

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
    places: dict[str, TensorInFile | Published] = {}
    for whole, saved in manifest.by_name().items():
        part, _, name = whole.partition("/")
        if part == _MODEL:
            how = formats.get(name)
            quantised = None if how is None else of_format(how)
            file, offset = _in_one_piece(path, manifest, saved)
            places[name] = TensorInFile(file, TensorInfo(saved.dtype, saved.shape), offset, quantised)
    return as_named(model, places, wanted)


def _in_one_piece(path: Path, manifest: Manifest, saved: SavedTensor) -> tuple[Path, int]:
    """Return the file of a tensor's bytes, and the offset of the first. Raises: CheckpointError where they are
    scattered."""
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


class FileElements(Protocol):
    """The elements of a tensor that is in files, flat and in order."""

    dtype: torch.dtype

    def read(self, memory: torch.Tensor, first: int) -> None:
        """Fill contiguous `memory`, of this dtype, with the elements from number `first` on."""


class _InOrder:
    """The elements of a tensor that lie in a file as they are."""

    def __init__(self, place: TensorInFile, files: WeightFiles) -> None:
        self.dtype = place.kind.dtype
        self._place, self._files = place, files

    def read(self, memory: torch.Tensor, first: int) -> None:
        self._files.fill(memory, self._place, first * self.dtype.itemsize)


@torch.no_grad()
def fill(tensor: torch.Tensor, files: WeightFiles, place: TensorInFile | Published) -> None:
    """Replace all elements of a tensor by those at a place in files, converted to the tensor's dtype. What is
    published in the format that the tensor is quantised in keeps its codes and scales.

    Of a tensor that several ranks have parts of, every rank reads its own.
    Raises: CheckpointError for a file that is shorter by now, StoreError.
    """
    is_published = isinstance(place, Published)
    if (
        is_published
        and isinstance(tensor, StoredTensor)
        and tensor.views == quantised_as(place, tensor).steps(tensor.shape)
    ):
        _fill_stored(bytes_of(tensor), PublishedElements(place, files))
        return
    elements = PublishedElements(place, files, tensor.dtype) if is_published else _InOrder(place, files)
    if isinstance(tensor, StoredTensor) and not tensor.views and not (is_published and place.transposed):
        _fill_stored(tensor, elements)
        return
    shape = place.rows_shape if is_published else place.shape
    value = torch.empty(shape, dtype=elements.dtype, device="cpu")
    elements.read(value, 0)
    if is_published and place.transposed:
        value = value.mT
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


def quantised_as(published: Published, tensor: torch.Tensor) -> Quantised:
    """Return how the bytes of a published weight become the values of this tensor."""
    return Quantised(published.format, tensor.dtype, published.transposed)


def _fill_stored(tensor: StoredTensor, elements: FileElements) -> None:
    storage, shard = tensor.stored, tensor.stored.shard
    owned = shard.own if shard.partitioned else (range(storage.numel),)
    for part in (part for own in owned for part in pieces_of(own, storage.dtype.itemsize)):
        with overwritten(tensor, part) as memory:
            if elements.dtype == storage.dtype:
                elements.read(memory, part.start)
            else:
                read = torch.empty(len(part), dtype=elements.dtype, device="cpu")
                elements.read(read, part.start)
                memory.copy_(read)
    shard.stale = False
    shard.agreed = shard.ranks.size == 1
