"""From `torch.compile` and `offload` to planned programs: what users call first."""
