"""Compiling a training step in processes of their own, for a GPU that is named or for the one that is there."""
