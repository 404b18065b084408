"""Actions, candidates and rules: what a policy does with a residual, and the facts about a residual that selectors read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from remat_jax.errors import PolicyError, nearest

INPUTS, DOTS, DOTS_WITH_NO_BATCH_DIMS, PRIMITIVE = "@inputs", "@dots", "@dots_with_no_batch_dims", "@primitive:"
CONVS = "@convs"

# As in JAX (jax/_src/ad_checkpoint.py): dots_saveable saves convolutions, dots_with_no_batch_dims_saveable does not.
CONVOLUTION = "conv_general_dilated"
_DOTS = frozenset({"dot_general", CONVOLUTION, "scaled_matmul_wrapper"})


class Action(StrEnum):
    """What happens to a residual between the forward and the backward pass."""

    SAVE = "save"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Candidate:
    """An array that the backward pass could read, described by the facts that selectors match.

    Attributes:
        name: the residual name, ``module/path:primitive#k``, or the user's own ``checkpoint_name``.
        primitive: the name of the JAX primitive that computes the array; ``"input"`` for an input of the block.
        is_input: whether the array is an input of the block.
        has_batch_dims: for ``dot_general``, whether its dimension numbers have batch dimensions; for
            ``scaled_matmul_wrapper``, whether the first dimension of its first operand is not 1. Unused otherwise.
        user_named: whether the user gave ``name``. Selectors ignore this flag.
    """

    name: str
    primitive: str
    is_input: bool = False
    has_batch_dims: bool = False
    user_named: bool = False


@dataclass(frozen=True)
class PolicyRule:
    """An action for the residuals that the selectors match. ``action`` may be given as a word, ``selectors`` as any iterable.

    Raises:
        PolicyError: an unknown action, no selectors, or a selector that cannot be written in a policy's text.

    >>> str(PolicyRule("save", ["@dots", "*attn/out*"]))
    'save: @dots, *attn/out*'
    """

    action: Action
    selectors: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "action", to_action(self.action))
        if isinstance(self.selectors, str) or not isinstance(self.selectors, Iterable):
            example = f"({self.selectors!r},)" if isinstance(self.selectors, str) else "('@dots',)"
            raise PolicyError(f"PolicyRule: selectors={self.selectors!r} is not a sequence of texts; write {example}.")
        object.__setattr__(self, "selectors", tuple(self.selectors))
        if not self.selectors:
            raise PolicyError(f"PolicyRule: selectors=() for {self.action.value!r}; give one or more, such as '@dots'.")
        for selector in self.selectors:
            wrong = what_is_wrong(selector)
            if wrong:
                raise PolicyError(f"PolicyRule: selector {selector!r} {wrong}")

    def __str__(self) -> str:
        return f"{self.action.value}: {', '.join(self.selectors)}"

    def matches(self, candidate: Candidate) -> bool:
        """Whether any selector of this rule matches ``candidate``."""
        return any(matches(selector, candidate) for selector in self.selectors)


def to_action(word: object) -> Action:
    """The action that ``word`` names."""
    try:
        return Action(word)  # type: ignore[arg-type]  # `Action` refuses other values
    except ValueError:
        words = [action.value for action in Action]
        raise PolicyError(f"{word!r} is not an action; write one of {', '.join(words)}." + nearest(str(word), words)) from None


def matches(selector: str, candidate: Candidate) -> bool:
    """Whether ``selector`` matches ``candidate``. A glob must match the whole name and is case-sensitive.

    >>> matches("*/up:*", Candidate("Block/ffn/up:dot_general#0", "dot_general"))
    True
    >>> matches("@dots_with_no_batch_dims", Candidate("Block/attn:dot_general#0", "dot_general", has_batch_dims=True))
    False
    >>> matches("@convs", Candidate("Block/Conv_0:conv_general_dilated#0", "conv_general_dilated"))
    True
    """
    if selector in _MATCHES:
        return _MATCHES[selector](candidate)
    if selector.startswith(PRIMITIVE):
        return fnmatchcase(candidate.primitive, selector[len(PRIMITIVE) :])
    # A name copied from a table must match itself, although its brackets have a meaning in a glob.
    return candidate.name == selector or fnmatchcase(candidate.name, selector)


_MATCHES: dict[str, Callable[[Candidate], bool]] = {
    INPUTS: lambda candidate: candidate.is_input,
    DOTS: lambda candidate: candidate.primitive in _DOTS,
    DOTS_WITH_NO_BATCH_DIMS: lambda candidate: candidate.primitive in _DOTS - {CONVOLUTION} and not candidate.has_batch_dims,
    CONVS: lambda candidate: candidate.primitive == CONVOLUTION,
}
"""For each selector without an argument, a function that returns whether a candidate matches."""


def is_catch_all(selector: str) -> bool:
    """Whether ``selector`` is the glob that matches every residual, inputs included."""
    return set(selector) == {"*"}


def is_automatic_glob(selector: str) -> bool:
    """Whether ``selector`` is a glob on automatic residual names. A plain name may be a ``checkpoint_name``."""
    return not selector.startswith("@") and not is_catch_all(selector) and any(mark in selector for mark in "*?[/:#")


def what_is_wrong(selector: object) -> str:
    """Why ``selector`` is invalid, as the rest of a sentence that begins with the selector; empty if it is valid."""
    if not isinstance(selector, str):
        return "is not a text; write a glob on residual names such as '*ffn/up*', or '@dots'."
    if not selector.strip():
        return "is empty; write a glob on residual names such as '*ffn/up*', or '@dots'."
    if selector != selector.strip() or "," in selector or ";" in selector:
        return "has a comma, a semicolon or outer whitespace, which separate selectors; give them one by one."
    if not selector.startswith("@") or selector in _MATCHES:
        return ""
    if selector.startswith(PRIMITIVE):
        primitive = selector[len(PRIMITIVE) :]
        good = primitive and primitive == primitive.strip()
        return "" if good else "names no primitive; write one after the colon, as in '@primitive:exp'."
    known_selectors = [*_MATCHES, PRIMITIVE + "NAME"]
    return f"is not a known selector; those with @ are {', '.join(known_selectors)}." + nearest(selector, known_selectors)


def first_unreachable(selectors: Sequence[str]) -> tuple[int, str] | None:
    """The index of the first selector that can never apply, and the reason; None if every selector can apply.

    >>> first_unreachable(["@dots", "*", "x"])
    (2, "'x' is never reached: the earlier selector '*' matches every residual; move 'x' before it.")
    """
    seen: set[str] = set()
    catch_all = ""
    for index, selector in enumerate(selectors):
        if selector in seen:
            return index, f"{selector!r} is never reached: the same selector comes before it; remove one of them."
        if catch_all:
            why = f"the earlier selector {catch_all!r} matches every residual; move {selector!r} before it."
            return index, f"{selector!r} is never reached: {why}"
        seen.add(selector)
        catch_all = selector if is_catch_all(selector) else ""
    return None
