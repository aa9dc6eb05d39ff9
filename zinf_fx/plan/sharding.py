"""How ranks are grouped, and how the elements of a tensor are divided over those of a group: in equal parts, so that
every rank's link and disk works on every tile (bandwidth-centric partitioning; ZeRO-Infinity, section 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

# Shards of what may live on NVMe are whole blocks of the store in every dtype of at least two bytes; others are whole
# vectors, for kernels.
_NVME_ELEMENTS = 2048
_MEMORY_ELEMENTS = 16


@dataclass(frozen=True)
class Groups:
    """`replicas` groups of `shards` ranks each: a group has all of a model, divided over its ranks.

    With one group, everything is partitioned over all ranks. With several, as of the ranks of a node each, what is
    partitioned is gathered within a group (hybrid sharding). Where nothing is partitioned, in data parallelism, each
    rank is a group by itself.
    """

    replicas: int = 1
    shards: int = 1

    @classmethod
    def of(cls, ranks: int, replicas: int, stage: int) -> Groups:
        """The grouping of so many ranks, of which `replicas` are to divide into groups, at a stage of ZeRO."""
        return cls(ranks, 1) if stage == 0 else cls(replicas, ranks // replicas)

    @property
    def ranks(self) -> int:
        """Of all groups."""
        return self.replicas * self.shards

    def __str__(self) -> str:
        return f"{self.ranks} rank(s)" + (f" in {self.replicas} groups" if 1 < self.replicas < self.ranks else "")


@dataclass(frozen=True)
class Shards:
    """`numel` elements, flat, in `ranks` shards of `size` elements each; behind the last element follows padding."""

    numel: int
    ranks: int
    size: int

    @classmethod
    def of(cls, numel: int, ranks: int, on_nvme: bool) -> Shards:
        """The division over so many ranks. `on_nvme`: whether any state of the parameter lives there: all of them are
        divided alike."""
        if ranks == 1:
            return cls(numel, 1, numel)
        step = _NVME_ELEMENTS if on_nvme else _MEMORY_ELEMENTS
        return cls(numel, ranks, -(-numel // (ranks * step)) * step)

    @property
    def padded(self) -> int:
        """Elements of all shards together."""
        return self.ranks * self.size

    def of_rank(self, rank: int) -> range:
        """The elements of one rank's shard, without padding: none of small tensors for the last ranks."""
        return range(min(rank * self.size, self.numel), min((rank + 1) * self.size, self.numel))
