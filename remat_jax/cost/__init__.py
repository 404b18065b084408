"""The cost of a traced program: floating-point operations, bytes and seconds, kernel by kernel."""
