"""What happened: counters, and recordings beside the plan."""
