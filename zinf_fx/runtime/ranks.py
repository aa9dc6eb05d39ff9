"""The ranks that train one model together, and their collectives, on torch.distributed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, RanksError

# Both names since torch 2.13, where the first ones are deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective:
    """A collective under way. All ranks start theirs in the same order.

    Attributes:
        failed: whether it did. It may write to its tensors still.
    """

    def __init__(self, work: dist.Work | None, what: str, ranks: Ranks) -> None:
        """`work`: None when it is over. `what` names it and the tile in errors."""
        self._work, self._what, self._ranks = work, what, ranks
        self.failed = False

    def wait(self) -> None:
        """Return when it is over (on CUDA: what is queued from now on follows it).

        Raises: RanksError when it failed, each time, or took longer than `Config.collective_timeout`.
        """
        if self.failed:
            raise RanksError(f"{self._what} failed before on rank {self._ranks.rank} of {self._ranks.size}")
        if self._work is not None:
            work, self._work, self.failed = self._work, None, True
            with self._ranks.naming(self._what):
                work.wait(self._ranks.timeout)
            self.failed = False


class Ranks:
    """A process group, and this process's rank in it; without torch.distributed, one rank alone.

    Attributes:
        rank, size: of the group.
        timeout: after which a collective that does not end is an error.
        sent_bytes: that this rank sent so far in collectives of model states, as a ring sends them: (size - 1) shards
            of each all-gather and reduce-scatter, twice as many of each all-reduce (ZeRO, section 7.1).
    """

    _known: ClassVar[weakref.WeakKeyDictionary[Any, dict[float, Ranks]]] = weakref.WeakKeyDictionary()
    _lock = threading.Lock()

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.timeout = timedelta(seconds=timeout)
        self.sent_bytes = 0
        # Agreement has a group of its own: a rank that waits in it does not take part in what others do in the first.
        members = None if group is None else dist.get_process_group_ranks(group)
        # Processes that are in no group, or in another one of the same kind, take no part in making it.
        self._agreement = (
            dist.new_group(members, self.timeout, "gloo", use_local_synchronization=True) if self.size > 1 else None
        )

    @classmethod
    def of(cls, config: Config) -> Ranks:
        """The ranks of a model with these options. All ranks call this in the same order.

        Raises: ConfigError for a process group that this process is not in.
        """
        group: Any = config.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            return ALONE
        if dist.get_rank(group) < 0:
            raise ConfigError("process_group is one that this process is not in: give each rank a group of its own")
        with cls._lock:
            by_timeout = cls._known.setdefault(group, {})
            ranks = by_timeout.get(config.collective_timeout)
            if ranks is None:
                ranks = by_timeout[config.collective_timeout] = cls(group, config.collective_timeout)
            return ranks

    @property
    def source(self) -> int:
        """The global rank of the group's first."""
        return dist.get_global_rank(self._group, 0)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str) -> Collective:
        """Start to fill `full` with every rank's `shard`, in the order of ranks. `shard` may be its own part of it."""
        self.sent_bytes += (self.size - 1) * shard.nbytes
        return self._start(lambda: _all_gather(full, shard, group=self._group, async_op=True), f"all-gather of {what}")

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, what: str) -> Collective:
        """Start to sum every rank's `full`; `shard` gets this rank's part."""
        self.sent_bytes += (self.size - 1) * shard.nbytes
        start = lambda: _reduce_scatter(shard, full, group=self._group, async_op=True)  # noqa: E731
        return self._start(start, f"reduce-scatter of {what}")

    def all_reduce(self, full: torch.Tensor, what: str) -> Collective:
        """Start to sum every rank's `full`, in place."""
        self.sent_bytes += 2 * (self.size - 1) * -(-full.nbytes // self.size)
        return self._start(lambda: dist.all_reduce(full, group=self._group, async_op=True), f"all-reduce of {what}")

    def reduce_number(self, number: torch.Tensor, what: str, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Every rank's `number` (a tensor of few elements) reduced, in place; returned."""
        if self.size > 1:
            with self.naming(f"all-reduce of {what}"):
                dist.all_reduce(number, operation, group=self._group)
        return number

    def broadcast(self, value: torch.Tensor, what: str) -> None:
        """Overwrite `value`, of any dtype and strides, with that of the group's first rank."""
        if self.size == 1 or not value.numel():
            return
        for dim, stride in enumerate(value.stride()):
            if stride == 0:  # of an expanded tensor, each element once
                value = value.narrow(dim, 0, 1)
        flat = value.contiguous()
        with self.naming(f"broadcast of {what}"):
            dist.broadcast(flat.view(-1).view(torch.uint8), self.source, group=self._group)
        if flat is not value:
            value.copy_(flat)

    def of_first(self, value: Any, what: str) -> Any:
        """The `value` of the group's first rank: of what each finds out by itself, and all have to act upon alike."""
        if self.size == 1:
            return value
        values = [value]
        with self.naming(f"broadcast of {what}"):
            dist.broadcast_object_list(values, self.source, group=self._agreement)
        return values[0]

    def agree(self, value: str, what: str) -> None:
        """Compare `value` over all ranks.

        Raises: RanksError, on every rank, when they differ, or when a rank does not come to compare.
        """
        if self.size == 1:
            return
        with self.naming(f"comparison of {what}"):
            dist.monitored_barrier(self._agreement, self.timeout, wait_all_ranks=True)
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value, group=self._agreement)
        if len(set(values)) > 1:
            by_rank = ", ".join(f"rank {rank}: {found}" for rank, found in enumerate(values))
            raise RanksError(
                f"ranks disagree about {what} ({by_rank}): all must hold the same model, options, package versions and "
                "input shapes, and compile in the same order"
            )

    def _start(self, start: Callable[[], dist.Work | None], what: str) -> Collective:
        with self.naming(what):
            return Collective(start(), what, self)

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Errors of torch.distributed in the block say which rank waited for what. Raises: RanksError."""
        try:
            yield
        except RanksError:
            raise
        except (RuntimeError, ValueError) as error:
            raise RanksError(
                f"{what} failed on rank {self.rank} of {self.size}: another rank ended, or does something else at this "
                f"point, or took longer than collective_timeout ({self.timeout.total_seconds():g} s). "
                f"torch.distributed says: {error}"
            ) from error


ALONE = Ranks(None, 1.0)
