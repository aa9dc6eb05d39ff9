"""Simulate how long a plan takes on given hardware."""
