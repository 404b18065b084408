"""The errors that remat_jax raises on purpose: one base class and its subclasses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from remat_jax.reading import visible


class RematError(Exception):
    """Base class of this package's errors: one ``except`` catches them all.

    >>> import remat_jax as rj
    >>> try:
    ...     rj.Policy.parse("keep: @dots")
    ... except rj.RematError as error:
    ...     type(error).__name__
    'PolicyError'
    """

    def __init__(self, *args: Any) -> None:
        # A name in the message may come from a file and have control characters.
        super().__init__(*(visible(arg) if isinstance(arg, str) else arg for arg in args))


class PolicyError(RematError, ValueError):
    """Raised when a policy, its text or its JSON is malformed, or when an argument is not a policy."""


class UnknownPolicyError(PolicyError):
    """Raised when a word is not the name of a policy; the message lists the names and the closest match."""


class BlockError(RematError, ValueError):
    """Raised when a function or model lacks a block, or if a block has more or fewer calls than policies by layer."""


class NoEffectError(PolicyError):
    """Raised when a policy would change nothing: a selector that matches no residual, an offload that moves no byte."""


class ArgumentError(RematError, TypeError):
    """Raised when an argument has the wrong type, or is traced but must be static."""


class TargetError(RematError, ValueError):
    """Raised when a target is unknown, or when the table of targets is malformed."""


class CompileError(RematError, RuntimeError):
    """Raised when the compiler fails, aborts, hangs or runs out of memory."""


class UnsupportedError(RematError, NotImplementedError):
    """Raised when the installed JAX or the platform cannot serve a request."""


class UnsupportedArgumentError(UnsupportedError):
    """Raised when an argument asks for something that the other arguments, such as a finished step, cannot have."""


class PlanningError(RematError, ValueError):
    """Raised when a planning problem is malformed, or when a plan cannot be run."""


class SolverError(RematError, RuntimeError):
    """Raised when a solver ends without an answer, such as at its time limit."""


class PortingError(RematError, ValueError):
    """Raised when tensors, rules and variables do not match (the message lists every mismatch), or when a rule is malformed."""


class InfeasibleBudget(RematError, RuntimeError):
    """Raised when no policy fits the budget; the message states the least memory that can be reached.

    Attributes:
        least_bytes: the least device memory that can be reached, in bytes; None if unknown.
        held_by: a dict from the name of a part of this memory to its bytes, the largest first; empty if unknown.

    >>> error = InfeasibleBudget("nothing fits", least_bytes=5.0e9, held_by={"parameters": 4_000_000_000})
    >>> error.least_bytes - error.held_by["parameters"]
    1000000000.0
    """

    def __init__(self, message: str, least_bytes: float | None = None, held_by: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        self.held_by = dict(held_by or {})


def nearest(word: str, choices: Iterable[str]) -> str:
    """A space and a sentence with the choice closest to ``word``, ignoring case; an empty text if no choice is close.

    >>> nearest("dotz", ["full", "dots"])
    " Did you mean 'dots'?"
    >>> nearest("zebra", ["full", "dots"])
    ''
    """
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def inside_a_step(policed: str) -> str:
    """The lines of a train step that takes the gradient itself, with `policed` in place of its loss function `loss_fn`.

    >>> print(inside_a_step("plan.apply(loss_fn, strict=False)"))
        def train_step(state, batch):
            def loss_fn(params): ...
            value, gradients = jax.value_and_grad(plan.apply(loss_fn, strict=False))(state.params)
    """
    return (
        "    def train_step(state, batch):\n        def loss_fn(params): ...\n"
        f"        value, gradients = jax.value_and_grad({policed})(state.params)"
    )


def described(error: BaseException) -> str:
    """The type and the message (at most 600 characters) of an error that a model or a library raised."""
    return f"{type(error).__name__}: {str(error).strip()[:600]}"
