"""When transfers start, what stays in memory, and where buffers lie."""
