"""Published models at their true sizes: what a training step needs under each policy, and whether the plan for a card fits.
`cases` has the models, `rows` measures, `claims` judges; run `python -m benchmarks.true_shapes`.
"""
