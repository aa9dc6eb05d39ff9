"""Parameters that are too large are divided into tiles."""
