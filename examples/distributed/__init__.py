"""The parts of `examples/train_anywhere.py`: processes and mesh, the training step, checkpoints, metrics."""
