"""Weight maps between the ports in this folder's parent and the models that they were made of.

Each module has `rules(config, scan=False)`, for `remat_jax.porting.from_torch`, `to_torch` and the gradients' two ways. Where
several projects have the model, each under names of its own, `names` says whose: `rules(config, names="diffsynth")`.
"""
