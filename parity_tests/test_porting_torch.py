"""Weight maps with PyTorch's own tensors: dtypes, views, tied parameters, state-dict files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file, save_file

from examples.models import nnx as nnx_models
from parity_tests.mutants.models import DECODER
from parity_tests.support import SIZES, torch_model
from remat_jax import porting
from remat_jax.errors import PortingError

KINDS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int32", "bool"]
BIAS = "a -> params/a"


def tensor(dtype: str, *shape: int) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    return made.to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", KINDS)
def test_every_dtype_goes_there_and_back_bit_by_bit(dtype: str) -> None:
    x = tensor(dtype, 3, 5).T
    with jax.enable_x64(True):
        converted = porting.from_torch({"a": x}, {"params": {"a": np.zeros((3, 5))}}, "a -> params/a | linear")
        array = converted["params"]["a"]
        back = porting.to_torch(converted, "a -> params/a | linear")["a"]
    assert array.dtype.name == dtype and np.array_equal(np.asarray(array).astype(float), x.T.to(torch.float64).numpy())
    assert (
        back.dtype == x.dtype and back.is_contiguous() and torch.equal(back.view(torch.uint8), x.contiguous().view(torch.uint8))
    )


def test_what_a_tensor_becomes_does_not_change_with_it() -> None:
    weight = torch.zeros(1 << 16)
    converted = porting.from_torch({"a": weight}, {"params": {"a": np.zeros(1 << 16)}}, BIAS)
    back = porting.to_torch(converted, BIAS)["a"]
    weight += 1
    back += 2
    assert not np.asarray(converted["params"]["a"]).any() and weight.eq(1).all()


def test_gradients_and_lazy_tensors_are_read_and_others_are_named() -> None:
    weight = torch.nn.Parameter(tensor("float32", 4))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert porting.as_numpy(weight).tolist() == weight.tolist() and porting.as_numpy(conjugate).tolist() == [1 - 2j]
    with pytest.raises(PortingError, match="2 problems") as error:
        porting.from_torch({"a": torch.zeros(3, device="meta"), "b": torch.eye(2).to_sparse()}, {"params": {}}, "x -> params/x")
    assert "a: is a torch.float32 tensor on meta" in str(error.value) and "b: is a torch.float32 tensor on cpu with" in str(
        error.value
    )


def tied() -> torch.nn.ModuleDict:
    embed, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    return torch.nn.ModuleDict({"embed": embed, "head": head})


def test_tied_parameters_are_one_leaf_and_one_gradient() -> None:
    model, shapes = tied(), {"params": {"embedding": np.zeros((5, 3), np.float32)}}
    text = "embed.weight -> params/embedding\ntie: embed.weight = head.weight"
    model["head"](model["embed"](torch.arange(5))).square().sum().backward()
    converted = porting.from_torch(model.state_dict(), shapes, text)
    assert np.array_equal(converted["params"]["embedding"], model["embed"].weight.detach())
    both = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    assert len(both) == 2
    for gradients in (both, {"embed.weight": model["embed"].weight.grad}):
        there = porting.gradients_from_torch(gradients, shapes, text)["params"]["embedding"]
        assert np.array_equal(there, model["embed"].weight.grad)
    again = tied()
    again.load_state_dict(porting.to_torch(converted, text))
    assert torch.equal(again["head"].weight, model["head"].weight)


@pytest.mark.parametrize(("scan", "suffix"), [(False, ".safetensors"), (True, ".pt")])
def test_a_model_goes_through_files_and_nnx_and_comes_back_bit_by_bit(scan: bool, suffix: str, tmp_path: Path) -> None:
    module = torch_model("ByteDecoder")
    state = module.state_dict()
    porting.save(tmp_path / f"theirs{suffix}", state)
    rules = porting.Rules.parse(DECODER)
    rules = rules.stacked("layers_{i}", "layers") if scan else rules
    with jax.enable_x64(True):
        model = porting.from_torch(porting.load(tmp_path / f"theirs{suffix}"), shapes(scan), rules)
        tokens = np.arange(9)[None]
        difference = np.asarray(model(jnp.asarray(tokens))) - module(torch.tensor(tokens)).detach().numpy()
        assert np.abs(difference).max() < 1e-12
        restacked = porting.restack(model, shapes(not scan), "layers_{i}", "layers")
        assert np.abs(np.asarray(restacked(jnp.asarray(tokens)) - model(jnp.asarray(tokens)))).max() < 1e-12
        porting.save(tmp_path / f"ours{suffix}", porting.to_torch(model, rules))
    again = load_file(tmp_path / "ours.safetensors") if suffix == ".safetensors" else torch.load(tmp_path / "ours.pt")
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)


def shapes(scan: bool) -> Any:
    return nnx.eval_shape(lambda: nnx_models.ByteDecoder(**SIZES["ByteDecoder"], scan=scan, rngs=nnx.Rngs(0)))


def test_safetensors_of_pytorch_are_read_in_every_dtype(tmp_path: Path) -> None:
    tensors = {name: tensor(name, 2, 3) for name in KINDS if "float8" not in name} | {"empty": torch.zeros(0, 3)}
    save_file(tensors, tmp_path / "a.safetensors")
    loaded = porting.load(tmp_path)
    assert loaded.keys() == tensors.keys() and loaded["bfloat16"].dtype == jnp.bfloat16
    assert all(np.array_equal(loaded[name], porting.as_numpy(each)) for name, each in tensors.items())


def test_a_state_dict_inside_a_checkpoint_is_asked_for_by_its_key(tmp_path: Path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "c.pt")
    with pytest.raises(
        PortingError, match=r"c.pt: 'model', 'epoch': not tensors; give the name of the state dict as key: 'model'"
    ):
        porting.load(tmp_path / "c.pt")
    with pytest.raises(PortingError, match="key='ema': c.pt holds 'model', 'epoch'"):
        porting.load(tmp_path / "c.pt", key="ema")
    assert porting.load(tmp_path / "c.pt", key="model")["a"].tolist() == [1, 1]
    torch.save(torch.ones(1), tmp_path / "d.pt")
    with pytest.raises(PortingError, match="d.pt: holds a Tensor, no state dict"):
        porting.load(tmp_path / "d.pt")
