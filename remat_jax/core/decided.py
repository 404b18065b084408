"""What a policy decides in a block: the names that it saves and offloads, and the `jax.checkpoint` policy made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from remat_jax import compat
from remat_jax.core.naming import Named
from remat_jax.policy import Action, Policy


def decide(named: Named, policy: Policy) -> tuple[frozenset[str], frozenset[str]]:
    """The names that `policy` saves, and the names that it offloads."""
    saved, offloaded = set(), set()
    for name, candidate in named.candidates.items():
        action = policy.action(candidate)
        shape = named.shapes[name]
        if action is Action.OFFLOAD and shape != () and 0 not in shape:
            offloaded.add(name)
        elif action is not Action.RECOMPUTE and not candidate.is_input:
            # A checkpoint keeps its inputs anyway. A scalar or an empty array that the policy offloads is saved instead.
            saved.add(name)
    return frozenset(saved), frozenset(offloaded)


@dataclass(frozen=True)
class NamesPolicy:
    """A `jax.checkpoint` policy made of two sets of names. Policies with equal sets are equal, so JAX's caches hit."""

    saved: frozenset[str]
    offloaded: frozenset[str]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> object:
        """Whether the result of an equation is saved, or JAX's object for an offload."""
        if primitive.name in _PRINTS:
            # Never recompute a print: JAX raises a KeyError if a recomputed print reads an array that the policy keeps.
            return True
        if primitive.name != "name":
            return False
        name = params["name"]
        if name in self.offloaded and not compat.is_on_host(avals[0]):
            return compat.OFFLOAD
        # An array that a block inside this block has offloaded is saved where it is, in host memory.
        return name in self.saved or name in self.offloaded


_PRINTS = frozenset({"debug_callback", "debug_print"})
