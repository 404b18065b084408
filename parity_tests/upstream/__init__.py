"""Compares the ports with the projects that they come from, which are imported from checkouts."""
