"""Weight maps between the ports in the parent folder and their originals.

Each module has `rules(config, scan=False)`, for `remat_jax.porting.from_torch`, `to_torch` and both directions of gradients.
If several projects publish the model under different names, `names` selects the project: `rules(config, names="diffsynth")`.
"""
