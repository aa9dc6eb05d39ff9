"""States become codes of 8 bits or split masters, and these states, a chunk at a time, where one kind is loaded into
the other."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from zinf_fx.interrupts import held_back, let_through
from zinf_fx.optim import blockwise, split
from zinf_fx.optim.companions import MASTER, companion_of, kind_of, part_of
from zinf_fx.optim.elements import current_chunks, divided_as, open_elements, overwritten
from zinf_fx.runtime.memory.device import CPU
from zinf_fx.runtime.tensor.stored_tensor import StoredTensor


@held_back
def encode_into(name: str, target: StoredTensor, companion: StoredTensor, value: torch.Tensor) -> None:
    """Write the value of a state, stored or not, in fewer bytes, with its companion."""
    value = divided_as(target, value)
    for part in filter(len, current_chunks(target, torch.float32.itemsize)):
        let_through()
        with ExitStack() as windows:
            source = open_elements(value, CPU, part.start, len(part))
            windows.callback(source.close)
            beside = _beside(name, part)
            found = [windows.enter_context(overwritten(*one)) for one in ((target, part), (companion, beside))]
            values = source.wait().to(torch.float32)
            if name == MASTER:
                split.split(values, values.to(torch.bfloat16), *found)
            else:
                blockwise.encode(name, values, *found)


@held_back
def decode_into(
    name: str, target: StoredTensor, value: torch.Tensor, companion: torch.Tensor, parameter: StoredTensor
) -> None:
    """Write the values of a state in fewer bytes with its companion, stored or not. `parameter`: whose it is."""
    each = kind_of(companion_of(name), (name,)).elements
    value = divided_as(target, value)
    companion = divided_as(target, companion, target.storage.share.shards.in_blocks(each))
    for part in filter(len, current_chunks(target, torch.float32.itemsize)):
        let_through()
        with ExitStack() as windows:
            beside = _beside(name, part)
            several = [(value, part), (companion, beside), *([(parameter, part)] if name == MASTER else [])]
            sources = [open_elements(one, CPU, some.start, len(some)) for one, some in several]
            for source in sources:
                windows.callback(source.close)
            elements = windows.enter_context(overwritten(target, part))
            found, values = (
                [source.wait() for source in sources],
                torch.empty(len(part), dtype=torch.float32, device="cpu"),
            )
            if name == MASTER:
                *kept, weights = found
                elements.copy_(split.join(weights, *kept, values))
            else:
                elements.copy_(blockwise.decode(name, *found, values))


def _beside(name: str, part: range) -> range:
    """Of the companion of state `name`, what belongs to some elements."""
    return part_of(companion_of(name), (name,), part)
