"""Public reports about checkpoints, offload, accumulation and memory, each as a small program of our own."""
