"""`placement="auto"` on this machine: what a rank has, what memories there are, and the rule alone."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from zinf_fx import cuda
from zinf_fx.adam import AdamStates
from zinf_fx.config import Config
from zinf_fx.frontend.parameters import form_of
from zinf_fx.machine.machine import ranks_per_node
from zinf_fx.placement import Placement, PlacementRules
from zinf_fx.plan.hardware import Hardware, load
from zinf_fx.plan.placement.decision import Decision, by_rule_alone, words
from zinf_fx.plan.placement.placing import Rooms, Sizes
from zinf_fx.plan.rates import NOMINAL_MACHINE
from zinf_fx.plan.sharding import Groups
from zinf_fx.runtime.disk.filesystem import file_system_of, one_per_device
from zinf_fx.runtime.disk.measure import load_profile
from zinf_fx.runtime.memory.process import memory_limit
from zinf_fx.runtime.ranks import Ranks
from zinf_fx.runtime.tensor.local_parameter import local_part

log = logging.getLogger("zinf_fx")

# Whose rates stand for those of a CUDA device here, as long as none are measured.
_NOMINAL_DEVICE = "rtx-4090"


def placed_by_rule(
    config: Config, parameters: Sequence[torch.Tensor] | None, tables: Collection[int] = ()
) -> Placement | PlacementRules:
    """The placement for a model of these parameters, by the rule alone; None: a model of unknown size, whose states go
    to the store. `tables`: as in `sizes_of`.

    Raises: BudgetError when no memory has room.
    """
    if parameters is None:
        log.info(
            "placement auto: parameters on nvme, gradients on host, optimizer on nvme, activations on device: "
            "the model is being built, and its size unknown"
        )
        return Placement("nvme", "host", "nvme")
    here, groups = trained_here(parameters), Ranks.of(config).groups
    sizes = sizes_of(here, config, groups, tables)
    decision = by_rule_here(config, here, groups, sizes, "inputs are not known")
    note(decision, sizes)
    return decision.placement


def by_rule_here(
    config: Config, parameters: Sequence[torch.Tensor], groups: Groups, sizes: Sizes, why: str
) -> Decision:
    """What the rule decides for this machine, where activations are unknown. Raises: BudgetError."""
    hardware = this_machine(config, device_of_most(parameters))
    rooms = Rooms.of(hardware, config, groups.ranks, None)
    return by_rule_alone(sizes, rooms, hardware.name, why)


def note(decision: Decision, sizes: Sizes) -> None:
    """Log what was decided."""
    log.info("placement auto: %s: %s", words(decision.placement, sizes), decision.reason)


def sizes_of(parameters: Sequence[torch.Tensor], config: Config, groups: Groups, tables: Collection[int] = ()) -> Sizes:
    """Return the sizes of the states that one rank has, as they are to be stored, with everything partitioned over its
    group. `tables`: ids of parameters that are looked up by rows."""

    def part(nbytes: int) -> int:
        return -(-nbytes // groups.shards)

    def stored(trains: bool) -> int:
        return sum(form_of(p, config, tables).nbytes for p in parameters if p.requires_grad is trains)

    trained, frozen = stored(True), stored(False)
    states = int(sum(p.numel() * AdamStates(p.dtype.itemsize).nbytes for p in parameters if p.requires_grad))
    if 0 < trained < frozen:
        return Sizes(part(trained), part(trained), part(states), frozen=part(frozen))
    return Sizes(part(trained + frozen), part(trained), part(states))


def trained_here(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank has of each parameter where tensor parallelism divides them."""
    return [
        local_part(parameter).detach().requires_grad_(parameter.requires_grad)
        if isinstance(parameter, DTensor)
        else parameter
        for parameter in parameters
    ]


def device_of_most(parameters: Sequence[torch.Tensor]) -> torch.device:
    """Where a model computes: on the CPU, if it is on the meta device."""
    device = next((p.device for p in parameters), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def this_machine(config: Config, device: torch.device) -> Hardware:
    """This machine: its memories, and nominal rates; of the disks, those that `zinf-fx bench-io` stored, if it did
    for each."""
    on_cpu = device.type != "cuda"
    ranks = ranks_per_node(device)
    machine = NOMINAL_MACHINE if on_cpu else load(_NOMINAL_DEVICE)
    own = memory_limit().nbytes // ranks if on_cpu else cuda.total_memory(device)
    stores = one_per_device(map(_existing, config.stores))
    disks = replace(machine.nvme, capacity=sum(file_system_of(store).free for store in stores))
    profiles = [profile for store in stores if (profile := load_profile(store)) is not None]
    if len(profiles) == len(stores):
        disks = replace(
            disks, read=sum(profile.read for profile in profiles), write=sum(profile.write for profile in profiles)
        )
    return replace(
        machine,
        name="this machine, at nominal rates",
        ranks_per_node=ranks,
        device=replace(machine.device, capacity=own),
        host=replace(machine.host, capacity=0 if on_cpu else memory_limit().nbytes),
        nvme=disks,
    )


def _existing(path: Path) -> Path:
    """The directory, or where it is going to be made."""
    path = path.absolute()
    return next(directory for directory in (path, *path.parents) if directory.is_dir())
