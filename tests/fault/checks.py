"""Compares one random program under one policy with the plain program, in float64."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import remat_jax as rj
from remat_jax import compat
from remat_jax.core import BlockUnderPolicy, block_under_policy
from remat_jax.errors import NoEffectError, RematError
from remat_jax.parity.rule import float64_errors, global_norm
from remat_jax.parity.tolerances import TOLERANCES, epsilon
from remat_jax.policy import Action, PolicyRule, matches
from tests.fault import ops
from tests.fault.evaluate import traced
from tests.fault.ops import LOW, low_precision
from tests.fault.programs import NOT_UNDER, Program, arguments, programs
from tests.fault.stacks import BY_CLASS, LOOPS, OUTER, WAYS, Stack
from tests.fault.tally import Tally, works

_ALWAYS = ("off", "full", "everything", "offload_inputs", "recompute: @inputs; offload: *", "save: @primitive:cos; offload: *")
_OF_DOTS = (
    "dots",
    "dots_with_no_batch_dims",
    "offload_dot_with_no_batch_dims",
    "save: @dots; offload: @inputs",
    "offload: @inputs, @dots",
)
_OF_NAMES = ("save: user_*", "offload: user_*", "recompute: user_*; save: *")
_BY_HAND = ("full", "everything", "dots", "dots_with_no_batch_dims", "offload: @dots", "save: user_1, user_2; offload: @dots")
_ABLE = tuple(way for way in WAYS if way != "by_hand" or not compat.remat3() or compat.JAX_VERSION >= (0, 12, 0))
"""Before JAX 0.12 `jax_remat3` supports no policy by hand, and it is refused (tests/test_jax_policy.py)."""
_ALWAYS_EFFECTIVE = frozenset({"off", "full", "everything"})
"""These policies select no residual by name and offload none."""

TRANSFORMS = (
    *["grad"] * 4,
    *("grad of integers", "vmap of grad", "grad of vmap", "jvp", "hvp", "grad of jvp", "grad of grad"),
    *("shard_map of grad", "grad of shard_map"),
)
"""Transformations of the loss; the gradient alone is the most frequent. The gradient of integers is JAX's `allow_int`."""

RUNS = (*["traced"] * 7, *["eager"] * 2, "jit", "export", "leaks")
"""Compiling takes most of the time and finds the fewest faults of a trace."""


