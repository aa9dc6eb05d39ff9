"""How long a plan takes on given hardware."""
