"""Published models at their true sizes: what a training step needs under each policy, and whether the plan for a card fits.
`cases` are the models, `rows` measures, `claims` judges, and `python -m benchmarks.true_shapes` does it all."""