def _exported(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as a serialised program that is read again; an RNG key cannot be its argument."""

    def run(params: Any, x: Any, ids: Any, keys: Any) -> Any:
        kind = jax.random.key_impl(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else None
        plain = keys if kind is None else jax.random.key_data(keys)

        def of_arrays(params: Any, x: Any, ids: Any, plain: Any) -> Any:
            return fn(params, x, ids, plain if kind is None else jax.random.wrap_key_data(plain, impl=kind))

        moved = [jax.export.DisabledSafetyCheck.custom_call("annotate_device_placement")]
        whole = jax.export.export(jax.jit(of_arrays), disabled_checks=moved)(params, x, ids, plain)
        return jax.jit(jax.export.deserialize(whole.serialize()).call)(params, x, ids, plain)

    return run


def _checking_leaks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, traced while JAX looks for leaked tracers."""

    def run(*args: Any) -> Any:
        with jax.checking_leaks():
            return traced(fn)(*args)

    return run


_RUN: dict[str, Callable[..., Any]] = {
    "traced": traced,
    "eager": lambda fn: fn,
    "jit": jax.jit,
    "export": _exported,
    "leaks": _checking_leaks,
}


@dataclass(frozen=True)
class Residuals:
    """A separate action for each residual by name, drawn by a number; its text depends on the program."""

    seed: int


@dataclass(frozen=True)
class Case:
    """One check.

    Attributes:
      policies: one for each layer, or one for all.
      run: `eager`, op by op; `jit`; or `traced`: as `jit`, and run equation by equation.
      seed: of the numbers.
      old_keys: whether keys are plain integers, as `jax.random.PRNGKey` makes them.
      group: how many layers are one region, where the policies by layer have neighbours that are equal and offload nothing.
    """

    stack: Stack
    policies: tuple[str | Residuals, ...]
    transform: str
    run: str
    seed: int
    old_keys: bool = False
    group: int = 1

    def arguments(self) -> tuple[dict[str, Any], Any, Any, Any]:
        """The arguments of the loss."""
        return arguments(self.stack.layers, self.seed, self.old_keys)

    def check(self, tally: Tally) -> None:
        """Raise AssertionError unless value and gradients equal those of the plain program."""
        with jax.enable_x64(True):
            try:
                plain = computed(self.stack.plain(), self)
                if not all(np.isfinite(leaf).all() for leaf in _floats(plain).values()):
                    tally.refused["not finite"] += 1
                    return
                policy = policy_of(self)
                if policy is None:
                    tally.refused["no residual"] += 1
                    return
                results = computed(self.stack.under(policy), self)
            except Exception as error:
                tally.refused.update(_refused(_unhidden(error), self))
                return
            tally.compared(self.stack.way, self.stack.loop, self.transform, self.run)
            # Equal values of another dtype are wrong too.
            same = all(
                name in results and results[name].dtype == array.dtype and np.array_equal(results[name], array)
                for name, array in plain.items()
            )
            tally.bit_equal += same
            if not same or set(plain) != set(results):
                _compare(self, plain, results)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A program, its form as layers, the policies on them, and the transformation of the loss."""
    program = draw(programs())
    stack = Stack(program, draw(st.sampled_from([1, 2, 2, 3])), draw(st.sampled_from(_ABLE)), draw(st.sampled_from(LOOPS)))
    if stack.way.startswith("inner"):
        stack = replace(stack, outer=draw(st.sampled_from(OUTER)))
    if stack.way == "forward":
        choices: Any = st.sampled_from(["full", "offload_inputs"])
    elif stack.way == "by_hand":
        choices = st.sampled_from(_BY_HAND)
    else:
        dots = _OF_DOTS if program.has("dense", "transposed", "attention") else ()
        names = _OF_NAMES if program.has("named") else ()
        choices = st.one_of(st.sampled_from([*_ALWAYS, *dots, *names]), st.builds(Residuals, st.integers(0, 99)))
    by_layer = stack.way in BY_CLASS and draw(st.booleans())
    policies = tuple(draw(choices) for _ in range(stack.layers if by_layer else 1))
    allowed = [name for name in TRANSFORMS if not program.has(*NOT_UNDER.get(name, ()))]
    # A callback cannot be serialised.
    runs = [way for way in RUNS if way != "export" or not program.has("told")] if ops.DEVICES == 1 else ["jit"]
    transform, run, seed = draw(st.sampled_from(allowed)), draw(st.sampled_from(runs)), draw(st.integers(0, 3))
    return Case(stack, policies, transform, run, seed, draw(st.integers(0, 3)) == 3, draw(st.sampled_from([1, 1, 2, 3])))


# --- running ----------------------------------------------------------------------------------------------------------


def transformed(loss: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The loss and its derivative, or a part of it, with respect to parameters and input."""

    def value(params: Any, x: Any, ids: Any, keys: Any) -> Any:
        return loss(params, x, ids, keys)[0]

    def directions(*primals: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.cos(leaf), primals)

    if name == "grad":
        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    if name == "grad of integers":
        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True, allow_int=True)
    if name == "vmap of grad":
        batched = jax.vmap(jax.value_and_grad(value, argnums=(0, 1)), in_axes=(None, 0, None, None))
        return lambda params, x, ids, keys: batched(params, jnp.stack([x, jnp.sin(x)]), ids, keys)
    if name == "grad of vmap":
        both = jax.vmap(value, in_axes=(None, 0, None, None))
        return jax.value_and_grad(lambda p, x, ids, keys: both(p, jnp.stack([x, x * 0.7]), ids, keys).sum(), argnums=(0, 1))
    if name == "jvp":
        return lambda p, x, ids, keys: jax.jvp(lambda p, x: value(p, x, ids, keys), (p, x), directions(p, x))
    if name == "shard_map of grad":
        return everywhere(lambda *args: jax.value_and_grad(value, argnums=(0, 1))(*args))
    if name == "grad of shard_map":
        return jax.value_and_grad(everywhere(value), argnums=(0, 1))
    return _second_order(value, directions, name)


