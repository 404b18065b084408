"""Applying policies: to classes, functions, blocks of a finished model, and checkpoint regions that are there already."""
