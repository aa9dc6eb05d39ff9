"""The ranks that train one model together, and their collectives, on torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from zinf_fx.config import Config
from zinf_fx.errors import ConfigError, RanksError
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.memory.device import device_of
from zinf_fx.runtime.recorder import RECORDER, Note
from zinf_fx.runtime.rendezvous import Rendezvous
from zinf_fx.runtime.watchdog import DeviceWatchdog, QueuedCollective

T = TypeVar("T")

# Both names since torch 2.13, where the first ones are deprecated.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collective:
    """A collective under way. All ranks start theirs in the same order.

    Attributes:
        failed: whether it did. It may write to its tensors still.
    """

    def __init__(
        self,
        work: dist.Work | None,
        what: str,
        ranks: Ranks,
        rendezvous: Rendezvous,
        number: int,
        note: Note | None,
        queued: QueuedCollective | None,
        afterwards: Callable[[], object] | None,
    ) -> None:
        """`work`: None when it is over. `what` names it and the tile in errors. `number`: which it is in the group that
        this rendezvous is of. `note`: to end after a wait. `queued`: in the queue of a device; None of tensors in host
        memory, for which this thread waits. `afterwards`: what is left to do when it is over, if anything."""
        self._work, self._what, self._ranks, self._rendezvous, self._number = work, what, ranks, rendezvous, number
        self._note, self._queued, self._afterwards = note, queued, afterwards
        self.failed = False

    def wait(self) -> None:
        """Return when it is over. On a device, return at once: what is queued from now on follows it, and the log
        names it when it takes long.

        Raises: RanksError when it failed, each time, or took longer than `Config.collective_timeout`.
        """
        if self.failed:
            raise RanksError(f"{self._what} failed before on rank {self._ranks.rank} of {self._ranks.size}")
        if self._work is not None:
            work, self._work, self.failed = self._work, None, True
            timeout = self._ranks.timeout
            if self._queued is None:
                self._rendezvous.wait(work, self._what, self._number, timeout)
            else:
                with self._rendezvous.naming(self._what, timeout):
                    work.wait()  # a timeout, whichever, has NCCL keep this thread until the collective is over
                    self._queued.joined()
            if self._afterwards is not None:
                self._afterwards()
            self.failed, self._afterwards = False, None
            RECORDER.end(self._note)


class Ranks:
    """The ranks that train one model, in groups, and this process among them; without torch.distributed, one alone.

    Attributes:
        rank, size: this one's number, and how many there are, in all groups.
        shard, shards: the same in this rank's group, over which a model is divided.
        replicas: how many groups there are.
        timeout: seconds after which a collective that does not end is an error.
        sent_bytes: that this rank sent so far in collectives of model states, as a ring sends them: (shards - 1) shards
            of each all-gather and reduce-scatter, two parts of each all-reduce to each rank (ZeRO, section 7.1). An
            owner sends to each rank what it has, and gets from each what is reduced.
    """

    _known: ClassVar[dict[Any, dict[tuple, Ranks]]] = {}  # by group
    _lock = threading.Lock()

    def __init__(
        self,
        everyone: dist.ProcessGroup | None,
        timeout: float,
        within: dist.ProcessGroup | None = None,
        across: dist.ProcessGroup | None = None,
    ) -> None:
        """`within`: the ranks of this one's group, `across`: those with the same shard, of all groups; None: no others.

        All of `everyone` do this in the same order.
        """
        self._everyone, self._within, self._across = everyone, within, across
        self.rank, self.size = _place_in(everyone)
        self.shard, self.shards = _place_in(within)
        _, self.replicas = _place_in(across)
        self.timeout = timeout
        self.sent_bytes = 0
        self._decided: dict[str, Any] = {}
        self._device_watchdog = DeviceWatchdog(f"rank {self.rank} of {self.size}", timeout)
        self._everyone_meets: Rendezvous | None = None
        self._within_meets: Rendezvous | None = None
        self._by_group: dict[dist.ProcessGroup | None, Rendezvous] = {}
        if everyone is not None and self.size > 1:
            for group in filter(None, (everyone, within, across)):
                self._by_group[group] = Rendezvous.of(group, timeout)
            self._everyone_meets = self._by_group[everyone]
            self._within_meets = self._by_group[everyone if within is None else within]

    @classmethod
    def of(cls, config: Config) -> Ranks:
        """The ranks of a model with these options. All ranks call this in the same order.

        Raises: ConfigError for a process group that this process is not in.
        """
        cls._let_go_of_destroyed()
        group: Any = config.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        mesh: Any = config.mesh
        if mesh is not None:
            group = mesh.get_group(mesh.ndim - 1)
        if group is None:
            return ALONE
        if dist.get_rank(group) < 0:
            raise ConfigError("process_group is one that this process is not in: give each rank a group of its own")
        across = mesh.get_group(0) if mesh is not None and mesh.ndim == 2 else None
        nothing_partitioned = config.placement != "auto" and config.placement.stage == 0
        key = (config.collective_timeout, nothing_partitioned, across)
        with cls._lock:
            known = cls._known.setdefault(group, {})
            if key not in known:
                everyone = group if across is None or mesh is None else _all_of(mesh)
                groups = (None, everyone) if nothing_partitioned else (group, across)
                known[key] = cls(everyone, config.collective_timeout, *groups)
            return known[key]

    @classmethod
    def _let_go_of_destroyed(cls) -> None:
        """Forget ranks whose group torch.distributed has no more: they have another group, a thread and sockets."""
        with cls._lock:
            destroyed: list[object] = [cls._known.pop(group) for group in list(cls._known) if not _is_known(group)]
            for group in [group for group in list(Rendezvous.known) if not _is_known(group)]:
                destroyed.append(Rendezvous.known.pop(group))
        del destroyed  # without the lock

    @property
    def groups(self) -> Groups:
        """How they are grouped."""
        return Groups(self.replicas, self.shards)

    @classmethod
    def on(cls, group: dist.ProcessGroup) -> list[Ranks]:
        """Return the ranks that `of` has made for a group so far."""
        return list(cls._known.get(group, {}).values())

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor, what: str, owner: int | None = None) -> Collective:
        """Start to fill `full` with the `shard` of every rank of the group, in their order; of one that has an `owner`,
        with that one's. `shard` may be its own part of it."""
        if owner is not None:
            if self.shard == owner:
                self.sent_bytes += (self.shards - 1) * shard.nbytes
                if shard.data_ptr() != full.data_ptr():
                    full.copy_(shard)
            source = _global_rank(self._within, owner)
            return self._start("allgather", f"broadcast of {what}", full, dist.broadcast, self._within, full, source)
        self.sent_bytes += (self.shards - 1) * shard.nbytes
        octets = (tensor.view(-1).view(torch.uint8) for tensor in (full, shard))  # collectives don't have all dtypes
        return self._start("allgather", f"all-gather of {what}", full, _all_gather, self._within, *octets)

    def reduce(self, full: torch.Tensor, what: str, owner: int) -> Collective:
        """Start to sum `full` of every rank of the group, in place, to its owner; the others' values are lost."""
        self.sent_bytes += 0 if self.shard == owner else full.nbytes
        target = _global_rank(self._within, owner)
        return self._start("reduce_scatter", f"reduction of {what}", full, dist.reduce, self._within, full, target)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor, what: str) -> Collective:
        """Start to sum `full` of every rank of the group; `shard` gets this rank's part."""
        self.sent_bytes += (self.shards - 1) * shard.nbytes
        what = f"reduce-scatter of {what}"
        if full.device.type != "cpu":
            return self._start("reduce_scatter", what, full, _reduce_scatter, self._within, shard, full)
        # Gloo's own does this in its wait, which knows no time-out, and which nobody can give up.
        whole, own = full.reshape(-1).clone(), slice(self.shard * shard.numel(), (self.shard + 1) * shard.numel())
        return self._start(
            "reduce_scatter",
            what,
            whole,
            dist.all_reduce,
            self._within,
            whole,
            afterwards=lambda: shard.view(-1).copy_(whole[own]),
        )

    def all_reduce(self, shard: torch.Tensor, what: str) -> Collective:
        """Start to sum the `shard` of every group's rank that has the same one, in place."""
        self.sent_bytes += 2 * (self.replicas - 1) * -(-shard.nbytes // self.replicas)
        return self._start("all_reduce", f"all-reduce of {what}", shard, dist.all_reduce, self._across, shard)

    def reduce_over_shards(self, numbers: torch.Tensor, what: str, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `numbers` (few), one of which each rank of the group has for its shard, in place."""
        if self.shards > 1:
            what = f"all-reduce of {what}"
            self._start(None, what, numbers, dist.all_reduce, self._within, numbers, operation).wait()

    def reduce_over_all(self, number: torch.Tensor, what: str, operation: Any) -> None:
        """Reduce every rank's `number`, in place."""
        if self.size > 1:
            what = f"all-reduce of {what}"
            self._start(None, what, number, dist.all_reduce, self._everyone, number, operation).wait()

    def broadcast(self, value: torch.Tensor, what: str, among_shards: bool = True) -> None:
        """Overwrite `value`, of any dtype and strides, with that of the first of all ranks; or only of those with the
        same shard, of all groups."""
        group = self._everyone if among_shards else self._across
        if self.size == 1 or not value.numel():
            return
        for dim, stride in enumerate(value.stride()):
            if stride == 0:  # of an expanded tensor, each element once
                value = value.narrow(dim, 0, 1)
        flat = value.contiguous()
        source = _global_rank(group, 0)
        octets = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # dimensions of one have any stride
        self._start(None, f"broadcast of {what}", flat, dist.broadcast, group, octets, source).wait()
        if flat is not value:
            value.copy_(flat)

    def of_first(self, value: Any, what: str) -> Any:
        """The `value` of the first of all ranks: of what each finds out by itself, and all have to act upon alike."""
        return self._exchanged(value if self.rank == 0 else None, f"broadcast of {what}")[0]

    def of_all(self, value: Any, what: str) -> list[Any]:
        """The `value` of each rank. Raises: RanksError, on every rank, when one does not come to compare."""
        return self._exchanged(value, f"comparison of {what}")

    def _exchanged(self, value: Any, what: str) -> list[Any]:
        return [value] if self._everyone_meets is None else self._everyone_meets.exchange(value, what, self.timeout)

    def decided_once(self, key: str, decide: Callable[[], T]) -> T:
        """What the ranks have decided together for `key`: `decide`, in which they communicate, does it the first time
        alone, as one rank may need it again when the others don't."""
        if key not in self._decided:
            self._decided[key] = decide()
        return self._decided[key]

    def agree(self, value: str, what: str) -> None:
        """Compare `value` over all ranks.

        Raises: RanksError, on every rank, when they differ, or when a rank does not come to compare.
        """
        if self.size == 1:
            return
        values = self.of_all(value, what)
        if len(set(values)) > 1:
            by_rank = ", ".join(f"rank {rank}: {own}" for rank, own in enumerate(values))
            raise RanksError(
                f"ranks disagree about {what} ({by_rank}): all must hold the same model, options, package versions and "
                "input shapes, and compile in the same order"
            )

    def alike(self, numbers: Sequence[int], what: str) -> list[bool]:
        """Whether each of the numbers, below 2**63, is the same on all ranks, of which there are several. Raises:
        RanksError, as a collective."""
        assert self._everyone_meets is not None
        return self._everyone_meets.compare(numbers, f"comparison of {what}", self.timeout)

    def meet(self, what: str) -> None:
        """Return when all ranks ask for the same: before collectives of code outside of graphs. See [Note:
        rendezvous]."""
        if self._within_meets is not None:
            self._within_meets.meet(what, self.timeout)

    def _start(
        self,
        kind: str | None,
        what: str,
        moved: torch.Tensor,
        collective: Callable[..., dist.Work | None],
        group: dist.ProcessGroup | None,
        *arguments: Any,
        afterwards: Callable[[], object] | None = None,
    ) -> Collective:
        """Start a collective of torch.distributed, noted as `kind`, if any, which moves the bytes of `moved`.
        `afterwards`: what is left to do when it is over."""
        rendezvous = self._by_group[group]
        number = rendezvous.begin(what)
        note = None if kind is None else RECORDER.begin(kind, moved.nbytes, moved.device, what)
        with rendezvous.naming(what, self.timeout):
            work = collective(*arguments, group=group, async_op=True)
        note, queued = RECORDER.ends_with(note, work), None
        if moved.device.type != "cpu" and work is not None:
            queued = self._device_watchdog.add(work, what, device_of(moved.device).mark)
        return Collective(work, what, self, rendezvous, number, note, queued, afterwards)


def _place_in(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in a group, and the group's size."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    assert group is not None
    return dist.get_global_rank(group, rank)


def _is_known(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except KeyError:
        return False
    return True


def _all_of(mesh: dist.DeviceMesh) -> dist.ProcessGroup:
    """The ranks of a mesh, as one group."""
    members = sorted(mesh.mesh.flatten().tolist())
    if len(members) == dist.get_world_size():
        group = dist.group.WORLD
    else:
        group = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # for this process is a member
    return group


ALONE = Ranks(None, 1.0)
