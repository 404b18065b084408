"""Training steps as people write them. Each file has a `train_step` and its `example_args`, and nothing of remat_jax."""
