"""What this machine is, how fast it is, and what would make it faster."""
