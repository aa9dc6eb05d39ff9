"""What a pass is, and what all passes look at: nodes, aliases, text, and the specification of a graph."""
