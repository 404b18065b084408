"""Random programs as data: steps that read earlier values, some with inner programs; how to draw one, and how to run one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

from tests.fault.ops import OPS, ROWS, WIDTH, Op

Function = Callable[..., Any]
Functions = list["_Inside"]
Values = dict[str, list[Any]]
Given = tuple[Any, Any, Any]
"""Weights, integers and a key: a program's inputs besides its two arrays."""


@dataclass(frozen=True)
class Step:
    """One operation: the values that it reads, counted from the last of their kind, a number, and its inner programs."""

    op: str
    reads: tuple[int, ...]
    number: int
    inner: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Program:
    """Steps in order, and the outputs besides the result: `x` (an unchanged input), `again`, `none`, `unit`, or a kind."""

    steps: tuple[Step, ...]
    outputs: tuple[str, ...] = ()

    def every(self) -> Iterator[Step]:
        """All steps, at any depth."""
        for step in self.steps:
            yield step
            for inner in step.inner:
                yield from inner.every()

    def has(self, *names: str) -> bool:
        """Whether the program contains an operation of one of these names, at any depth."""
        return any(step.op in names for step in self.every())


# --- programs inside programs -----------------------------------------------------------------------------------------


def _scan(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return lax.scan(lambda c, row: (functions[0](c, y * row[0]), None), x, jnp.sin(y), reverse=n % 2 == 1, unroll=1 + n % 2)[0]


def _scan_of_results(n: int, functions: Functions, x: Any, y: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        out = functions[0](carry, y)
        return out, out[0] * row

    carry, rows = lax.scan(body, x, y)
    return carry * 0.5 + rows


def _fori(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 1 + n % 3, lambda i, c: functions[0](c, y) * (1.0 + i), x) / 2


def _while(n: int, functions: Functions, x: Any, y: Any) -> Any:
    # It has no reverse mode: values that need a derivative bypass it.
    x, still = lax.stop_gradient((x, y))

    def body(state: Any) -> Any:
        return state[0] + 1, functions[0](state[1], still)

    return y + lax.stop_gradient(lax.while_loop(lambda state: state[0] < 1 + n % 2, body, (0, x))[1])


def _cond(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return lax.cond(x[0, 0] > 0.1 * (n % 3) - 0.1, functions[0], functions[1], x, y)


def _switch(n: int, functions: Functions, x: Any, y: Any, ids: Any) -> Any:
    return lax.switch(ids[n % 3] % 3, [*functions, lambda x, y: x], x, y)


def _jit(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return jax.jit(functions[0], inline=n % 3 == 2)(x, y)


def _donated(n: int, functions: Functions, x: Any, y: Any) -> Any:
    # Separate arrays, because the caller may read `x` again.
    return jax.jit(functions[0], donate_argnums=(0, 1) if n % 2 else 0)(x * 1.25, y - 0.25)


def _vmap(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return (
        jax.vmap(functions[0], in_axes=(0, None if n % 2 else 0))(jnp.stack([x, y]), x if n % 2 else jnp.stack([y, x])).sum(0)
        / 2
    )


def _half_mapped(n: int, functions: Functions, x: Any, y: Any) -> Any:
    """A `vmap` of a custom rule with one result that is the same for the whole batch.

    Nothing is differentiated along that result: JAX 0.10's own gradient is wrong there (docs/limits.md).
    """

    @jax.custom_vjp
    def function(x: Any, y: Any, given: Given) -> Any:
        return jnp.tanh(functions[0](x, y, given)), y

    def forward(x: Any, y: Any, given: Given) -> Any:
        out = function(x, y, given)
        return out, (out[0], y, given[0])

    def backward(residuals: Any, ct: Any) -> Any:
        out, y, weights = residuals
        return ct[0] * (1 - out**2), ct[0] * jnp.cos(y), (jax.tree.map(lambda leaf: leaf * ct[0].sum(), weights), None, None)

    function.defvjp(forward, backward)
    mapped, still = jax.vmap(function, in_axes=(0, None, None))(jnp.stack([x, y]), x, functions[0].given)
    return mapped[n % 2] + lax.stop_gradient(still[0])


def _map(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return lax.map(lambda row: functions[0](row, y), jnp.stack([x, y]))[n % 2]


def _checkpoint(n: int, functions: Functions, x: Any, y: Any) -> Any:
    policy = (None, jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.everything_saveable)[n % 3]
    return jax.checkpoint(functions[0], policy=policy)(x, y)


def _custom_vjp(n: int, functions: Functions, x: Any, y: Any, ids: Any, key: Any) -> Any:
    """A custom rule with integers, a key, a bool and the result among its residuals."""

    @jax.custom_vjp
    def function(x: Any, y: Any, ids: Any, key: Any, given: Given) -> Any:
        return forward(x, y, ids, key, given)[0]

    def forward(x: Any, y: Any, ids: Any, key: Any, given: Given) -> Any:
        out = jnp.tanh(functions[0](x, y, given))
        return out, (out, ids % 3, key, x > 0.013, y, given[0])

    def backward(residuals: Any, ct: Any) -> Any:
        out, ids, key, positive, y, weights = residuals
        noise = jax.random.bernoulli(key, 0.5, ct.shape)
        along = (ct * jnp.where(positive, 1 - out**2, 0.5), ct[ids] * jnp.where(noise, jnp.cos(y), 0.25))
        return *along, None, None, (jax.tree.map(lambda leaf: leaf * ct.sum(), weights), None, None)

    function.defvjp(forward, backward)
    return function(x, y, ids, key, functions[0].given)


def _custom_jvp(n: int, functions: Functions, x: Any, y: Any) -> Any:
    @jax.custom_jvp
    def function(x: Any, y: Any, given: Given) -> Any:
        return jnp.sin(functions[0](x, y, given))

    @function.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        out = function(*primals)
        return out, jnp.exp(-(out**2)) * tangents[0] + jnp.cos(primals[1]) * tangents[1]

    return function(x, y, functions[0].given)


def _shard_map(n: int, functions: Functions, x: Any, y: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("inside",))
    spec = jax.sharding.PartitionSpec()
    function = jax.shard_map(functions[0], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return (jax.jit(function) if n % 2 else function)(x, y, functions[0].given)


def _linear_solve(layer: Callable[..., Any], x: Any) -> Any:
    """Divides `x` by numbers between 1 and 3 that the layer computes."""
    return lax.custom_linear_solve(
        lambda v: v * (2 + jnp.tanh(layer(x))), x, lambda matvec, b: b / matvec(jnp.ones_like(b)), symmetric=True
    )


def _root(layer: Callable[..., Any], x: Any) -> Any:
    """Four steps toward v = x - tanh(layer(v)) / 9, taken as its root."""

    def function(v: Any) -> Any:
        return v + jnp.tanh(layer(v)) / 9 - x

    def solve(function: Callable[..., Any], v: Any) -> Any:
        return lax.fori_loop(0, 4, lambda _, v: v - function(v), v)

    return lax.custom_root(function, x, solve, lambda g, y: y / (0.5 + jnp.abs(g(jnp.ones_like(y)))))


SOLVERS = {"linear solve": _linear_solve, "root": _root}


def _solved(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return _linear_solve(lambda v: functions[0](v, y), x)


def _rooted(n: int, functions: Functions, x: Any, y: Any) -> Any:
    return _root(lambda v: functions[0](v, y if n % 2 else v), x)


@dataclass(frozen=True)
class Nesting:
    """An operation with inner programs: as `Op`, with their number."""

    takes: str
    programs: int
    run: Callable[..., Any]


NESTINGS: dict[str, Nesting] = {
    "scan": Nesting("ff", 1, _scan),
    "scan_of_results": Nesting("ff", 1, _scan_of_results),
    "fori": Nesting("ff", 1, _fori),
    "while": Nesting("ff", 1, _while),
    "cond": Nesting("ff", 2, _cond),
    "switch": Nesting("ffi", 2, _switch),
    "jit": Nesting("ff", 1, _jit),
    "donated": Nesting("ff", 1, _donated),
    "vmap": Nesting("ff", 1, _vmap),
    "half_mapped": Nesting("ff", 1, _half_mapped),
    "map": Nesting("ff", 1, _map),
    "checkpoint": Nesting("ff", 1, _checkpoint),
    "custom_vjp": Nesting("ffik", 1, _custom_vjp),
    "custom_jvp": Nesting("ff", 1, _custom_jvp),
    "shard_map": Nesting("ff", 1, _shard_map),
    "solved": Nesting("ff", 1, _solved),
    "rooted": Nesting("ff", 1, _rooted),
}
_OF_SECOND_ORDER = ("custom_vjp", "custom_jvp", "half_mapped")
NOT_UNDER = {
    "jvp": ("custom_vjp", "half_mapped"),
    **dict.fromkeys(("hvp", "grad of jvp", "grad of grad"), _OF_SECOND_ORDER),
    **dict.fromkeys(("shard_map of grad", "grad of shard_map"), ("constrained", "shard_map")),
}
"""A `custom_vjp` has no forward mode. Second derivatives by a rule that is no derivative of its function, as that of
`_custom_jvp`, are not defined: of the plain function JAX gives others under a scan than without."""

# --- running ----------------------------------------------------------------------------------------------------------


def run(program: Program, weights: Any, x: Any, y: Any, ids: Any, key: Any) -> tuple[Any, dict[str, Any]]:
    """The result of a program, of the shape of `x`, and its other outputs.

    Args:
      weights: `w` and `z`, and what has no leaves.
      x, y: of kind `f`; a program that stands in another one is given both.
    """
    values: Values = {"f": [y, x], "w": [weights["w"]], "z": [weights["z"]], "i": [ids], "k": [key]}
    for step in program.steps:
        if step.op in OPS:
            op = OPS[step.op]
            operands = _operands(op.takes, step, values)
            if operands is not None:
                values.setdefault(op.gives, []).append(op.run(step.number, *operands))
            continue
        nesting = NESTINGS[step.op]
        operands = _operands(nesting.takes, step, values)
        assert operands is not None, "the kinds that every program begins with"
        # A `while` has no reverse mode, so it must not close over differentiated arrays.
        given = lax.stop_gradient(weights) if step.op == "while" else weights
        values["f"].append(nesting.run(step.number, [_Inside(inner, (given, ids, key)) for inner in step.inner], *operands))
    result = _together(values)
    return result, {name: _output(name, values, x, result) for name in program.outputs}


def _operands(takes: str, step: Step, values: Values) -> list[Any] | None:
    if any(not values.get(kind) for kind in takes):
        return None
    return [values[kind][-1 - read % len(values[kind])] for kind, read in zip(takes, step.reads, strict=False)]


class _Inside:
    """A program inside another one, as a function that closes over the arrays in `given` or, like custom rules, takes them."""

    def __init__(self, program: Program, given: Given) -> None:
        self.program, self.given = program, given
        self.__name__ = "inside"

    def __call__(self, x: Any, y: Any, given: Given | None = None) -> Any:
        weights, ids, key = given or self.given
        return run(self.program, weights, x, y, ids, key)[0]


def _together(values: Values) -> Any:
    """The last value plus a part of the last value of each other kind, so that few steps are dead code."""
    result = values["f"][-1]
    for kind, change in _PARTS.items():
        if values.get(kind):
            result = result + change(values[kind][-1]).astype(result.dtype) / 4
    return result


_PARTS: dict[str, Function] = {
    "s": jnp.tanh,
    "l": jnp.tanh,
    "c": lambda c: jnp.tanh(c.real) + jnp.tanh(c.imag),
    "e": lambda e: e.sum(),
    "b": lambda b: b,
}


_NO_LEAVES: dict[str, Any] = {"none": None, "unit": ()}


def _output(name: str, values: Values, x: Any, result: Any) -> Any:
    if name in _NO_LEAVES:
        return _NO_LEAVES[name]
    if name == "x":
        return x
    if name == "again" or not values.get(name):
        return result
    last = values[name][-1]
    new = name == "k" and jnp.issubdtype(last.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(last) if new else last


# --- drawing ----------------------------------------------------------------------------------------------------------

STARTS = frozenset("fikwz")


@st.composite
def programs(draw: st.DrawFn, depth: int = 2, most: int = 5) -> Program:
    """A program with inner programs to some depth; every value that it reads exists."""
    present, steps = set(STARTS), []
    for _ in range(draw(st.integers(1, most))):
        nested = depth > 0 and draw(st.integers(0, 3)) == 0
        table: dict[str, Any] = NESTINGS if nested else OPS
        names = [operation for operation, op in table.items() if set(op.takes) <= present]
        # An operation that makes another kind, followed by one that reads it, would rarely be drawn together.
        making = [operation for operation in names if set(getattr(table[operation], "gives", "f")) - STARTS]
        reading = [operation for operation in names if set(table[operation].takes) - STARTS]
        name = draw(st.sampled_from(draw(st.sampled_from([few for few in (names, making, reading) if few]))))
        op = table[name]
        reads = tuple(draw(st.integers(0, 3)) for _ in op.takes)
        inner = tuple(draw(programs(depth - 1, 2)) for _ in range(op.programs)) if nested else ()
        steps.append(Step(name, reads, draw(st.integers(0, 11)), inner))
        present.add(op.gives if isinstance(op, Op) else "f")
    outputs = st.lists(st.sampled_from(["x", "again", *_NO_LEAVES, *sorted(present - {"w", "z"})]), unique=True, max_size=3)
    return Program(tuple(steps), tuple(sorted(draw(outputs))) if depth == 2 else ())


def arguments(layers: int, seed: int = 0, old_keys: bool = False) -> tuple[dict[str, Any], Any, Any, Any]:
    """Stacked parameters of a number of layers, some without leaves; the input; integers; and a key for each layer."""
    random = np.random.default_rng(seed)
    z = random.normal(size=(layers, WIDTH)) + 1j * random.normal(size=(layers, WIDTH))
    params = {"w": jnp.asarray(random.normal(size=(layers, WIDTH, WIDTH)) / 2), "z": jnp.asarray(z / 2), **_NO_LEAVES}
    ids = jnp.asarray(random.integers(0, 7, ROWS), jnp.int32)
    key = jax.random.PRNGKey(seed) if old_keys else jax.random.key(seed)
    return params, jnp.asarray(random.normal(size=(ROWS, WIDTH))), ids, jax.random.split(key, layers)
