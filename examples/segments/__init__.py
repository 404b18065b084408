"""The experiment of `examples/deep_mlp.py`: a deep perceptron in segments, in PyTorch and in JAX, against closed forms.

`setting` has its sizes and rows, `torch_forms` and `jax_forms` the measurements, `depths` memory against depth and the two
rules of thumb, `command` the tables, the pictures and the command line.
"""
