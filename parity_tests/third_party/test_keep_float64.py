"""`keep_float64`: nothing in a third-party model falls back to float32, in either pass, and only inside the context."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import torch
from torch.nn.functional import softmax
from torch.utils.checkpoint import checkpoint

from parity_tests.third_party import ports as p
from parity_tests.third_party.of_transformers import PORTS, text
from remat_jax.parity import float64_error, keep_float64

# No padding: cast to float32, the mask's least float64 is minus infinity, and a query without visible keys gives NaN.
PORT = dataclasses.replace(
    PORTS["llama"], inputs={"input_ids": text(97)[0]["input_ids"]}, arguments=lambda x: (x["input_ids"],)
)
NARROW = (torch.float32, torch.float16, torch.bfloat16)


def logits(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return p.numpy(p.torch_outputs(PORT, model, p.tensors(PORT.inputs, "float64")))


def plainly_doubled() -> torch.nn.Module:
    """Llama converted to float64 in the obvious way."""
    torch.manual_seed(0)
    model = PORT.make_torch(PORT.config).double()
    model.load_state_dict(p.weights(PORT))
    return model


def test_without_it_llama_is_a_float32_model() -> None:
    with jax.enable_x64(True):
        model = PORT.make_flax(PORT.config)
        outputs = PORT.apply(model, p.variables(PORT, False, "float64"), PORT.inputs)
        ported = {name: np.asarray(x) for name, x in outputs.items()}
    error, _ = float64_error(ported, logits(plainly_doubled()))
    assert 1e-8 < error < 1e-6
    with keep_float64():
        error, _ = float64_error(ported, logits(p.make_torch(PORT, "float64")))
    assert error < 1e-13


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_way_to_ask_for_less_gives_float64(dtype: torch.dtype) -> None:
    x, like = torch.full((2,), 1 / 3, dtype=torch.float64), torch.zeros((), dtype=dtype)
    with keep_float64():
        made = [x.to(dtype), x.to("cpu", dtype), x.to(dtype=dtype), x.to(like), x.to(tensor=like), x.type(dtype)]
        made += [
            x.type_as(like),
            x.float(),
            x.half(),
            x.bfloat16(),
            x.sum(dtype=dtype) / 2,
            softmax(x, 0, dtype=dtype) * 2 / 3,
        ]
        made += [torch.full((2,), 1 / 3, dtype=dtype), torch.tensor([1 / 3], dtype=dtype), torch.tensor(1) / 3]
    for each in made:
        assert each.dtype == torch.float64
        assert torch.equal(each, torch.full_like(each, 1 / 3))


def test_what_is_no_cast_to_less_stays() -> None:
    x, single = torch.ones(2, dtype=torch.float64), torch.ones(2)
    with keep_float64():
        assert x.to(torch.int32).dtype == torch.int32
        assert x.view(torch.float32).shape == (4,)
        assert x.to(torch.complex128).dtype == torch.complex128
        assert (single * 2).dtype == torch.float32
        assert single.to(single).dtype == torch.float32
        assert x.to(single.long()).dtype == torch.int64


# A reentrant checkpoint itself refuses `autograd.grad` and `inputs=`.
WAYS = {
    "tensor.backward": (True, lambda y, x: y.backward()),
    "autograd.backward": (True, lambda y, x: torch.autograd.backward([y], retain_graph=True)),
    "tensor.backward with a gradient": (False, lambda y, x: y.backward(torch.ones(()), inputs=[x])),
    "autograd.grad": (False, lambda y, x: setattr(x, "grad", torch.autograd.grad(y, x, create_graph=True)[0].detach())),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_recomputation_in_the_backward_pass_is_inside(way: str) -> None:
    seen: list[torch.dtype] = []

    def narrow_inside(x: torch.Tensor) -> torch.Tensor:
        narrow = x.float()
        seen.append(narrow.dtype)
        return narrow.sin().to(x.dtype)

    may_be_reentrant, differentiate = WAYS[way]
    for reentrant in (False, True)[: 1 + may_be_reentrant]:
        x = torch.full((3,), 0.3, dtype=torch.float64, requires_grad=True)
        with keep_float64():
            differentiate(checkpoint(narrow_inside, x, use_reentrant=reentrant).sum(), x)
        assert x.grad is not None and torch.equal(x.grad, x.detach().cos())
    assert seen == [torch.float64] * 2 * (1 + may_be_reentrant)


def test_it_ends_after_an_error_too() -> None:
    with pytest.raises(ValueError, match="inside"), keep_float64():
        raise ValueError("inside")
    assert torch.get_default_dtype() == torch.float32 == torch.ones(1).double().float().dtype
