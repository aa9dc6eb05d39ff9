"""Planned graphs as programs that run."""
