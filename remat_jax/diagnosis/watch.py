"""The checkpointed regions of a workload, with the arrays that each saves and the equations that each recomputes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from remat_jax import compat
from remat_jax.apply import scope
from remat_jax.apply.audit import Audit
from remat_jax.apply.effect import run_under
from remat_jax.apply.scope import BlockPolicies
from remat_jax.core import BlockUnderPolicy, block_under_policy, is_smooth
from remat_jax.core.flow import CALLS, all_inputs, flagged, has, inner_flags
from remat_jax.core.marks import Block
from remat_jax.core.matmuls import eqn_flops
from remat_jax.core.origins import is_on_host, origin
from remat_jax.core.rewrite import region_body
from remat_jax.core.walk import bodies, equations, inner_jaxprs, of_some
from remat_jax.cost.count import count
from remat_jax.diagnosis.findings import Finding, some
from remat_jax.errors import BlockError, RematError, UnsupportedError
from remat_jax.memory import ResidualTable, residuals
from remat_jax.policy import JaxPolicy, Policy
from remat_jax.report.activity import activity
from remat_jax.workload import Workload

FULL, EVERYTHING = Policy.parse("full"), Policy.parse("everything")
_NO_REVERSE_MODE = (NotImplementedError, TypeError, ValueError)
# Operations that only rearrange an array, or cast it.
_VIEWS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "reshape", "rev", "slice", "squeeze", "transpose"}
)


def is_view(eqn: JaxprEqn, flags: Sequence[bool]) -> bool:
    """Whether `eqn` only rearranges, casts or names its operands, and all of them are flagged."""
    return (eqn.primitive.name in _VIEWS or compat.given_name(eqn) is not None) and all(flags)


@dataclass(frozen=True)
class Kept:
    """An array that a region saves for its backward pass: its name, its bytes, and whether it is in host memory."""

    name: str
    nbytes: int
    on_host: bool


@dataclass(frozen=True)
class Region:
    """Checkpointed code: a block with the workload's policy (`ours`), or the user's own `jax.checkpoint`.

    Regions with the same code and policy are merged into one region with several module paths (`paths`). `place` is the user's
    source line. The policy None is JAX's default, which recomputes everything. `parameters` has a flag for each input of the
    code. In a block, the flag marks parameters, constants and RNG keys; in a user's own `jax.checkpoint`, it marks arguments of
    the loss and views of arguments. `looped` is True if the region is in a loop.
    """

    paths: tuple[str, ...]
    place: str
    policy: Policy | JaxPolicy | None
    block: BlockUnderPolicy
    parameters: tuple[bool, ...]
    looped: bool
    ours: bool

    @functools.cached_property
    def kept(self) -> tuple[Kept, ...]:
        """The arrays saved for the backward pass, except inputs and constants in device memory."""
        return _kept(self.block)

    @property
    def offloaded(self) -> tuple[Kept, ...]:
        """The saved arrays in host memory."""
        return tuple(kept for kept in self.kept if kept.on_host)

    @functools.cached_property
    def rerun(self) -> tuple[Any, ...]:
        """The equations that the backward pass recomputes."""
        jaxpr = _traced(self.block.checkpointed(prevent_cse=False), self.block.jaxpr, lambda pullback, outs: pullback(outs))
        if jaxpr is None:
            return ()
        regions = filter(is_spent, equations(compat.dce(jaxpr)))
        return tuple(eqn for region in regions for body in bodies(region) for eqn in equations(body))

    def flops(self) -> int:
        """The FLOPs of a forward and a backward pass of the region."""
        return _flops(self.block.checkpointed(prevent_cse=False), self.block.jaxpr)

    def flops_without(self) -> int:
        """The FLOPs without this checkpoint, but with the checkpoints inside it."""
        return _flops(compat.jaxpr_function(self.block.jaxpr), self.block.jaxpr)

    def makers(self) -> dict[str, tuple[Any, dict[Any, Any]]]:
        """Residual name → (the equation that gives the name, the equations of the same jaxpr by output variable)."""
        if self.is_opaque:
            return {}
        linearised, primals = self.block.linearised.jaxpr, len(self.block.jaxpr.in_avals)
        return dict(_makers(linearised, [index < primals for index in range(len(linearised.in_avals))]))

    def finding(self, trap: str, problem: str, remedy: str, *, eqn: JaxprEqn = None) -> Finding:
        """A finding about the region, at the source line of `eqn` if the line is known, else at the region's line."""
        return Finding(trap, some(self.paths), (compat.source_line(eqn) if eqn else "") or self.place, problem, remedy)

    @property
    def is_opaque(self) -> bool:
        """Whether the region has no linearisation, because no input is differentiable."""
        return not any(map(is_smooth, self.block.jaxpr.in_avals))


