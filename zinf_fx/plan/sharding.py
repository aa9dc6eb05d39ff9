"""How the elements of a tensor are divided over ranks: in equal parts, so that every rank's link and disk works on
every tile (bandwidth-centric partitioning; ZeRO-Infinity, section 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

# Shards of what may live on NVMe are whole blocks of the store in every dtype of at least two bytes; others are whole
# vectors, for kernels.
_NVME_ELEMENTS = 2048
_MEMORY_ELEMENTS = 16


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
