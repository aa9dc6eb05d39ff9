"""What is saved for backward: kept, computed again, or sent away."""