def _traced(run: Callable[..., Any], jaxpr: ClosedJaxpr, last: Callable[[Any, list[Any]], Any]) -> Any | None:
    """The jaxpr that differentiates `run` and returns `last(pullback, outputs)`; None if `run` has no derivative.

    `run` takes the inputs of the closed `jaxpr`, and computes its outputs.
    """
    smooth = [index for index, aval in enumerate(jaxpr.in_avals) if is_smooth(aval)]
    if not smooth or not any(map(is_smooth, jaxpr.out_avals)):
        return None

    def of(*primals: Any) -> Any:
        def of_smooth(*changed: Any) -> list[Any]:
            return [out for out in of_some(run, primals, smooth)(*changed) if is_smooth(out)]

        outputs, pullback = jax.vjp(of_smooth, *(primals[index] for index in smooth))
        return last(pullback, outputs)

    try:
        return jax.make_jaxpr(of)(*jaxpr.in_avals)
    except _NO_REVERSE_MODE:  # such as a while loop behind a stop_gradient, which the step does not differentiate
        return None


def _kept(block: BlockUnderPolicy) -> tuple[Kept, ...]:
    jaxpr = _traced(block.checkpointed(prevent_cse=False), block.jaxpr, lambda pullback, _: pullback)
    if jaxpr is None:
        return ()
    kept: dict[Any, Kept] = {}
    for atom in jaxpr.jaxpr.outvars:
        source, on_host = origin(jaxpr.jaxpr, atom), is_on_host(atom)
        if source.kind not in ("argument", "constant") or (on_host and not hasattr(atom, "val")):
            kept.setdefault((source.key, on_host), Kept(source.name, compat.tree_bytes(atom.aval), on_host))
    return tuple(kept.values())


def _flops(run: Callable[..., Any], jaxpr: ClosedJaxpr) -> int:
    """The FLOPs of a forward and a backward pass of `run`; 0 if it has a loop of unknown length, or no derivative."""
    traced = _traced(run, jaxpr, lambda pullback, outputs: (outputs, pullback(outputs)))
    try:
        return count(traced, eqn_flops) if traced is not None else 0
    except UnsupportedError:
        return 0


def bytes_in_use(body: ClosedJaxpr) -> int:
    """The bytes of all arrays that the closed jaxpr `body` computes and its backward pass reads."""
    return sum(kept.nbytes for kept in _kept(block_under_policy(body, EVERYTHING, "", [False] * len(body.in_avals))))


def _makers(jaxpr: ClosedJaxpr, primal: Sequence[bool]) -> Iterator[tuple[str, tuple[Any, dict[Any, Any]]]]:
    """The items of `Region.makers`, read from `jaxpr`. Inputs that `primal` does not flag are tangents."""
    fixed = flagged(jaxpr, primal, all_inputs)
    # Leave out loops that also compute tangents: they are not the loops that the backward pass recomputes. Keep calls: their
    # bodies are searched below.
    eqns = [eqn for eqn in jaxpr.jaxpr.eqns if compat.kind(eqn) in CALLS or all(var in fixed for var in eqn.outvars)]
    made = {var: eqn for eqn in eqns for var in eqn.outvars if var in fixed}
    for eqn in jaxpr.jaxpr.eqns:
        name = compat.given_name(eqn)
        if name is not None:
            yield name, (eqn, made)
        for key, inner in _inner(eqn):
            if len(inner.in_avals) == len(eqn.invars) or eqn.primitive.name in ("cond", "while"):
                flags = [has(atom, fixed) for atom in eqn.invars]
                yield from _makers(inner, inner_flags(eqn, key, inner, flags, all_inputs))


