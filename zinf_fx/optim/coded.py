"""States become codes of 8 bits, and codes states, a chunk at a time, where one kind is loaded into the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import torch

from zinf_fx.interrupts import held_back, let_through
from zinf_fx.optim.blockwise import blocks_of, decode, encode
from zinf_fx.optim.elements import open_elements, overwritten
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor
from zinf_fx.sizes import pieces_of


@held_back
def encode_into(name: str, codes: StoredTensor, scales: StoredTensor, value: torch.Tensor) -> None:
    """Write the codes and the scales of a state's value, stored or not."""
    (value,) = _divided_as(codes, [value])
    for part in _parts(codes):
        with ExitStack() as windows:
            source = open_elements(value, CPU, part.start, len(part))
            windows.callback(source.close)
            found = [windows.enter_context(overwritten(*one)) for one in ((codes, part), (scales, blocks_of(part)))]
            encode(name, source.wait().to(torch.float32), *found)


@held_back
def decode_into(name: str, target: StoredTensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the values of a state's codes and scales, stored or not."""
    codes, scales = _divided_as(target, [codes, scales])
    for part in _parts(target):
        with ExitStack() as windows:
            sources = [
                open_elements(one, CPU, p.start, len(p)) for one, p in ((codes, part), (scales, blocks_of(part)))
            ]
            for source in sources:
                windows.callback(source.close)
            elements = windows.enter_context(overwritten(target, part))
            found = [source.wait() for source in sources]
            elements.copy_(decode(name, *found, torch.empty(len(part))))


def _parts(tensor: StoredTensor) -> Iterator[range]:
    """Consecutive elements that this rank has the present version of, of about `Config.chunk` bytes in fp32 each."""
    for current in tensor.storage.share.current:
        for part in pieces_of(current, torch.float32.itemsize, tensor.storage.config.chunk):
            let_through()
            if part:
                yield part


def _divided_as(target: StoredTensor, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values; those whole that may be divided over other ranks than the target's."""
    mine = target.storage.share

    def divided(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, StoredTensor):
            return value
        theirs, shards = value.storage.share, mine.shards if value.shape == target.shape else mine.shards.in_blocks()
        alike = (theirs.partitioned and theirs.shards) == (mine.partitioned and shards)
        return value if alike else value.full_tensor()

    return [divided(value) for value in values]
