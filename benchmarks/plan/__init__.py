"""Compares plans with the policies that people use: every named policy, and MaxText's. `workloads` has the models, `rivals`
the policies, `rows` measures, `claims` judges; run `python -m benchmarks.plan`.
"""
