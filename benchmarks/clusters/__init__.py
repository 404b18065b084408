"""Decoders on clusters of GPUs: what a training step needs on each device and host, what the devices send each other, and the
plan. `cases` has the models, `rows` measures, `table` prints; run `python -m benchmarks.clusters`.
"""
