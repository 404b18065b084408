"""Comparisons and measurements. `python -m benchmarks` needs no GPU, `python -m benchmarks.gpu` needs one."""
