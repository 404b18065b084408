"""The Flax twins of the PyTorch reference models, and ports of well-known transformers.

`linen` and `nnx` hold the same four models with the same parameter names; `functions` the mathematics that they share;
`weights` moves parameters and gradients from PyTorch into either.

`llama`, `gpt2`, `bert`, `siglip` and `gemma` are ports of well-known transformers to Linen, made of the pieces in
`transformer`; `rules` has their weight maps.

`pi0` holds π0 and π0.5, OpenPI's policies, the twins of `examples.pytorch.Pi0`; their sizes are in `pi0_config`.
"""
