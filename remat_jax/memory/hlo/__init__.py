"""Reading the text of a compiled module: buffers, copies, collectives, time."""
