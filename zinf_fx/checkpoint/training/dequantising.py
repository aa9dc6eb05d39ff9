"""The tensors of a part as other programs are given them: values, where the checkpoint has the bytes of a format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from zinf_fx.checkpoint.training.manifest import Manifest, SavedTensor
from zinf_fx.checkpoint.training.parts.module import COMPOSED, FORMATS, SHAPES, of_format
from zinf_fx.errors import CheckpointError
from zinf_fx.quantisation import dequantised
from zinf_fx.runtime.tensor.boxes import Box
from zinf_fx.runtime.tensor.quantised import Quantised
from zinf_fx.sizes import PIECE, pieces_of


@dataclass(frozen=True)
class Values:
    """A saved tensor as other programs are given it.

    Attributes:
        shape: of the values.
        how: how the bytes that are saved become values; None: values are saved.
    """

    saved: SavedTensor
    shape: tuple[int, ...]
    how: Quantised | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.saved.dtype if self.how is None else self.how.dtype

    @property
    def chunks(self) -> list[range]:
        """All elements that are saved, in parts that are looked at one after the other."""
        whole = Box.whole(self.saved.shape)
        if self.how is None:
            return pieces_of(range(whole.numel), self.dtype.itemsize)
        return [whole.hull(self.source(box)) for box in self.boxes]

    @property
    def boxes(self) -> list[Box]:
        """All values, in such parts: of a quantised tensor some rows each, or all where its rows are columns of what
        is saved; of any other as the pieces are that it is in."""
        whole = Box.whole(self.shape)
        if self.how is None:
            pieces = ((one.box, piece.elements) for one in self.saved.boxes for piece in one.pieces)
            return [box for saved, elements in pieces for box in saved.boxes_of(elements)] or [whole]
        if self.how.transposed:
            return [whole]
        rows, *inner = self.shape
        each = max(PIECE // (whole.numel // rows * self.dtype.itemsize), 1)
        starts = range(0, rows, each)
        return [Box((row, *(0 for _ in inner)), (min(each, rows - row), *inner)) for row in starts]

    def source(self, box: Box) -> Box:
        """The part of what is saved that a part of the values is made of: one of `boxes`, or all."""
        if self.how is None:
            return box
        if self.how.transposed:
            return Box.whole(self.saved.shape)
        return Box((box.offsets[0], 0), (box.shape[0], self.saved.shape[1]))

    def made_of(self, elements: torch.Tensor) -> torch.Tensor:
        """The values that such a part of what is saved stands for: both flat."""
        if self.how is None:
            return elements
        packed = elements.view(-1, self.saved.shape[1])
        values = dequantised(packed, self.how.rows_of(self.shape)[1:], self.how.format, self.how.dtype)
        return (values.mT if self.how.transposed else values).reshape(-1)


def values_in(source: Path, manifest: Manifest, part: str) -> dict[str, Values]:
    """All tensors by all of their names; those of a part are given as values.

    Raises: CheckpointError for what has none that are known without the model.
    """
    found = {name: Values(saved, saved.shape) for name, saved in manifest.by_name().items()}
    content = manifest.values.get(part, {})
    for values in filter(None, content.get("ranks", [content])):  # some ranks may not have the part
        for name, (kind, *_) in values.get(COMPOSED, {}).items():
            raise CheckpointError(
                f"converting {source} was refused: '{part}/{name}' is a {kind}, and saved are the tensors that it is "
                "made of, whose values only its class knows: load the checkpoint into the model, make an ordinary "
                "tensor of it, and use export_safetensors()"
            )
        for name, how in values.get(FORMATS, {}).items():
            shape = values.get(SHAPES, {}).get(name)
            if shape is None:
                raise CheckpointError(
                    f"converting {source} was refused: '{part}/{name}' is quantised as {how[0]}, and its shape is not "
                    "in the manifest: load the checkpoint into the model, and use export_safetensors()"
                )
            saved = found[f"{part}/{name}"].saved
            found[f"{part}/{name}"] = Values(saved, tuple(shape), of_format(how))
    return found