def _second_order(value: Callable[..., Any], directions: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Forward over reverse (`hvp`), reverse over forward, or reverse over reverse."""
    gradient = jax.grad(value, argnums=(0, 1))
    if name == "hvp":
        return lambda p, x, ids, keys: jax.jvp(lambda p, x: gradient(p, x, ids, keys), (p, x), directions(p, x))

    def along(p: Any, x: Any, ids: Any, keys: Any) -> Any:
        if name == "grad of jvp":
            return jax.jvp(lambda p, x: value(p, x, ids, keys), (p, x), directions(p, x))[1]
        pairs = zip(*map(jax.tree.leaves, (gradient(p, x, ids, keys), directions(p, x))), strict=True)
        return sum(jnp.sum(slope * direction).real for slope, direction in pairs)

    return jax.grad(along, argnums=(0, 1))


def everywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in a `shard_map` over one device, with everything on it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("shards",))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)


def computed(loss: Callable[..., Any], case: Case, *, nudge: float = 0.0) -> dict[str, np.ndarray]:
    """The results of the transformed loss, by path; `nudge` scales parameters and input by 1 + `nudge`."""
    params, x, ids, keys = case.arguments()
    params, x = jax.tree.map(lambda leaf: leaf + nudge * leaf if nudge else leaf, (params, x))
    fn = transformed(loss, case.transform)
    with warnings.catch_warnings():
        # A program may donate more than it returns.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        outputs = _RUN[case.run](fn)(params, x, ids, keys)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(outputs)}


def policy_of(case: Case) -> Any:
    """The policy of a case, or its policies by layer; None if the program has no residual with a name."""
    policies = [_residual_policy(case, policy.seed) if isinstance(policy, Residuals) else policy for policy in case.policies]
    if any(policy is None for policy in policies):
        return None
    if len(policies) == 1:
        return policies[0]
    grouped = [
        f"{len(list(equal))} x {policy}" + (f" in groups of {case.group}" if "offload" not in policy else "")
        for policy, equal in itertools.groupby(policies)
    ]
    return rj.LayerPolicies.parse(" | ".join(grouped)) if case.group > 1 else rj.LayerPolicies.of(policies)


def _residual_policy(case: Case, seed: int) -> str | None:
    """Each residual of a layer saved, offloaded or recomputed, by its name without the module's path."""
    params, x, ids, keys = case.arguments()
    weights = jax.tree.map(lambda leaf: leaf[0], params)
    block = case.stack._layer
    leaves, treedef = jax.tree.flatten((weights, x, ids, keys[0]))
    jaxpr = jax.make_jaxpr(lambda *flat: jax.tree.leaves(block(*jax.tree.unflatten(treedef, flat))))(*leaves)
    is_input = [False, False, True, True, True]
    planned = (
        block_under_policy(jaxpr.replace(jaxpr=jaxpr.jaxpr), rj.Policy.parse("full"), "", is_input)
        if not jaxpr.consts
        else None
    )
    if planned is None:
        return "recompute: @inputs; offload: *"
    names = sorted(
        {
            "*" + candidate.name[candidate.name.rfind(":") :] if ":" in candidate.name else candidate.name
            for candidate in planned.candidates
        }
    )
    draw, actions = random.Random(seed), {}
    for name in names:
        action = draw.choice(("save", "offload", "recompute", "recompute"))
        # A selector that keeps nothing is an error, and nothing would be compared.
        actions.setdefault(action if _keeps(planned, name) else "recompute", []).append(name)
    rules = [f"{action}: {', '.join(actions[action])}" for action in sorted(actions)]
    return "; ".join(rules) if rules else None


def _keeps(block: BlockUnderPolicy, selector: str) -> bool:
    kept = replace(block, policy=rj.Policy((PolicyRule(Action.SAVE, (selector,)),))).kept()
    chosen = [candidate for candidate in block.candidates if matches(selector, candidate)]
    return kept is None or any(candidate.is_input or candidate.name in kept for candidate in chosen)


# --- judging ----------------------------------------------------------------------------------------------------------


CLOSED_OVER = "differentiation of a custom_vjp function with respect to a closed-over value"

# What JAX itself refuses: the error, its words, and operations of which the program has one.
_BY_JAX: dict[str, tuple[type[Exception], str, tuple[str, ...]]] = {
    # JAX cannot choose between host arrays: a `vmap` over the choice of a branch that offloads, also by hand.
    "select on the host": (ValueError, "inputs passed to `select_n`", ("cond", "switch")),
    # JAX cannot lower an ordered callback in a program with host arrays, also by hand.
    "an ordered callback with arrays on the host": (ValueError, "safe_zip() argument", ("told",)),
    # JAX cannot transpose the tangents of its own rule for a `cond` under `vmap`.
    "a choice along a vmap": (NotImplementedError, "'stop_gradient'", ("cond", "switch")),
    # Under `jit`, `scan` or a checkpoint JAX cannot differentiate a rule that closes over a differentiated array.
    "a rule that closes over an array": (Exception, CLOSED_OVER, ("custom_vjp", "half_mapped")),
    # Version 0.10.2 with `jax_remat3` on.
    "a name under a vmap": (NotImplementedError, "CheckpointName", ("named",)),
}


def _unhidden(error: Exception) -> Exception:
    """Our error where JAX, checking for leaks in a `shard_map`, raises its own for the tracers in our error's traceback."""
    hidden = error.__context__
    return hidden if str(error).startswith("Leaked trace") and isinstance(hidden, RematError) else error


def _refused(error: Exception, case: Case) -> list[str]:
    """Why a program is refused; raises `error` again if JAX and a hand-written checkpoint accept the program."""
    named = [
        name
        for name, (kind, words, operations) in _BY_JAX.items()
        if isinstance(error, kind) and words in str(error) and case.stack.program.has(*operations)
    ]
    if named:
        return named
    # A random policy need not reach anything in a random program, but for these three policies that is no error.
    if isinstance(error, NoEffectError) and not _ALWAYS_EFFECTIVE.issuperset(case.policies):
        return ["no effect"]
    if isinstance(error, NoEffectError):
        raise error
    if isinstance(error, RematError):
        return [type(error).__name__]
    by_hand = replace(case, stack=replace(case.stack, way="by_hand"), policies=("full",))
    if works(lambda: computed(case.stack.plain(), case)) and works(lambda: computed(by_hand.stack.under("full"), by_hand)):
        raise error
    return [f"also by hand: {type(error).__name__}"]


def _compare(case: Case, plain: dict[str, np.ndarray], results: dict[str, np.ndarray]) -> None:
    given, wanted = ({name: f"{array.dtype}{array.shape}" for name, array in side.items()} for side in (results, plain))
    assert given == wanted, f"gives {dict(given.items() - wanted.items())}, not {dict(wanted.items() - given.items())}"
    for name, array in plain.items():
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            np.testing.assert_array_equal(results[name], array, strict=True, err_msg=name)
    if case.stack.program.has("narrow"):
        token = low_precision.set(jnp.float64)
        try:
            reference = computed(case.stack.plain(), case)
        finally:
            low_precision.reset(token)
        _judge_low(*map(_floats, (reference, plain, results)), _lowest(case.stack.program))
        return
    errors, most = float64_errors(_floats(plain), _floats(results)), TOLERANCES["float64"].value
    if max(errors.values()) <= most:
        return
    # A program may magnify rounding: results need not be nearer than a change of one unit in the last place of the arguments.
    nudged = float64_errors(_floats(plain), _floats(computed(case.stack.plain(), case, nudge=epsilon(np.dtype(np.float64)))))
    for name, error in errors.items():
        assert error <= max(most, nudged[name]), f"{name} is off by {error:.3g}, rounding alone by {nudged[name]:.3g}"


def _lowest(program: Program) -> float:
    return max(_epsilon(LOW[step.number % len(LOW)]) for step in program.every() if step.op == "narrow")


def _epsilon(dtype: Any) -> float:
    """The table of tolerances has no dtype of 8 bits, because nothing is compared in one."""
    return float(jnp.finfo(dtype).eps) if np.dtype(dtype).itemsize == 1 else epsilon(np.dtype(dtype))


def _judge_low(reference: dict[str, Any], plain: dict[str, Any], results: dict[str, Any], lowest: float) -> None:
    """For results partly computed in low precision: no farther from float64 than the plain program, by the parity rule."""
    whole = global_norm(reference)
    for name, wanted in reference.items():
        ours, theirs = (float(np.linalg.norm((side[name] - wanted).ravel())) for side in (results, plain))
        bound = TOLERANCES["error_ratio"].value * max(theirs, lowest * whole)
        assert ours <= bound, f"{name} is {ours:.3g} from float64, the plain program {theirs:.3g}"


def _floats(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The numbers that have derivatives, complex numbers as two real ones."""
    floats = {}
    for name, array in values.items():
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            floats[name] = np.stack([array.real, array.imag]).astype(np.float64)
        # NumPy does not count bfloat16 among the floating dtypes.
        elif jnp.issubdtype(array.dtype, jnp.floating):
            floats[name] = array.astype(np.float64)
    return floats