def _inner(eqn: JaxprEqn) -> Iterator[tuple[str, Any]]:
    """The closed jaxprs in the parameters of `eqn`, each with the parameter's name."""
    for key, value in inner_jaxprs(eqn).items():
        for jaxpr in value if isinstance(value, tuple) else (value,):
            yield key, compat.closed(jaxpr)


# --- the workload -------------------------------------------------------------------------------------------------------


@dataclass
class Observed:
    """A workload traced under its policies (None for `off`), and the jaxpr of its loss, or of its step if it has no loss.

    `regions` lists the regions of the workload's policies, then the user's own `jax.checkpoint` regions. `order` lists the
    paths of the workload's blocks in the order of execution. `unreached`: block → why the block's policy has no effect.
    """

    workload: Workload
    policies: BlockPolicies | None
    jaxpr: Any
    regions: list[Region] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    unreached: dict[Block, str] = field(default_factory=dict)

    @property
    def policy(self) -> Any:
        """The policies in the form that `measure` takes."""
        return dict(self.policies.entries) if self.policies else "off"

    @functools.cached_property
    def residuals(self) -> ResidualTable | None:
        """The workload's residuals; None if the workload is a step without a loss, or if the policy is refused."""
        try:
            return residuals(self.workload, self.policy)
        except RematError:
            return None

    def of(self, policy: Policy | JaxPolicy) -> list[Region]:
        """The regions of one of the workload's policies."""
        return [region for region in self.regions if region.ours and region.policy == policy]


@activity("tracing the step to see what the policy does")
def observe(workload: Workload, policies: BlockPolicies | None) -> Observed:
    """Trace `workload` under `policies`; unreached blocks and offloads without effect do not raise here."""
    if workload.has_loss:
        function, args = workload.loss, (workload.params, *workload.batch)
    else:
        step = workload.step("off")
        function, args = step.function, step.arguments
    if policies is None:
        observed = Observed(workload, None, jax.make_jaxpr(function)(*args))
    else:
        observed = _under(workload, policies, function, args)
    observed.regions += _grouped(_users_own(observed.jaxpr))
    return observed


def _under(workload: Workload, policies: BlockPolicies, function: Callable[..., Any], args: tuple[Any, ...]) -> Observed:
    collector, records = _Collector(), []

    def collecting(*args: Any) -> Any:
        scope.record().audit = collector
        return function(*args)

    def traced(*args: Any) -> Any:
        outputs, record = run_under(policies.anew(), collecting, args, {})
        records.append(record)
        return outputs

    observed = Observed(workload, policies, jax.make_jaxpr(traced)(*args))
    for entry in policies.entries:
        if entry[0] not in records[-1].reached:
            missed = scope.missed(BlockPolicies((entry,)), records[-1])
            if isinstance(missed, BlockError):
                observed.unreached[entry[0]] = str(missed)
    # Flax also traces the body of a scan outside the loop, to find broadcast variables: leave that trace's regions out.
    in_loops = {region.paths for region in collector.regions if region.looped}
    regions = [region for region in collector.regions if region.looped or region.paths not in in_loops]
    observed.regions = _grouped(regions)
    observed.order = list(dict.fromkeys(region.paths[0] for region in regions))
    return observed


class _Collector(Audit):
    """Records the blocks as regions."""

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []

    def saw(
        self,
        path: str,
        block: BlockUnderPolicy,
        *,
        whole: bool = True,
        layers: range | None = None,
        looped: bool | None = None,
    ) -> None:
        if not whole:
            return
        named = block.named.jaxpr.jaxpr
        input_names = {name for name, candidate in block.named.candidates.items() if candidate.is_input}
        inputs = {eqn.invars[0] for eqn in named.eqns if compat.given_name(eqn) in input_names}
        parameters = tuple(var not in inputs for var in named.invars)
        loop = compat.in_loop() if looped is None else looped
        self.regions.append(Region((path or "the block",), _place_of(block), block.policy, block, parameters, loop, True))


