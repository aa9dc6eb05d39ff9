"""What other libraries need to know of zinf_fx, where they are installed."""
