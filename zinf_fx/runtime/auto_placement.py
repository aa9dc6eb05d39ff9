"""`placement="auto"`: what fits stays resident (ZeRO-Infinity, section 7.1)."""

from __future__ import annotations

import logging

import torch

from zinf_fx.config import Config, Placement
from zinf_fx.runtime.tiers import physical_memory

log = logging.getLogger("zinf_fx")

# The share of memory that model states may take; the rest is for activations, buffers and the process itself.
_SHARE = 0.5
_OPTIMIZER_BYTES = 12  # fp32 master weight, first and second moment (ZeRO, section 3.1)


def choose(config: Config, parameters: list[torch.Tensor] | None) -> Placement:
    """The placement for a model of these parameters; None: a model of unknown size, whose states go to the store.

    Gradients and optimizer states leave first, then parameters, each to the fastest memory with room.
    On the CPU, device and host are one memory.
    """
    if parameters is None:
        placement = Placement("nvme", "host", "nvme")
        log.info("placement auto: the model is being built and its size unknown: parameters and optimizer on nvme")
        return placement
    host_room = min(filter(None, (config.host_memory, int(physical_memory() * _SHARE))))
    device = parameters[0].device if parameters else torch.device("cpu")
    has_memory = device.type == "cuda"
    device_memory = int(torch.cuda.get_device_properties(device).total_memory * _SHARE) if has_memory else host_room
    room = min(filter(None, (config.device_memory, device_memory)))
    trainable = [p for p in parameters if p.requires_grad]
    sizes = {
        "parameters": sum(p.numel() * p.element_size() for p in parameters),
        "gradients": sum(p.numel() * p.element_size() for p in trainable),
        "optimizer": sum(p.numel() * _OPTIMIZER_BYTES for p in trainable),
    }
    tiers = dict.fromkeys(sizes, "device")
    for state in ("optimizer", "gradients", "parameters"):
        if sum(size for name, size in sizes.items() if tiers[name] == "device") <= room:
            break
        if has_memory and sizes[state] <= host_room:
            tiers[state] = "host"
            host_room -= sizes[state]
        else:
            tiers[state] = "nvme"
    decided = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB) on {tier}" for name, tier in tiers.items())
    log.info("placement auto: %s; %.0f MiB may stay resident", decided, room / 2**20)
    return Placement(**tiers)
