"""Compiles training steps in child processes, for a named GPU or for the attached one."""
