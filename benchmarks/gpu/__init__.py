"""Steps on a GPU, in JAX and in PyTorch. `python -m benchmarks.gpu` holds the estimates of twelve steps against what they take;
`python -m benchmarks.gpu.modes` compares every mode and policy, gradients included, at a size that fills a large GPU.

Every row runs in a process of its own, so that its peak is its own, the frameworks do not share the memory, and a row that
runs out of it is a row with an error.
"""
