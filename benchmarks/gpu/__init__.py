"""The byte decoder at a size that fills a large GPU: every mode and policy, in JAX and in PyTorch.

Every row runs in a process of its own, so that its peak is its own, the frameworks do not share the memory, and a row that
runs out of it is a row with an error.
"""
