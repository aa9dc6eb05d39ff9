"""Where bytes lie on disk, and how they get there."""
