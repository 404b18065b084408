"""Names and linearises identical layers once. Later layers reuse the names and the linearisation, with their own module path.

Two blocks are identical if their jaxprs differ only in the module path, and in the numbers that Flax makes from the path and
folds into random keys. Renaming a linearisation does not retrace it.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from remat_jax import compat
from remat_jax.core.alike import Folded, Original, folds, has_plain_rules, holds_arrays, holds_functions
from remat_jax.core.naming import Named, name_residuals
from remat_jax.core.walk import inner_jaxprs, replace_inner, variables
from remat_jax.policy import Candidate

_MOST = 64
"""How many `FirstLayer`s are remembered. The least recently used one is dropped first."""

Linearise = Callable[[Named], Named]


@dataclass
class FirstLayer:
    """The first of several identical blocks, and its linearisations.

    Attributes:
      conditions: which inputs `@inputs` selects, JAX's settings, the source line of the last equation, and whether the block
        has a path. Identical blocks have equal conditions.
      kept: the cache of `NamedBlock.kept`: key → result. Both contain names of the first layer.
    """

    original: Original
    conditions: Hashable
    named: Named
    _linearised: dict[Hashable, Named] = field(default_factory=dict)
    _keeping: dict[Hashable, ClosedJaxpr] = field(default_factory=dict)
    kept: dict[Hashable, frozenset[str] | None] = field(default_factory=dict)

    def folded_as(self, jaxpr: ClosedJaxpr, path: str, conditions: Hashable) -> Folded | None:
        """The numbers that the block `jaxpr` at `path` folds into random keys; None if it is not identical to this layer."""
        return self.original.folded_as(jaxpr, (self.named.path, path)) if self.conditions == conditions else None

    def linearised(self, key: Hashable, linearise: Linearise) -> Named | None:
        """`linearise(self.named)`, cached by `key`; None if it has arrays as constants, which other blocks cannot share."""
        if key not in self._linearised:
            linearised = linearise(self.named)
            if holds_arrays(linearised.jaxpr):
                return None
            self._linearised[key] = linearised
        return self._linearised[key]

    def keeping(self, names: frozenset[str], key: Hashable) -> ClosedJaxpr:
        """The jaxpr of the cached linearisation `key` without automatic names, except `names` (`keep_names`)."""
        if (key, names) not in self._keeping:
            self._keeping[key, names] = keep_names(self._linearised[key], names)
        return self._keeping[key, names]


@dataclass(frozen=True)
class NamedBlock:
    """A block with its residuals named. `first` is the first block identical to it, possibly the block itself."""

    named: Named
    first: FirstLayer
    folded: Folded = field(default_factory=dict)
    _linearised: dict[Hashable, Named] = field(default_factory=dict, init=False, repr=False, compare=False)

    def linearised(self, key: Hashable, linearise: Linearise) -> Named:
        """`linearise(self.named)`, or the renamed linearisation of `first` if blocks can share it; once for each `key`."""
        if key not in self._linearised:
            of_first = self.first.linearised(key, linearise)
            shared = None if of_first is None else self._renaming(of_first.candidates).named(of_first)
            self._linearised[key] = linearise(self.named) if shared is None else shared
        return self._linearised[key]

    def keeping(self, names: Set[str], key: Hashable, linearise: Linearise) -> ClosedJaxpr:
        """The closed jaxpr of the linearisation, where arrays inside the block have no automatic names except `names`."""
        of_first = self.first.linearised(key, linearise)
        if of_first is None:
            return keep_names(linearise(self.named), names)
        renaming = self._renaming(of_first.candidates)
        return renaming.jaxpr(self.first.keeping(frozenset(map(renaming.before, names)), key))

    def kept(self, key: tuple[Any, ...], linearised: Named, find: Callable[[], frozenset[str] | None]) -> frozenset[str] | None:
        """`find()`, computed once for all identical blocks with an equal `key`.

        The result, and the sets in `key`, contain names of this block's linearisation.
        """
        back = _Renaming(self.named.path, self.first.named.path, linearised.candidates)
        key = tuple(frozenset(map(back.after, part)) if isinstance(part, frozenset) else part for part in key)
        if key not in self.first.kept:
            names = find()
            self.first.kept[key] = None if names is None else frozenset(map(back.after, names))
        of_first = self.first.kept[key]
        return None if of_first is None else frozenset(map(back.before, of_first))

    def _renaming(self, candidates: Mapping[str, Candidate]) -> _Renaming:
        return _Renaming(self.first.named.path, self.named.path, candidates, self.folded)


# The most recently used layer is last. The tuple is replaced, never changed, so that threads can share it.
_first_layers: tuple[FirstLayer, ...] = ()


def name_block(jaxpr: ClosedJaxpr, path: str, inputs: Sequence[bool]) -> NamedBlock:
    """The block `jaxpr` at `path` with its residuals named (`name_residuals`), if possible by renaming an identical block."""
    global _first_layers
    path = "/".join(part for part in path.split("/") if part)
    line = compat.source_line(jaxpr.jaxpr.eqns[-1]) if jaxpr.jaxpr.eqns else ""
    conditions = tuple(inputs), compat.block_settings(), line, bool(path)
    found = ((layer, layer.folded_as(jaxpr, path, conditions)) for layer in reversed(_first_layers))
    first, folded = next(((layer, folded) for layer, folded in found if folded is not None), (None, {}))
    if first is None:
        first = FirstLayer(Original(jaxpr), conditions, name_residuals(jaxpr, path, inputs))
        if holds_arrays(jaxpr) or holds_functions(jaxpr) or not has_plain_rules(jaxpr):
            return NamedBlock(first.named, first)
    _first_layers = (*(layer for layer in _first_layers if layer is not first), first)[-_MOST:]
    return NamedBlock(_Renaming(first.named.path, path, first.named.candidates, folded).named(first.named), first, folded)


class _Renaming:
    """Replaces `path` by `new_path`, the path of an identical block, in the names and scopes of a block.

    Args:
      candidates: the block's names. Names that a user gave do not change.
      folded: the numbers that the identical block folds into random keys.
    """

    def __init__(
        self, path: str, new_path: str, candidates: Mapping[str, Candidate], folded: Folded = MappingProxyType({})
    ) -> None:
        self._paths, self._folded = (path, new_path), folded
        self._is_same = path == new_path and all(number == int(literal.val) for number, literal in folded.items())
        automatic = (name for name, candidate in candidates.items() if not candidate.user_named) if path != new_path else ()
        self._names = {name: self._moved(name) for name in automatic}
        self._scopes = functools.cache(lambda stack: compat.moved_scopes(stack, path, new_path))
        self.jaxpr = functools.cache(self._jaxpr)

    def _moved(self, name: str) -> str:
        path, new_path = self._paths
        return new_path + name[len(path) :]

    def after(self, name: str) -> str:
        """The new name of the array with this `name`; a user's name does not change."""
        return self._names.get(name, name)

    def before(self, name: str) -> str:
        """The inverse of `after`."""
        path, new_path = self._paths
        before = path + name[len(new_path) :]
        return before if self._names.get(before) == name else name

    def named(self, named: Named) -> Named:
        """`named`, with the new names and scopes."""
        if self._is_same:
            return named
        candidates = {
            self.after(name): replace(candidate, name=self.after(name)) for name, candidate in named.candidates.items()
        }
        shapes = {self.after(name): shape for name, shape in named.shapes.items()}
        counts = Counter({self._moved(base): count for base, count in named.counts.items()})
        inputs = tuple(None if name is None else self.after(name) for name in named.inputs)
        return Named(lambda: self.jaxpr(named.jaxpr), self._paths[1], candidates, shapes, counts, inputs)

    def _jaxpr(self, jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
        """The closed or open `jaxpr` with the new names; the same object if nothing changes."""
        if self._is_same:
            return jaxpr
        return compat.with_equations(jaxpr, [self._equation(eqn) for eqn in compat.closed(jaxpr).jaxpr.eqns], {})

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        name = compat.given_name(eqn)
        changed = {"name": self._names[name]} if name in self._names else _changed_bodies(eqn, self.jaxpr)
        inputs = [eqn.invars[0], self._folded[int(eqn.invars[1].val)]] if self._folded and folds(eqn) else None
        return compat.with_params(eqn, changed, self._scopes(eqn.source_info.name_stack), inputs)


def keep_names(named: Named, names: Set[str]) -> ClosedJaxpr:
    """The closed jaxpr of `named`, where arrays inside the block lose their automatic names except `names`.

    Names from users are kept, because users' own policies may select them. Names of inputs and outputs are kept, because JAX
    saves the arrays between two blocks under every policy, and reports list these arrays by name.
    """
    outputs = set(variables(named.jaxpr.jaxpr.outvars))
    of_outputs = {compat.given_name(eqn) for eqn in named.jaxpr.jaxpr.eqns if outputs.intersection(eqn.outvars)}
    inside = {name for name, candidate in named.candidates.items() if not (candidate.user_named or candidate.is_input)}
    dropped = inside - of_outputs - names

    @functools.cache
    def without_dropped(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr | ClosedJaxpr:
        unnamed: dict[Var, Var | Literal] = {}
        eqns = []
        for eqn in compat.closed(jaxpr).jaxpr.eqns:
            inputs = [atom if hasattr(atom, "val") else unnamed.get(atom, atom) for atom in eqn.invars]
            if compat.given_name(eqn) in dropped:
                unnamed[eqn.outvars[0]] = inputs[0]
            else:
                eqns.append(compat.with_params(eqn, _changed_bodies(eqn, without_dropped), invars=inputs))
        return compat.with_equations(jaxpr, eqns, unnamed)

    return without_dropped(named.jaxpr)


def _changed_bodies(eqn: JaxprEqn, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The jaxpr parameters of `eqn` that differ after `change`: parameter → new value."""
    jaxprs = inner_jaxprs(eqn)
    after = replace_inner(eqn, lambda _, body: change(body)) if jaxprs else {}
    leaves = functools.partial(jax.tree.leaves, is_leaf=compat.is_jaxpr)
    return {key: new for key, new in after.items() if any(map(operator.is_not, leaves(new), leaves(jaxprs[key])))}
