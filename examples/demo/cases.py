"""The three models, each once in PyTorch and once in every Flax form, on the same weights and the same data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from flax import nnx

import torch_ref
from remat_jax import Workload

from .. import pytorch, text
from ..models import linen, weights
from ..models import nnx as nnx_models
from .setting import Form, Setting

Batch = tuple[np.ndarray, ...]
TorchLoss = Callable[..., torch.Tensor]


class JaxJob(NamedTuple):
    """A Flax model as a workload, with values for the arrays that the workload describes by shape.

    `extra` are the arguments of the loss between the parameters and the batch; `to_torch` converts a gradient to PyTorch's
    names and shapes.
    """

    workload: Workload
    params: Any
    extra: tuple[Any, ...]
    to_torch: Callable[[Any], dict[str, np.ndarray]]


class Case(ABC):
    """One model in both frameworks."""

    blocks: tuple[type[torch.nn.Module], ...]
    """PyTorch's block; a forward pass calls it `layers` times."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        # The weights are drawn only once, because all threads share PyTorch's generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(setting.seed)
            self.state = self.module().state_dict()

    @property
    def name(self) -> str:
        return type(self).__name__

    @property
    def layers(self) -> int:
        return self.setting.num_layers

    @property
    def learning_rate(self) -> float:
        return self.setting.learning_rate

    @abstractmethod
    def batches(self) -> list[Batch]:
        """A batch for every step of training, in float32 and int32."""

    @abstractmethod
    def module(self) -> torch.nn.Module:
        """The model in PyTorch, in float32, with arbitrary weights."""

    def torch_model(self) -> torch.nn.Module:
        """The model in PyTorch, in float32 with its initial weights, the same in every call."""
        model = self.module()
        model.load_state_dict(self.state)
        return model

    @abstractmethod
    def torch_loss(self, model: torch.nn.Module, mode: str) -> TorchLoss:
        """The loss of a batch in a mode."""

    @abstractmethod
    def jax_job(self, form: Form, dtype: str) -> JaxJob:
        """The model in Flax, in `dtype`, with PyTorch's initial weights."""

    @abstractmethod
    def begins_block(self, eqn: Any) -> bool:
        """Whether an equation of a jaxpr is the first of a block's forward pass; no other equation matches."""

    def optimizer(self) -> optax.GradientTransformation:
        """The defaults of PyTorch's Adam."""
        return optax.adam(self.learning_rate)

    def _arrays(self, dtype: str) -> dict[str, np.ndarray]:
        return {name: weights.as_numpy(tensor).astype(dtype) for name, tensor in self.state.items()}

    def _begins_layer(self, eqn: Any) -> bool:
        # Queries, keys and values are one product. No other product, in either pass, has the shape (batch, length, 3·d_model).
        size = self.setting
        shape = (size.batch, size.length, 3 * size.d_model)
        return eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.shape == shape


class ByteDecoder(Case):
    """A byte-level language model, trained on the source text of the Python standard library."""

    blocks = (pytorch.DecoderLayer,)

    def batches(self) -> list[Batch]:
        size = self.setting
        return text.batches(size.seed, size.batch, size.length, size.steps)

    def module(self) -> torch.nn.Module:
        return pytorch.ByteDecoder(**self._sizes())

    def torch_loss(self, model: torch.nn.Module, mode: str) -> TorchLoss:
        flags = torch_ref.mode_flags(mode)
        return lambda tokens, targets: model.loss(tokens, targets, **flags)

    def jax_job(self, form: Form, dtype: str) -> JaxJob:
        tree = weights.from_torch(self._arrays(dtype), self.name, scan=form.scan)
        batch = self.batches()[0]
        if form.api == "linen":
            model = linen.ByteDecoder(**self._sizes(), scan=form.scan)

            def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
                return model.apply({"params": params}, tokens, targets, method="loss")

            job = Workload(loss, tree, batch, linen.DecoderLayer, optimizer=self.optimizer(), name=self.name)
            return JaxJob(job, tree, (), lambda gradient: weights.gradients_to_torch(gradient, self.name))
        abstract = nnx.eval_shape(
            lambda: nnx_models.ByteDecoder(**self._sizes(), scan=form.scan, rngs=nnx.Rngs(0))  # loaded below
        )
        loaded = weights.load_nnx(abstract, tree)
        job = Workload.from_nnx(
            loaded,
            lambda model, tokens, targets: model.loss(tokens, targets),
            batch,
            nnx_models.DecoderLayer,
            optimizer=self.optimizer(),
            name=self.name,
        )
        _, params, rest = nnx.split(loaded, nnx.Param, ...)
        return JaxJob(job, params, (rest,), lambda g: weights.gradients_to_torch(weights.nnx_tree(g), self.name))

    def begins_block(self, eqn: Any) -> bool:
        return self._begins_layer(eqn)

    def _sizes(self) -> dict[str, int]:
        size = self.setting
        return {
            "d_model": size.d_model,
            "nhead": size.nhead,
            "num_layers": size.num_layers,
            "max_len": size.length,
        }


