"""Published training steps compared with estimates for the same shapes: `cases` has the steps, `model` their decoder.

`python -m benchmarks.published` compiles each step for its GPUs, prints the estimated and the published time, and fails if more
than a sixth of the steps exceed a bound.
"""
