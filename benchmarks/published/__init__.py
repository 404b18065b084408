"""Published training steps beside the estimate for the same shapes: `cases` are the steps, `model` the decoder they run.

`python -m benchmarks.published` compiles each for its GPUs, prints the estimate beside the published time, and fails where
either misses by more than its bound.
"""
