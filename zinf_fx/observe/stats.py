"""What a model's states have moved so far, and how long compute waited for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from zinf_fx import cuda
from zinf_fx.arguments import check_model
from zinf_fx.native.engine import IoCounters
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import stored_in
from zinf_fx.sizes import in_words
from zinf_fx.tables import table


@dataclass(frozen=True)
class Stats:
    """Measured since the job began; models that share a store share its counters. `print` shows a table.

    Attributes:
        bytes_read, bytes_written: bytes moved between NVMe and host memory, including optimizer states.
        read_seconds, write_seconds: seconds in which at least one block of that direction was under way.
        host_bytes: bytes of the host arena in use now.
        peak_host_bytes: bytes of the host arena that were in use at any time since the last plan was made, together: so
            many may be resident.
        planned_host_bytes: what the plans predict for this, one at a time; 0 before the first.
        device_arena_bytes, peak_device_arena_bytes, planned_device_arena_bytes: the same for the arenas of tiles on
            devices with memory of their own. What is planned is taken from the device, and what is placed elsewhere.
        placed_buffers, displaced_buffers: buffers that were placed as planned, and elsewhere, because another one had
            the place, as when graphs run in another order than planned.
        peak_device_bytes: bytes that PyTorch allocated at most on the parameters' CUDA devices, including activations.
        gathered_bytes: bytes of tiles that compute regions waited for, wherever the tiles live.
        stall_seconds: seconds in which compute waited for a tile.
        write_stall_seconds: seconds in which no write could start because too many were under way.
        sent_bytes: bytes that this rank sent to others in collectives of model states and of divided activations, as a
            ring sends them.
        parameters: stored parameters of the model.
        provider: what moves the bytes ("libaio", ...); None when nothing was ever placed on NVMe.
    """

    bytes_read: int = 0
    bytes_written: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    host_bytes: int = 0
    peak_host_bytes: int = 0
    planned_host_bytes: int = 0
    device_arena_bytes: int = 0
    peak_device_arena_bytes: int = 0
    planned_device_arena_bytes: int = 0
    placed_buffers: int = 0
    displaced_buffers: int = 0
    peak_device_bytes: int = 0
    gathered_bytes: int = 0
    stall_seconds: float = 0.0
    write_stall_seconds: float = 0.0
    sent_bytes: int = 0
    parameters: int = 0
    provider: str | None = None

    def __str__(self) -> str:
        rows = [
            ("NVMe -> host", in_words(self.bytes_read), *_time(self.bytes_read, self.read_seconds)),
            ("host -> NVMe", in_words(self.bytes_written), *_time(self.bytes_written, self.write_seconds)),
            ("gathered for compute", in_words(self.gathered_bytes)),
            *([("sent to other ranks", in_words(self.sent_bytes))] if self.sent_bytes else ()),
            ("compute waited for tiles", "", f"{self.stall_seconds:.3f} s"),
            ("waited for writes", "", f"{self.write_stall_seconds:.3f} s"),
            *_arena("host", self.host_bytes, self.peak_host_bytes, self.planned_host_bytes),
        ]
        if self.planned_device_arena_bytes:
            held = self.device_arena_bytes, self.peak_device_arena_bytes, self.planned_device_arena_bytes
            rows += _arena("device", *held)
        rows.append(("buffers where planned, and elsewhere", f"{self.placed_buffers:,}", f"{self.displaced_buffers:,}"))
        if self.peak_device_bytes:
            rows.append(("device at most", in_words(self.peak_device_bytes)))
        if not self.parameters:
            return (
                "no parameter of the model is stored, so nothing was counted: offload it, or compile it with "
                "backend='zinf' and a placement, and call it"
            )
        return f"{f'I/O by {self.provider}' if self.provider else 'nothing on NVMe'}\n{table(rows)}"


def _arena(name: str, now: int, peak: int, planned: int) -> list[tuple[str, str]]:
    held = {"now": now, "at most": peak, "at most, as planned": planned}
    return [(f"{name} arena {when}", in_words(nbytes)) for when, nbytes in held.items()]


def stats(model: torch.nn.Module) -> Stats:
    """Return the counters of the stored parameters of `model`, compiled or not; all 0 when it has none."""
    check_model(model, "stats")
    model = getattr(model, "_orig_mod", model)
    stored = [stored for parameter in model.parameters() for stored in stored_in(parameter)]
    all_tiers = dict.fromkeys(p.stored.tiers for p in stored if p.stored.bytes.allocation.is_reserved)
    stores = [tiers.store_in_use for tiers in all_tiers if tiers.store_in_use is not None]
    arenas = [arena for tiers in all_tiers for arena in tiers.device_arenas.values()]
    counters = [tiers.counters for tiers in all_tiers]
    moved = sum((store.counters() for store in stores), IoCounters())
    ranks = {p.stored.shard.ranks for p in stored}
    for mesh in {p.whole.device_mesh for p in stored if isinstance(p.whole, DTensor)}:
        ranks.update(on_group for group in mesh.get_all_groups() for on_group in Ranks.on(group))
    devices = {p.device for p in stored if p.device.type == "cuda"}
    return Stats(
        bytes_read=moved.bytes_read,
        bytes_written=moved.bytes_written,
        read_seconds=moved.read_seconds,
        write_seconds=moved.write_seconds,
        host_bytes=sum(tiers.host.in_use for tiers in all_tiers),
        peak_host_bytes=sum(tiers.host.touched for tiers in all_tiers),
        planned_host_bytes=sum(tiers.planned_peak for tiers in all_tiers),
        device_arena_bytes=sum(arena.in_use for arena in arenas),
        peak_device_arena_bytes=sum(arena.touched for arena in arenas),
        planned_device_arena_bytes=sum(arena.capacity for arena in arenas),
        placed_buffers=sum(counter.placed for counter in counters),
        displaced_buffers=sum(counter.displaced for counter in counters),
        peak_device_bytes=sum(map(cuda.peak_allocated_bytes, devices)),
        gathered_bytes=sum(counter.gathered_bytes for counter in counters),
        stall_seconds=sum(counter.stall_seconds for counter in counters),
        write_stall_seconds=sum(counter.write_stall_seconds for counter in counters),
        sent_bytes=sum(group.sent_bytes for group in ranks),
        parameters=len(stored),
        provider=", ".join(dict.fromkeys(store.provider for store in stores)) or None,
    )


def _time(nbytes: int, seconds: float) -> tuple[str, str]:
    """Return seconds in words, and the rate, if there is one."""
    return f"{seconds:.3f} s", f"{in_words(round(nbytes / seconds))}/s" if seconds else ""
