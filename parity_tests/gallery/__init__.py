"""The models of `examples/others` at a small size, under policies: gradients, products and residuals."""
