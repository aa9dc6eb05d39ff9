"""Gathers become journeys, and gradients departures."""
