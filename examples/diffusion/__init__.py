"""Diffusion transformers trained in both frameworks and every mode; `examples/qwen_image.py` and `examples/wan.py` start it."""
