"""What the parts of a training have in common: they give tensors and plain values, and take them back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any, Protocol

import torch

from zinf_fx.checkpoint.training.holdings import Holding
from zinf_fx.checkpoint.training.manifest import SavedTensor
from zinf_fx.errors import CheckpointError
from zinf_fx.native.engine import crc32c_at

_SHOWN = 6


class Part(Protocol):
    """A model, an optimizer, or anything else that is saved under a name of its own.

    Attributes:
        kind: what it is, in the manifest.
    """

    kind: str

    def collect(self, collected: Collected) -> dict[str, Any]:
        """Give all tensors; returns the plain values, as JSON has them. Raises: CheckpointError."""

    def match(self, values: Mapping[str, Any], matching: Matching) -> None:
        """Find where what was saved belongs, and note what doesn't. Nothing is changed yet.

        Raises: CheckpointError for values that can't be read.
        """


class Collected:
    """The tensors that a rank of `ranks` is to save.

    Attributes:
        tensors: by name, in the order in which they come.
        same: names of those that are others too, with the names of these.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.tensors: dict[str, Holding] = {}
        self.same: dict[str, str] = {}
        self._names: dict[tuple, str] = {}

    def add(self, tensor: torch.Tensor, name: str) -> str:
        """Save a tensor under a name, which is returned. Raises: CheckpointError for a tensor that can't be."""
        if not name.isprintable():
            raise CheckpointError(f"{name!r} can't be saved: its name has characters that can't be printed; rename it")
        if name in self.tensors or name in self.same:
            raise CheckpointError(f"two tensors to save have the name '{name}': rename one")
        holding = Holding.of(tensor, name)
        first = self._names.setdefault(holding.identity, name)
        if first == name:
            self.tensors[name] = holding
        else:
            self.same[name] = first
        return name

    def keep(self, tensor: torch.Tensor, name: str) -> str:
        """The same, of a tensor among plain values. One that may be another on each rank gets another name there."""
        if self.ranks > 1 and type(tensor) is torch.Tensor:
            flat = tensor.detach().cpu().contiguous()
            name = f"{name}@{crc32c_at(flat.data_ptr(), flat.nbytes):08x}"
        return self.add(tensor, name)


class Matching:
    """Where the tensors of a checkpoint belong, what is done before and after they are read, and what doesn't fit.

    Attributes:
        left_out: how the names of parameters of models that are left out begin.
        rank, ranks: this one's number, and how many there are; `ranks_then`: how many there were.
        targets: what is to be read, and for what.
        begin, end: what is done before and after the tensors are read; what can fail is done before.
        differences: between the checkpoint and what is to be loaded, in words, besides those of tensors.
        wanted: the names of tensors that were asked for; `prefixes`: how those begin of which all have to be.
    """

    def __init__(
        self, saved: Mapping[str, SavedTensor], left_out: Iterable[str], rank: int, ranks: int, ranks_then: int
    ) -> None:
        """`left_out`: the names of parts."""
        self.left_out = tuple(f"{name}/" for name in left_out)
        self.rank, self.ranks, self.ranks_then = rank, ranks, ranks_then
        self.targets: list[tuple[SavedTensor, Holding]] = []
        self.begin: list[Callable[[], None]] = []
        self.end: list[Callable[[], None]] = []
        self.differences: list[str] = []
        self._of_tensors: list[str] = []
        self.wanted: set[str] = set()
        self.prefixes: list[str] = []
        self._saved = saved
        self._taken: dict[tuple, tuple[str, str]] = {}

    def saved(self, name: str) -> SavedTensor:
        """The tensor of this name. Raises: CheckpointError if the checkpoint has none."""
        if name not in self._saved:
            raise CheckpointError(f"the checkpoint names a tensor '{name}' that it doesn't have: it is damaged")
        return self._saved[name]

    def pass_over(self, names: Set[str]) -> None:
        """Tensors of these names, also of one rank alone, are in the checkpoint, and nobody is to have them."""
        self.wanted |= {one for one in self._saved if one in names or one.rpartition("@")[0] in names}

    def all_differences(self, wanted: Collection[str]) -> list[str]:
        """Those of tensors, which others follow from, first. `wanted`: the names that any rank wants."""
        of_parts = (name for name in self._saved if name.startswith(tuple(self.prefixes)))
        unexpected = (f"'{name}' is in the checkpoint alone" for name in of_parts if name not in wanted)
        return [*self._of_tensors, *unexpected, *self.differences]

    def in_memory(self, name: str) -> torch.Tensor:
        """An ordinary tensor into which the saved one of this name is read."""
        saved = self.saved(name)
        if name in self.wanted:
            raise CheckpointError(f"the checkpoint names the tensor '{name}' twice: it is damaged")
        tensor = torch.empty(saved.shape, dtype=saved.dtype, device="cpu")
        self.target(name, tensor)
        return tensor

    def target(self, name: str, tensor: torch.Tensor) -> None:
        """Let the saved tensor `name` be read into `tensor`, if it fits."""
        self.wanted.add(name)
        if name not in self._saved:
            self._of_tensors.append(f"'{name}' is not in the checkpoint")
            return
        saved, holding = self._saved[name], Holding.of(tensor, name)
        if saved.shape != holding.shape:
            self._of_tensors.append(f"'{name}' has shape {holding.shape}, and {saved.shape} in the checkpoint")
        elif saved.dtype != holding.dtype:
            self._of_tensors.append(f"'{name}' has dtype {holding.dtype}, and {saved.dtype} in the checkpoint")
        else:
            other, source = self._taken.setdefault(holding.identity, (name, saved.name))
            if other == name:
                self.targets.append((saved, holding))
            elif source != saved.name:
                self._of_tensors.append(f"'{name}' and '{other}' are one tensor, and two in the checkpoint")

    def compare(self, what: str, mine: Iterable[str], saved: Iterable[str]) -> None:
        """Note which names are on one side only."""
        mine, saved = dict.fromkeys(mine), dict.fromkeys(saved)
        self.differences += [f"{what} '{name}' is not in the checkpoint" for name in mine if name not in saved]
        self.differences += [f"{what} '{name}' is in the checkpoint alone" for name in saved if name not in mine]


def listed(differences: list[str]) -> str:
    """The first of some differences, in words."""
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return "; ".join(differences[:_SHOWN]) + more
