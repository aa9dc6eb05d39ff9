"""What a plan takes of each memory, and where its buffers lie."""
