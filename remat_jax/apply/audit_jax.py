"""What a JAX policy object selects in the blocks, so that a policy without effect is an error, like a text's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from remat_jax import compat
from remat_jax.core import BlockUnderPolicy
from remat_jax.core.origins import output_names
from remat_jax.core.walk import given_names
from remat_jax.errors import NoEffectError, nearest
from remat_jax.policy import JaxPolicy, Policy

NAME_THE_INPUT = (
    "Name the input of the block instead of its output (jax#23869): the selector @inputs, the policy offload_inputs, or "
    "checkpoint_name on the first line"
)


@dataclass(frozen=True)
class JaxSelection:
    """What a JAX policy selects in the block at `path`.

    Attributes:
      given: the names that the model gives.
      saved, offloaded: the names among `given` that the policy saves and offloads.
      unnamed: whether the policy selects arrays without a given name.
      kept: the names among `given` whose arrays pass to the backward pass; None if this is unknown.
      keeps: whether any array other than an input passes to the backward pass.
      outputs: the names of the block's outputs, if `kept` lacks a selected name.
    """

    path: str
    given: frozenset[str]
    saved: frozenset[str]
    offloaded: frozenset[str]
    unnamed: bool
    kept: frozenset[str] | None
    keeps: bool
    outputs: frozenset[str]


def _idle(blocks: Sequence[JaxSelection]) -> frozenset[str] | None:
    """The names of a list whose arrays no block keeps; empty for arrays without names; None if everything has an effect."""
    for names_of in (attrgetter("saved"), attrgetter("offloaded")):
        selecting = [block for block in blocks if names_of(block)]
        if selecting and all(block.kept is not None and not names_of(block) & block.kept for block in selecting):
            return frozenset(name for block in selecting for name in names_of(block))
    has_unnamed = any(block.unnamed for block in blocks)
    return frozenset() if has_unnamed and not any(block.keeps for block in blocks) else None


def is_settled(policy: JaxPolicy, blocks: Sequence[JaxSelection]) -> bool:
    """Whether `blocks` show that everything that a JAX policy may select has an effect somewhere."""
    wanted = compat.selects(policy)
    lists = [names for names in (wanted.saved, wanted.offloaded) if names]
    kept = frozenset(name for block in blocks for name in block.kept or ())
    return (
        bool(blocks) and all(names & kept for names in lists) and any(block.keeps for block in blocks if block.kept is not None)
    )


def jax_selection(path: str, block: BlockUnderPolicy, *, whole: bool, settled: bool) -> JaxSelection:
    """The selection of the JAX policy of `block`.

    Args:
      whole: False if the model is being initialised, so that the backward pass is not known.
      settled: whether an earlier block shows already that the policy has an effect. Then the block is not traced.
    """
    policy = block.policy
    assert not isinstance(policy, Policy)
    wanted = compat.selects(policy)
    names, selected = frozenset(given_names(block.jaxpr)), list(compat.selected_in(policy, block.jaxpr))
    if (wanted.saved | wanted.offloaded) - names or (wanted.any_name and not selected):
        # Derivative rules, such as those of kernels, name arrays too. Names with a colon are automatic.
        rules = block.linearised.jaxpr
        names |= {name for name in given_names(rules) if ":" not in name}
        selected += [each for each in compat.selected_in(policy, rules) if each[1] and ":" not in each[0]]
    saved = frozenset(name for name, given, on_host in selected if given and not on_host)
    offloaded = frozenset(name for name, given, on_host in selected if given and on_host)
    unnamed = not all(given for _, given, _ in selected)
    traces = whole and selected and not settled and not wanted.everything
    residuals = block.residuals() if traces else None
    if residuals is None:
        return JaxSelection(path, names, saved, offloaded, unnamed, None, True, frozenset())
    kept = names & {name for source in residuals for name in (source.name, *source.aliases)}
    outputs = output_names(block.jaxpr.jaxpr) if (saved | offloaded) - kept else frozenset()
    return JaxSelection(path, names, saved, offloaded, unnamed, kept, bool(residuals), outputs)


def check_jax_policy(policy: JaxPolicy, blocks: Sequence[JaxSelection]) -> None:
    """Raise if a JAX policy keeps nothing in `blocks`, or if its names to save, or its names to offload, keep nothing.

    One name of a list is enough, because a list of names may serve several models; `doctor` lists the others.

    Raises:
      NoEffectError: names the policy, its names, the blocks and the names that the model gives.
    """
    wanted = compat.selects(policy)
    given = frozenset(name for block in blocks for name in block.given)
    subject = f"policy={getattr(policy, '__qualname__', policy)}"
    paths = some(dict.fromkeys(block.path or "the block" for block in blocks), 3)
    lists = {"saves": wanted.saved, "offloads": wanted.offloaded}
    none_given = not (wanted.saved | wanted.offloaded) & given
    for action, names in lists.items():
        if names and not names & given:
            names = wanted.saved | wanted.offloaded if none_given else names
            raise NoEffectError(
                f"{subject}: no checkpoint_name in {paths} gives {some(sorted(map(repr, names)), 8)}, so the policy "
                f"{'keeps' if none_given else action} nothing. The names that are given: {some(sorted(map(repr, given)), 8)}."
                f"{nearest(min(names), sorted(given))} Correct the name in the policy or in the model, or use "
                'policy="full" to recompute everything.'
            )
    _check_kinds(subject, paths, wanted, blocks)
    if (idle := _idle(blocks)) is not None:
        raise idle_names(subject, paths, idle, frozenset(name for block in blocks for name in block.outputs))


def _check_kinds(subject: str, paths: str, wanted: compat.Selects, blocks: Sequence[JaxSelection]) -> None:
    """Raise if the policy selects kinds of arrays that no block has."""
    named = any(block.saved or block.offloaded for block in blocks)
    if wanted.any_name and not named:
        raise NoEffectError(
            f"{subject} keeps arrays that are named by checkpoint_name, but {paths} gives no name that it keeps, so it keeps "
            'nothing. Name arrays in the model, or use policy="full" to recompute everything.'
        )
    if wanted.products and not named and not any(block.unnamed for block in blocks):
        raise NoEffectError(
            f"{subject} {'offloads' if wanted.offloads_products else 'saves'} only matrix products "
            f"({', '.join(wanted.products)}), but {paths} has none, so it keeps nothing. Select other arrays, or use "
            'policy="full" to recompute everything.'
        )


def idle_names(subject: str, paths: str, idle: frozenset[str], outputs: frozenset[str]) -> NoEffectError:
    """The error for a policy that selects only arrays that the backward pass does not read: `idle`, or arrays without names.

    `outputs` are the names of the outputs of the blocks.
    """
    what = some(map(repr, sorted(idle)), 3) if idle else "arrays"
    if idle and outputs >= idle:
        return NoEffectError(
            f"{subject} keeps nothing in {paths}: it selects {what}, the output of the block, which the next block, or the "
            "next iteration of a scan, reads as its input; the block's own backward pass does not read it. "
            f"{NAME_THE_INPUT}."
        )
    return NoEffectError(
        f"{subject} keeps nothing in {paths}: it selects {what}, but the backward pass reads none of these arrays, because the "
        "other kept arrays suffice. Select arrays that are computed from them, or recompute the other arrays."
    )


def some(names: Iterable[str], limit: int) -> str:
    """The first `limit` names, and the number of further names; `none` without names."""
    shown = list(names)
    more = f", and {len(shown) - limit} more" if len(shown) > limit else ""
    return (", ".join(shown[:limit]) or "none") + more
