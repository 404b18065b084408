"""PyTorch's side of a comparison: copies of the model in each dtype, and its training step in every mode."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from remat_jax.errors import ArgumentError
from remat_jax.identity import ByIdentity
from remat_jax.parity.capture_torch import names_of_shared
from remat_jax.parity.case import Case, Run, running
from remat_jax.parity.trees import default_loss, default_targets, is_floating, named_outputs
from remat_jax.porting.float64 import keep_float64
from remat_jax.porting.tensors import as_numpy, as_torch

Tensors = dict[str, Any]
_FROZEN_BY_PYTHON = 1_000
"""A larger `gc.get_freeze_count()` shows that the caller has frozen objects; Python 3.12 itself freezes 375 at startup."""


@contextlib.contextmanager
def imports_frozen() -> Iterator[None]:
    """Exclude existing objects, mostly imports, from garbage collection; does nothing if the caller has frozen objects."""
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class TorchSide:
    """The PyTorch model of a case; the caller's module is copied, never changed.

    Attributes:
        weights: the state dict from which every run starts, in float64.
        trained: the names of the parameters that require a gradient; `Runs` removes parameters that neither model uses.
        ties: for a parameter with several names, each name that `named_parameters()` omits → the name that it lists.
        blocks, block_paths: the classes to checkpoint, and the paths of their modules.
        shapes: output name → shape.
        narrows: whether the model casts from float64 to a narrower dtype.
        targets: name of a floating-point output → its target in the default loss.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.weights = case, {}
        model = self._copy("float64")
        self.ties = names_of_shared(model)
        if case.excite:
            statistics = ((n, b) for n, b in model.named_buffers() if n.endswith(("running_mean", "running_var")))
            _excite((*model.named_parameters(), *statistics))
        self.weights = _copies(model)
        self.trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        wrapped = [name for name in self.trained if name not in self.weights]
        if wrapped:
            raise ArgumentError(
                f"torch_module: its parameter {wrapped[0]!r} has another name in state_dict(), as under checkpoint_wrapper; "
                "give the model without the wrapper, and let the modes checkpoint it"
            )
        if not self.trained:
            raise ArgumentError("torch_module: no parameter requires a gradient, so no gradient can be compared")
        with _called(model) as called:
            outputs = self._outputs(model)
        self.blocks = case.torch_blocks or _repeated(model, called)
        self.block_paths = [path for path, module in model.named_modules() if isinstance(module, self.blocks)]
        self.shapes = {name: tuple(x.shape) for name, x in outputs.items()}
        self.targets = default_targets({name: self.shapes[name] for name, x in outputs.items() if x.is_floating_point()})

    def excite_mapped(self, names: Iterable[str]) -> None:
        """Excite buffers that a rule maps to Flax variables, as weights are: a buffer of 0 would hide that Flax drops it."""
        parameters = {*self.trained, *self.ties}
        if self.case.excite:
            _excite((n, self.weights[n]) for n in names if n not in parameters and "running_" not in n)

    def make(self, dtype: str) -> Any:
        """A copy of the model in a dtype, with `weights`."""
        model = self._copy(dtype)
        model.load_state_dict(self.weights)
        return model

    def run(self, dtype: str, mode: str = "off", *, steps: int = 0) -> Run:
        """Run a training step, or `steps` steps if the case has an optimizer."""
        model, optimizer = self.make(dtype), None
        if self.case.optimizer and steps:
            optimizer = self.case.optimizer.torch([p for p in model.parameters() if p.requires_grad])
        with _precisely(dtype), self.in_mode(model, mode):
            inputs = self.inputs(dtype)
            for name in self.case.inputs.floating:
                inputs[name].requires_grad_()
            result = self._call(model, inputs)
            loss = self._loss(result, dtype)
            outputs = {name: as_numpy(x) for name, x in named_outputs(result, "torch").items()}
            state = _copies(model)
            loss.backward()
            parameters = {name: p for name, p in model.named_parameters() if name in self.trained}
            run = Run(
                outputs=outputs,
                gradients={name: _gradient(p) for name, p in parameters.items()},
                input_gradients={name: _gradient(inputs[name]) for name in self.case.inputs.floating},
                losses=[float(loss.detach())],
                state=state,
                unused=frozenset(name for name, p in parameters.items() if p.grad is None),
            )
            if optimizer:
                optimizer.step()
                run.after = _copies(model)
                for _ in range(steps - 1):
                    model.zero_grad(set_to_none=True)
                    loss = self.loss(model, self.inputs(dtype), dtype)
                    loss.backward()
                    optimizer.step()
                    run.losses.append(float(loss.detach()))
        return run

    def inputs(self, dtype: str) -> Tensors:
        """The inputs as tensors, floating-point inputs in `dtype`."""
        arrays = self.case.inputs.arrays
        return {name: as_torch(x.astype(dtype) if is_floating(x) else x) for name, x in arrays.items()}

    def loss(self, model: Any, inputs: Tensors, dtype: str) -> Any:
        """The loss, with its autograd graph."""
        return self._loss(self._call(model, inputs), dtype)

    @contextlib.contextmanager
    def in_mode(self, model: Any, mode: str) -> Iterator[None]:
        """Apply a mode or a policy to the model's blocks."""
        import torch_ref

        if mode == "off":
            yield
            return
        if not self.blocks:
            raise ArgumentError(
                f"modes has {mode!r}, but the PyTorch model has no list of modules of one class: "
                "name the class to checkpoint with torch_blocks, or give modes=('off',)"
            )
        try:
            with torch_ref.checkpoint_blocks(model, dict.fromkeys(self.blocks, mode), in_evaluation=True):
                yield
        except torch_ref.TorchRefError as error:
            raise ArgumentError(f"modes: {mode!r} in PyTorch: {error}") from error

    def saved(self, dtype: str, mode: str) -> Any:
        """The residuals in a mode, as torch_ref's `SavedBytes`."""
        import torch_ref

        model = self.make(dtype)
        with imports_frozen(), self.in_mode(model, mode):
            return torch_ref.saved_for_backward(lambda inputs: self.loss(model, inputs, dtype), self.inputs(dtype))

    def tables(self) -> list[str]:
        """The names of float32 and bfloat16 buffers that are not in the state dict: `.double()` keeps their rounding error.

        Buffers of whole numbers, such as masks, have no rounding error and are not listed.
        """
        if self.case.builds:
            return []
        model = self.case.torch_module
        tables = [(name, x) for name, x in model.named_buffers() if name not in self.weights]
        small = [(name, x) for name, x in tables if str(x.dtype) in ("torch.float32", "torch.bfloat16")]
        return [name for name, x in small if not (x == x.round()).all()]

    def _copy(self, dtype: str) -> Any:
        import torch

        with _precisely(dtype):
            model = self.case.torch() if self.case.builds else copy.deepcopy(self.case.torch_module)
            _refuse_spoilt(model)
            return model.to(getattr(torch, dtype))

    def _call(self, model: Any, inputs: Tensors) -> Any:
        args, kwargs = self.case.inputs.arguments(inputs)
        return self.case.torch_call(model, *args, **kwargs)

    def _outputs(self, model: Any) -> Tensors:
        """The outputs of one forward pass; refuses a model whose outputs depend on random numbers."""
        import torch

        before = torch.get_rng_state()
        with torch.no_grad(), keep_float64() as narrowed, running("torch_module"):
            outputs = named_outputs(self._call(model, self.inputs("float64")), "torch")
            if not torch.equal(before, torch.get_rng_state()):
                again = named_outputs(self._call(model, self.inputs("float64")), "torch")
                if any(not torch.equal(x, again[name]) for name, x in outputs.items()):
                    _refuse_random(model)
        self.narrows = bool(narrowed)
        return outputs

    def _loss(self, result: Any, dtype: str) -> Any:
        import torch

        if self.case.loss is None:
            targets = {name: as_torch(x.astype(dtype)) for name, x in self.targets.items()}
            loss = default_loss(named_outputs(result, "torch"), targets)
            if not loss.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    "torch_module gives outputs without a graph, so nothing has a gradient: do not detach the outputs"
                )
            return loss
        with running("loss", "computed from PyTorch's output"):
            loss = self.case.loss[0](result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise ArgumentError(f"loss gave {repr(loss)[:80]} for PyTorch: expected a scalar tensor that depends on the model")
        return loss.reshape(())


def _refuse_spoilt(model: Any) -> None:
    """Refuse a model whose parameters have no values or are not finite."""
    parameters = dict(model.named_parameters())
    empty = [name for name, parameter in parameters.items() if parameter.is_meta]
    if empty:
        raise ArgumentError(f"torch_module: {', '.join(empty[:4])} is on the device meta and has no values: load values first")
    spoilt = [name for name, parameter in parameters.items() if not parameter.isfinite().all()]
    if spoilt:
        raise ArgumentError(
            f"torch_module: {', '.join(spoilt[:4])} holds NaN or infinity, so nothing can be compared; load other weights"
        )


def _precisely(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Prevent casts to float32 in float64 runs; other dtypes run unchanged."""
    return keep_float64() if dtype == "float64" else contextlib.nullcontext()


def _copies(model: Any) -> Tensors:
    """A copy of the state dict in which a tensor with two names stays a single tensor, as the weight map requires."""
    state_dict = model.state_dict(keep_vars=True)
    copies = ByIdentity((tensor, tensor.detach().clone()) for tensor in state_dict.values())
    return {name: copies[tensor] for name, tensor in state_dict.items()}


def _gradient(tensor: Any) -> np.ndarray:
    return as_numpy(tensor) * 0 if tensor.grad is None else as_numpy(tensor.grad)


def _excite(tensors: Iterable[tuple[str, Any]]) -> None:
    """Add noise to constant tensors: biases of 0 and scales of 1 would hide a wrong map."""
    import torch

    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in tensors:
            if not tensor.numel() or not tensor.is_floating_point() or (tensor != tensor.flatten()[0]).any():
                continue
            level = tensor.flatten()[0].abs().item() or 1.0
            noise = 0.2 * level * torch.randn(tensor.shape, generator=random, dtype=torch.float64)
            tensor.copy_((tensor + noise).abs() if name.endswith("running_var") else tensor + noise)


@contextlib.contextmanager
def _called(model: Any) -> Iterator[set[str]]:
    """The paths of the modules that are called while the context is open."""
    paths: set[str] = set()
    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            hook = module.register_forward_pre_hook(lambda *_, path=path: paths.add(path))
            hooks.callback(hook.remove)
        yield paths


def _repeated(model: Any, called: Collection[str]) -> tuple[type, ...]:
    """The classes to checkpoint by default, in the order of their modules; `called` has the paths of the called modules.

    A `ModuleList` or `Sequential` of two or more modules gives their class if all have the same class and one of them is
    called. Only outermost lists count. If no list gives a class, each `ModuleList` of a single module gives its class.
    """
    import torch

    def outermost(kinds: Any, least: int) -> tuple[type, ...]:
        classes: dict[str, type] = {}
        for path, module in model.named_modules():
            children = dict(module.named_children()) if isinstance(module, kinds) else {}
            inside = any(path.startswith(f"{other}.") for other in classes)
            is_called = any(f"{path}.{name}".lstrip(".") in called for name in children)
            if len(children) >= least and len(set(map(type, children.values()))) == 1 and is_called and not inside:
                classes[path] = type(next(iter(children.values())))
        return tuple(dict.fromkeys(classes.values()))

    return outermost((torch.nn.ModuleList, torch.nn.Sequential), 2) or outermost(torch.nn.ModuleList, 1)


def _refuse_random(model: Any) -> None:
    dropping = [name for name, part in model.named_modules() if part.training and "Dropout" in type(part).__name__]
    where = f" (dropout in {', '.join(dropping[:4])})" if dropping else ""
    raise ArgumentError(
        f"torch_module draws random numbers in its forward pass{where}, and no other framework draws the same numbers: call "
        "torch_module.eval(), or build it with a rate of 0"
    )
