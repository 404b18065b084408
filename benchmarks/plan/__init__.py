"""Plans against what people use: every named policy, and MaxText's. `workloads` are the models, `rivals` the policies,
`rows` measures, `claims` judges, and `python -m benchmarks.plan` does it all."""
