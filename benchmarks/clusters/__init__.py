"""Decoders on clusters of GPUs: what a training step needs of each device and host, what the devices send each other, the plan.
`cases` are the models, `rows` measures, `table` prints, and `python -m benchmarks.clusters` does it all."""
