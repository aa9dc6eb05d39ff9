"""Host and device memory, and who has which part of it."""
