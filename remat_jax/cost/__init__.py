"""What a traced program costs: floating-point operations, bytes and seconds, kernel by kernel."""
