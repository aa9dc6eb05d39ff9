"""Where model states live: the rule of section 7.1, and what is near its choice."""
