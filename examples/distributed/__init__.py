"""What `examples/train_anywhere.py` is made of: processes and mesh, the training step, checkpoints, metrics."""
