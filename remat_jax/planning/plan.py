"""A plan: policies for a workload that fit a budget, what they cost, and what else was possible."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import Group
from rich.text import Text

from remat_jax.apply.blocks import checkpoint_blocks
from remat_jax.apply.effect import call_signature
from remat_jax.apply.own_checkpoints import noting_regions
from remat_jax.errors import ArgumentError, NoEffectError
from remat_jax.planning import files
from remat_jax.planning.explain import explanation, plan_table
from remat_jax.planning.page import page
from remat_jax.planning.plan_data import PlanData
from remat_jax.report.tables import render
from remat_jax.workload import Workload

P = ParamSpec("P")
R = TypeVar("R")


class Plan(PlanData):
    """Policies for a workload, compiled for its target within its budget.

    Attributes:
      policies: block → a policy, or one for each of its layers; `off` where no checkpointing at all fits.
      device_bytes, host_bytes: of one training step, as the compiler lays it out.
      predicted_bytes: what was expected before it was compiled.
      recompute_flops: what a step computes again, in FLOPs, counted in its jaxpr; of all devices of a mesh together.
      seconds: of a step, estimated; `base_seconds` of one that keeps everything.
      timed: whether `seconds` are of the compiled schedule, as on a GPU target; else they are the traced estimate.
      assumed_rates: the rates behind them that nobody measured on such a device, by their names in `Rates`.
      frontier: the unbeaten ways to run the step, smallest first, some compiled and some predicted.
      named: what the named policies take, the same way.
      parts: what the layers do, in forward order.
      workload, target, budget, host_budget: what was asked; bytes, and None for no limit.
      next_gib_seconds: how much less a step would take with `next_bytes` more; None where nothing is left to win, or `timeout`
        ended the search.
      next_bytes: a GiB; of a budget below 16 GiB, a 32nd to a 16th of it.
      tried: every policy that was compiled, with its device bytes.
      notes: what else is to be known.
      model: which model it is for.
      jax_version: what compiled it.
      compiler_options: the memory limit that it was compiled with, for the `jax.jit` of the step: `jax.jit(step,
        compiler_options=plan.compiler_options)`. Empty where the plan fits without a limit.
      lower_bound: seconds of a step that no plan of this model within the budgets is below, by the same estimate; it bounds the
        estimate, and not what a GPU takes. None where the planner's problem does not have the plan in it: groups of layers, a
        memory limit, a named policy that keeps other arrays; and where `timeout` ended the search.

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
        """`fn`, a loss or anything else that runs the model, with the plan's policies on its blocks.

        A plan may fit only with a memory limit for XLA, which belongs to the outermost `jax.jit`:

            loss = plan.apply(loss)
            step = jax.jit(step, compiler_options=plan.compiler_options)

        Without it XLA may use the memory of the whole device.

        A call for which the plan was not made is refused: with another batch (an evaluation on another number of tokens: call
        the plain function), under another mesh, of a function with other checkpoints of its own.

        Args:
          fn: takes the parameters and the batch that the plan was made for, and maybe other arguments.
          strict: False lets every call pass that has the model's parameters. Then nobody has measured its memory.

        Raises:
          ArgumentError: at once, for what is no function.
          PlanningError: when called, with what differs from what the plan was made for.
          BlockError, NoEffectError: when called, as `checkpoint_blocks` raises them.
        """
        if not callable(fn):
            raise ArgumentError(f"fn={fn!r}: expected a function that runs the model")
        planned = fn if self.is_off else checkpoint_blocks(fn, self.policies)
        passed: set[Hashable] = set()

        @functools.wraps(fn)
        def with_plan(*args: P.args, **kwargs: P.kwargs) -> R:
            if strict:
                self.model.check_call(fn, args, kwargs, self._told)
            else:
                self.model.check_arguments((args, kwargs), self._told)
            try:
                with noting_regions() as regions:
                    outputs = planned(*args, **kwargs)
            except NoEffectError as error:
                raise NoEffectError(
                    f"{self._told} is not for this function: it was made with JAX {self.jax_version}, and the model's code or "
                    f"dtypes, or JAX, are others here, so that it has other residuals. Plan again. ({error})"
                ) from None
            # Counting them takes another trace, once for each signature, and only where there are some.
            if strict and (regions or self.model.checkpoints) and (signature := call_signature(args, kwargs)) not in passed:
                self.model.check_checkpoints(fn, args, kwargs, self._told)
                passed.add(signature)
            return outputs

        return with_plan

    @property
    def _told(self) -> str:
        return f"the plan for {self.workload!r}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the keys are the attribute names, and `version`."""
        return files.to_dict(self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON; gives the path back.

        Raises:
          PlanningError: it cannot be written.
        """
        return files.write(path, files.to_json(self), "path")

    @classmethod
    def load(cls, path: str | os.PathLike[str], workload: Workload | None = None) -> Plan:
        """The plan that `save` wrote. With a workload, one for another model, batch or blocks is refused at once.

        Without one, a block that is a class is looked for among those that are loaded, and another model is refused when the
        plan is applied. Nothing that the file names is imported or run.

        Raises:
          PlanningError: the file cannot be read, is none of `save`'s or of another version, or the model is another one.
        """
        return cls(**files.read(path, workload))

    def explain(self) -> str:
        """Why each residual is where it is, and what the next GiB would buy."""
        return explanation(self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as one self-contained page with a slider over the frontier; gives the path back.

        Raises:
          PlanningError: it cannot be written.
        """
        return files.write(path, page(self), "path")

    def __rich__(self) -> Any:
        return Group(plan_table(self), *map(Text, self.notes))

    def __str__(self) -> str:
        return render(self)
