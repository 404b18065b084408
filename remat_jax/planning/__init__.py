"""Planning a workload: what its blocks keep, what making that again costs, and which plan fits a budget."""

from __future__ import annotations