def _place_of(block: BlockUnderPolicy) -> str:
    """The user's first source line in the block; empty if there is none."""
    return next((line for eqn in block.jaxpr.jaxpr.eqns if (line := compat.source_line(eqn))), "")


def _users_own(jaxpr: ClosedJaxpr) -> Iterator[Region]:
    """The `jax.checkpoint` regions of a traced function, except regions that are already differentiated."""
    for eqn, path, from_inputs, looped in region_equations(jaxpr):
        if not compat.is_checkpoint(eqn):
            continue
        body, params = compat.checkpoint_parts(eqn)
        policy = params.get("policy")
        block = block_under_policy(body, FULL if policy is None else policy, path, [not flag for flag in from_inputs])
        yield Region((path,), _place_of(block), policy, block, tuple(from_inputs), looped, False)


def region_equations(
    jaxpr: ClosedJaxpr, given: Sequence[bool] | None = None, path: tuple[str, ...] = (), looped: bool = False
) -> Iterator[tuple[Any, str, list[bool], bool]]:
    """Yield (equation, path, flags of its operands, whether it is in a loop) for each outermost region of a closed jaxpr.

    An operand is flagged if it is an input of the jaxpr that `given` flags (None: any input), or a view of such an input.
    """
    outside = flagged(jaxpr, [True] * len(jaxpr.in_avals) if given is None else given, is_view)
    for eqn in jaxpr.jaxpr.eqns:
        flags, here = [has(atom, outside) for atom in eqn.invars], path + compat.scopes(eqn)
        if is_region(eqn):
            yield eqn, "/".join(here) or "region", flags, looped
        elif not is_spent(eqn) and contains_live_region(eqn):
            loop = looped or eqn.primitive.name in ("scan", "while")
            for key, inner in _inner(eqn):
                yield from region_equations(inner, inner_flags(eqn, key, inner, flags, is_view), here, loop)


def is_spent(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a checkpoint region that is already differentiated."""
    return compat.is_checkpoint(eqn) and bool(compat.checkpoint_parts(eqn)[1].get("differentiated"))


def is_region(eqn: JaxprEqn) -> bool:
    """Whether `eqn` is a checkpointed region that is not differentiated yet."""
    return not is_spent(eqn) and region_body(eqn) is not None


def body_of(region: Any) -> Any:
    """The body of a region's equation, a closed jaxpr."""
    body = region_body(region)
    assert body is not None, "asked of regions only"
    return body


def contains_live_region(eqn: JaxprEqn) -> bool:
    """Whether `eqn` contains a region that is not differentiated yet."""
    if compat.has_own_derivative(eqn):
        return False
    return any(is_region(inner) or contains_live_region(inner) for body in bodies(eqn) for inner in body.jaxpr.eqns)


def _grouped(regions: Iterable[Region]) -> list[Region]:
    """The regions; regions with the same code, policy, actions and source line are merged into one with several paths."""
    groups: dict[Any, Region] = {}
    for region in regions:
        named = region.block.named.candidates.values()
        actions = tuple(map(region.policy.action, named)) if isinstance(region.policy, Policy) else ()
        key = (region.policy, region.looped, region.ours, region.place, region.parameters, actions, _code(region.block.jaxpr))
        first = groups.setdefault(key, region)
        groups[key] = replace(first, paths=tuple(dict.fromkeys((*first.paths, *region.paths))))
    return list(groups.values())


def _code(jaxpr: ClosedJaxpr) -> str:
    """The text of a closed jaxpr, equal for layers that differ only in inputs that they ignore and in their random keys.

    A Haiku layer takes the parameters of all layers as inputs. Flax folds a number made from a module's path into its keys.
    """
    return re.sub(r"(random_fold_in \S+) \d+", r"\1", str(compat.dce(jaxpr, keep_inputs=False)))
