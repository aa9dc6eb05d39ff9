"""A plan for people and for other programs: tables, curves, pictures, JSON."""
