"""Applies policies to classes, functions, blocks of a finished model, and existing checkpoint regions."""
