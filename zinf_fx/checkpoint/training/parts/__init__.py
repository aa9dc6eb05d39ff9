"""What a training consists of: for each kind of thing, what of it is saved, and how it is loaded."""
