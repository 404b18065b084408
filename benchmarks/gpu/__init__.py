"""Steps on a GPU, in JAX and in PyTorch. `python -m benchmarks.gpu` compares the estimates of sixteen steps with measurements;
`python -m benchmarks.gpu.modes` compares every mode and policy, gradients included, at a size that fills a large GPU.

Every row runs in its own process. So no row raises another row's peak, the frameworks do not compete for memory, and a row that
runs out of memory becomes a row with an error.
"""
