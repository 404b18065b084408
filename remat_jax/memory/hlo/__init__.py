"""Reading the text of a compiled module: its buffers and copies."""
