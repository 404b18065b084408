"""Measurements against peers and on GPUs. `python -m benchmarks` needs no GPU, `python -m benchmarks.gpu` one."""
