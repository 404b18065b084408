"""A plan: policies for a workload that fit a budget, their cost, and the alternatives."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import Group
from rich.text import Text

from remat_jax import compat
from remat_jax.apply.blocks import checkpoint_blocks
from remat_jax.apply.effect import call_signature
from remat_jax.apply.own_checkpoints import noting_regions
from remat_jax.errors import ArgumentError, NoEffectError
from remat_jax.planning import files
from remat_jax.planning.changes import CHANGES
from remat_jax.planning.explain import beyond_table, explanation, plan_table
from remat_jax.planning.page import page
from remat_jax.planning.plan_data import PlanData
from remat_jax.planning.train_step import JittedStep, train_step
from remat_jax.report.tables import render
from remat_jax.workload import Workload

P = ParamSpec("P")
R = TypeVar("R")


class Plan(PlanData):
    """Policies under which the training step of a workload, compiled for a target, fits a budget.

    Attributes:
      policies: a dict from block to `Policy`, or to `LayerPolicies` (one policy per layer); `off` if the step fits unchanged.
      device_bytes, host_bytes: the bytes of one training step, as compiled, in device memory and in host memory.
      predicted_bytes: the device bytes predicted before compilation.
      recompute_flops: the FLOPs that the blocks recompute (with groups of layers: the whole step), over all devices.
      seconds: the estimated time of a step; `base_seconds` is the estimate for a step that keeps everything.
      timed: whether `seconds` come from the compiled schedule (GPU and TPU targets); otherwise they are the traced estimate.
      assumed_rates: the names of rates (`hardware.Rates`) that `seconds` depend on and that are assumed, not measured.
      frontier: the Pareto-optimal points of time and device memory, smallest memory first. Each is compiled or predicted.
      named: the memory and time of the named policies, each compiled or predicted.
      parts: for each run of equal layers, in forward order, the action for each residual.
      workload, target: their names. budget, host_budget: the budgets in bytes; None means no limit.
      next_gib_seconds: the estimated seconds by which `next_bytes` more memory make a step faster; None if no amount of memory
        makes it faster, or if `timeout` ended the search.
      next_bytes: 1 GiB; for a budget below 16 GiB, between 1/32 and 1/16 of the budget.
      tried: (name, device bytes) of each compiled step, in order.
      findings: what else is to be known of plan and search: `PlanFinding`s, each with a kind, a severity and a sentence;
        `notes` are the sentences.
      is_maximal: whether the search showed that no further residual fits beside those that the plan's step saves. A variant of
        the step saves one more residual in all layers of one run, and is at least 0.3 % faster by the estimate. At most two
        variants are checked: the variant that saves fewest bytes, and the variant predicted to be smallest. Each was compiled
        and does not fit or is no faster, or its prediction is clearly over the budget (`docs/how/planner.md`).
      cut_short: whether `timeout` ended the search, or the compilation of the plan's step once its memory was known.
      offload_needed: whether the plan's step does not fit with the offloaded residuals on the device; None if it offloads
        nothing, or if this was not shown.
      changes: the changes beyond the blocks that the plan makes, of those in `allow`.
      beyond: what each change would give as a plan, or why the workload cannot have it (`Beyond`).
      left_out: the candidates that were still worth a compilation when compilations or time were used up.
      model: the model that the plan was made for.
      jax_version: the JAX version that compiled the plan's step.
      compiler_options: the options to pass to the `jax.jit` of the step as its `compiler_options`: XLA's memory limit, if the
        step fits only with a limit; and, if a scan offloads, the option without which its copies overlap no compute on a GPU.
        Empty if neither is needed.
      lower_bound: a lower bound on the estimated seconds of a step, for every plan of this model within the budgets. It bounds
        the estimate, not the time on a GPU. None if the solver's problem does not contain the plan (groups of layers, a memory
        limit, a named policy that keeps other arrays), if the plan is faster than the bound, or if `timeout` ended the search.

    >>> import jax, jax.numpy as jnp
    >>> import remat_jax as rj
    >>> from flax import linen
    >>> model, x = linen.Dense(8), jax.ShapeDtypeStruct((4, 8), jnp.float32)
    >>> params = jax.eval_shape(model.init, jax.random.key(0), x)
    >>> job = rj.Workload(lambda params, x: jnp.sum(model.apply(params, x) ** 2), params, (x,), linen.Dense)
    >>> made = rj.plan(job, budget="1MiB", target="cpu")
    >>> made.is_off, made.recompute_flops, made.device_bytes < made.budget  # memory enough: nothing is checkpointed
    (True, 0, True)
    """

    def apply(self, fn: Callable[P, R], *, strict: bool = True) -> Callable[P, R]:
        """`fn`, a loss or another function that runs the model, with the plan's policies on the model's blocks.

        `train_step` is the whole step. If `fn` is under `jax.jit`, `nnx.jit` or `eqx.filter_jit`, so is the result, with the
        same donated and static arguments and with `compiler_options`. In a step around a loss, pass the options yourself:

            loss = plan.apply(loss)
            step = jax.jit(step, compiler_options=plan.compiler_options)

        If the plan fits only with a memory limit for XLA, the options contain it: without them, XLA may use the whole device
        memory. If a scan offloads, the options let its copies overlap compute.

        If the plan has micro-batches (`micro_batches`), the result takes one micro-batch.

        A call of the result raises if its batch, its mesh or the number of `fn`'s own checkpoints differs from the plan's. To
        evaluate on another number of tokens, call `fn` itself.

        Args:
          fn: takes the parameters and the batch of the plan, and possibly other arguments.
          strict: if False, every call with the model's parameters is accepted, although its memory was not measured.

        Raises:
          ArgumentError: immediately, if `fn` is not a function.
          PlanningError: when called; the message names the difference from the planned call.
          BlockError, NoEffectError: when called, as in `checkpoint_blocks`.
        """
        return self._applied(fn, strict)

    def _applied(self, fn: Callable[P, R], strict: bool, *, or_whole: bool = False) -> Callable[P, R]:
        """As `apply`; if `or_whole`, the batch may be whole although the plan has micro-batches."""
        if not callable(fn):
            raise ArgumentError(f"fn={fn!r}: expected a function that runs the model")
        own = compat.without_compiler_options(fn)
        changed = own
        for change in self.changes:
            changed = CHANGES[change].loss(changed)
        planned = changed if self.is_off else checkpoint_blocks(changed, self.policies)
        name = f"the plan for {self.workload!r}"
        passed: set[Hashable] = set()

        @functools.wraps(fn)
        def with_plan(*args: P.args, **kwargs: P.kwargs) -> R:
            if strict:
                self.model.check_call(own, args, kwargs, name, micro_batches=self.micro_batches, or_whole=or_whole)
            else:
                self.model.check_arguments((args, kwargs), name)
            try:
                with noting_regions() as regions:
                    outputs = planned(*args, **kwargs)
            except NoEffectError as error:
                raise NoEffectError(
                    f"{name} does not fit this function: the plan was made with JAX {self.jax_version}, and since then the "
                    f"model's code, its dtypes or JAX have changed its residuals. Plan again. ({error})"
                ) from None
            # Counting checkpoints traces again: do it once per signature, and only if there are checkpoints.
            if strict and (regions or self.model.checkpoints) and (signature := call_signature(args, kwargs)) not in passed:
                self.model.check_checkpoints(own, args, kwargs, name)
                passed.add(signature)
            return outputs

        return compat.jitted_like(with_plan, fn, self.compiler_options)

    def train_step(
        self,
        loss: Callable[..., Any],
        optimizer: Any,
        *,
        trainable: Any = None,
        has_aux: bool = False,
        donate: bool = True,
        strict: bool = True,
    ) -> JittedStep:
        """The whole jitted training step, with the plan's policies, compiler options and donated parameters and state.

        With an optax optimizer, `step(params, state, *batch)` returns `(params, state, loss)`; `step.init(params)` makes the
        first state. The state of an optimizer from `offload_optimizer` is put into host memory, wherever it is. On a mesh,
        parameters and state keep their shardings.

        For an NNX model give an `nnx.Optimizer`, or its class: `step(model, optimizer, *batch)` writes to the model
        (parameters, dropout counts, batch statistics) and to the optimizer, and returns the loss.

        The result has `lower` and `trace`, like that of `jax.jit`. Inside another `jit` the plan's compiler options have no
        effect: a `RematWarning` says so, and the outermost `jit` must have them.

        Args:
          loss: the loss, as it is: `loss(params, *batch)`, or `loss(model, *batch)` of an NNX or Equinox model.
          optimizer: an optax optimizer, or an `nnx.Optimizer` (the step takes the instance in each call).
          trainable: which parameters are trained, as for `Workload`.
          has_aux: `loss` returns `(scalar, aux)`, and the step returns this pair in place of the loss.
          donate: the step reuses the buffers of parameters and state: the arrays passed to it are deleted.
          strict: as for `apply`.

        Raises:
          ArgumentError: `loss` is not a function, `optimizer` is no optimizer, or, when called, an argument is of a wrong kind.
          PlanningError, BlockError, NoEffectError: when called, as in `apply`.

        >>> import jax, jax.numpy as jnp, optax
        >>> import remat_jax as rj
        >>> from flax import linen
        >>> model, x = linen.Dense(8), jnp.ones((4, 8))
        >>> loss, tx = lambda params, x: jnp.sum(model.apply(params, x) ** 2), optax.adam(0.1)
        >>> params = model.init(jax.random.key(0), x)
        >>> plan = rj.plan(rj.Workload(loss, params, (x,), linen.Dense, optimizer=tx), budget="1MiB", target="cpu")
        >>> step = plan.train_step(loss, tx)
        >>> state, losses = step.init(params), []
        >>> for _ in range(3):
        ...     params, state, value = step(params, state, x)
        ...     losses.append(float(value))
        >>> losses[0] > losses[1] > losses[2]
        True
        """
        planned = self._applied(loss, strict, or_whole=True)
        return train_step(self, planned, optimizer, trainable=trainable, has_aux=has_aux, donate=donate)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names, and `version`."""
        return files.to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, and return the path.

        Raises:
          PlanningError: the file cannot be written.
        """
        return files.write(path, files.to_json(self))

    @classmethod
    def load(cls, path: str | os.PathLike[str], workload: Workload | None = None) -> Plan:
        """The plan that `save` wrote. With a workload, it raises if the plan is for another model, batch or blocks.

        Without a workload, blocks are looked up among the loaded classes and functions, and a different model is detected only
        when the function that `apply` returns is called. Nothing that the file names is imported or executed.

        Raises:
          PlanningError: the file cannot be read, was not written by `save`, has an unknown version, or is for another model.
        """
        return cls(**files.read(path, workload))

    def explain(self) -> str:
        """The reason for each residual's action, and the gain from the next GiB."""
        return explanation(self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as one self-contained page with a slider over the frontier, and return the path.

        Raises:
          PlanningError: the page cannot be written.
        """
        return files.write(path, page(self))

    def __rich__(self) -> Any:
        return Group(plan_table(self), *filter(None, [beyond_table(self)]), *map(Text, self.notes))

    def __str__(self) -> str:
        return render(self)
