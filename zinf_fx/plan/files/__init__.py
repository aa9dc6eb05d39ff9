"""Plan files: what is read is checked before it is a plan."""