class _Regression(Case):
    """A model behind an element-wise weight, which learns random targets by mean squared error.

    With the weight, the first block's input is computed like every other block's input, and is not the batch itself.
    """

    @abstractmethod
    def inner(self) -> torch.nn.Module: ...

    @abstractmethod
    def flax_inner(self, scan: bool) -> Any: ...

    block: Any

    def batches(self) -> list[Batch]:
        size = self.setting
        shape = (size.batch, size.length, size.d_model)
        random = np.random.default_rng(size.seed)
        # The same batch again and again: random targets can only be memorised.
        batch = tuple(random.normal(size=shape).astype(np.float32) for _ in range(2))
        return [batch] * size.steps

    def module(self) -> torch.nn.Module:
        return Weighted(self.inner(), self.setting.d_model)

    def torch_loss(self, model: torch.nn.Module, mode: str) -> TorchLoss:
        flags = torch_ref.mode_flags(mode)
        return lambda x, target: F.mse_loss(model(x, **flags), target)

    def jax_job(self, form: Form, dtype: str) -> JaxJob:
        state = self._arrays(dtype)
        scale = state.pop("weight")
        inner = weights.from_torch({name.removeprefix("inner."): x for name, x in state.items()}, self.name, scan=form.scan)
        model, params = self.flax_inner(form.scan), {"weight": scale, "inner": inner}

        def loss(params: Any, x: jax.Array, target: jax.Array) -> jax.Array:
            y = model.apply({"params": params["inner"]}, x * params["weight"])
            return jnp.mean((y - target) ** 2)

        def to_torch(gradient: Any) -> dict[str, np.ndarray]:
            inside = weights.gradients_to_torch(gradient["inner"], self.name)
            return {"weight": np.asarray(gradient["weight"])} | {f"inner.{name}": x for name, x in inside.items()}

        batch = tuple(x.astype(dtype) for x in self.batches()[0])
        job = Workload(loss, params, batch, self.block, optimizer=self.optimizer(), name=self.name)
        return JaxJob(job, params, (), to_torch)


class DecoderStack(_Regression):
    """A stack of decoder layers, trained by mean squared error."""

    blocks = (pytorch.DecoderLayer,)
    block = linen.DecoderLayer

    def inner(self) -> torch.nn.Module:
        return pytorch.DecoderStack(self.setting.num_layers, self.setting.d_model, self.setting.nhead)

    def flax_inner(self, scan: bool) -> Any:
        size = self.setting
        return linen.DecoderStack(size.num_layers, size.d_model, size.nhead, scan=scan)

    def begins_block(self, eqn: Any) -> bool:
        return self._begins_layer(eqn)


class ToyModel(_Regression):
    """A single sigmoid."""

    blocks = (pytorch.ToyModel,)
    block = linen.ToyModel

    @property
    def layers(self) -> int:
        return 1

    @property
    def learning_rate(self) -> float:
        # Only the weight is trained, and training cannot diverge, so the steps can be large enough to show an effect.
        return 100 * self.setting.learning_rate

    def inner(self) -> torch.nn.Module:
        return Checkpointed(pytorch.ToyModel())

    def flax_inner(self, scan: bool) -> Any:
        return linen.ToyModel()

    def begins_block(self, eqn: Any) -> bool:
        return eqn.primitive.name == "logistic"


class Weighted(torch.nn.Module):
    """An element-wise weight, followed by a model that takes the two flags."""

    def __init__(self, inner: torch.nn.Module, d_model: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(d_model) + 0.5)
        self.inner = inner

    def forward(self, x: torch.Tensor, **flags: bool) -> torch.Tensor:
        """Apply the weight and then the model."""
        return self.inner(x * self.weight, **flags)


class Checkpointed(torch.nn.Module):
    """A block that is called in the mode of the flags; it has no parameters of its own."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, **flags: bool) -> torch.Tensor:
        """Call the block."""
        return torch_ref.gradient_checkpoint_forward(self.block, **flags, x=x)


CASES: dict[str, type[Case]] = {case.__name__: case for case in (ByteDecoder, DecoderStack, ToyModel)}
