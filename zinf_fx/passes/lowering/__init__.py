"""Gathers become live ranges of tiles, and gradients are reduced and offloaded."""
