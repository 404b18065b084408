"""What the text of a compiled module says: buffers, copies, collectives, time."""
