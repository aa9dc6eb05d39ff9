"""Stored tensors, and the bytes behind them."""
