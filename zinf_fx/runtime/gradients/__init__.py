"""What arrives as a gradient, and where it goes."""
