"""The Flax twins of the PyTorch reference models, and ports of well-known transformers.

`linen` and `nnx` hold the same four models with the same parameter names; `functions` the mathematics that they share;
`weights` moves parameters and gradients from PyTorch into either.

`llama`, `gpt2`, `bert`, `siglip` and `gemma` are ports of well-known transformers to Linen, made of the pieces in
`transformer`; `rules` has their weight maps.
"""
