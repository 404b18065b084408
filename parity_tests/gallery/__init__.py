"""The models of `examples/others`, small, under policies: gradients, products and residuals beside the model as written."""
