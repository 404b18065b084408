"""The Flax twins of the PyTorch reference models.

`linen` and `nnx` hold the same four models with the same parameter names; `functions` the mathematics that they share;
`weights` moves parameters and gradients from PyTorch into either.
"""
