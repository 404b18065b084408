"""Weight maps between the ports in this folder's parent and the PyTorch models of `transformers`.

Each module has `rules(config, scan=False)`, for `remat_jax.porting.from_torch`, `to_torch` and the gradients' two ways.
"""
