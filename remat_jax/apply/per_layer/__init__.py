"""Policies by layer: blocks become marks, and the traced function is evaluated with a policy for each mark."""
