"""The ports beside the code of the projects that they come from, which is imported from a checkout of theirs."""
