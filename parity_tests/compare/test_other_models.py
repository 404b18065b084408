"""Right pairs that a comparison once refused: recurrent nets, other libraries, models without blocks, masks cast to bool."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity_tests.compare.cases import QUICK, run
from parity_tests.pairs import own
from parity_tests.small_pairs import SERIES, Flax, Torch, finding, linears, mlp
from remat_jax.apply.pytorch_style import gradient_checkpoint_forward
from remat_jax.errors import ArgumentError, PortingError

X = SERIES[0]
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
WIDTH, HIDDEN = own.WIDTH, own.HIDDEN


class NnxRecurrent(nnx.Module):
    """As `own.Recurrent`; its cell draws its first carry from a random key, which counts."""

    def __init__(self, cell: Any) -> None:
        rngs = nnx.Rngs(0)
        self.rnn = nnx.RNN(cell(WIDTH, HIDDEN, rngs=rngs))
        self.hidden, self.gate = nnx.Linear(HIDDEN, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.hidden(self.rnn(x)) * nnx.sigmoid(self.gate(x)))


RECURRENT: dict[str, tuple[Any, Any]] = {
    "lstm": (own.Recurrent("LSTM", num_layers=2), own.RecurrentFlax(nn.OptimizedLSTMCell, 2)),
    "gru both ways": (own.Recurrent("GRU", bidirectional=True), own.RecurrentFlax(nn.GRUCell, both=True)),
    "plain": (own.Recurrent("RNN"), own.RecurrentFlax(nn.SimpleCell)),
    "nnx": (own.Recurrent("LSTM"), NnxRecurrent(nnx.OptimizedLSTMCell)),
}


def recurrent(name: str, **options: Any) -> dict[str, Any]:
    theirs, ours = RECURRENT[name]
    return {"torch_module": theirs, "flax_module": ours, "inputs": own.SERIES, "rules": "auto", **QUICK, **options}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_nets_are_mapped_and_run_in_float64(name: str) -> None:
    report = run(recurrent(name))
    assert report.passed and report.weight_map == "proven"
    assert "keep_float64=True" in finding(report, "Flax stays in float64")


def test_nnxs_gru_is_named_as_a_cell_without_a_bias_of_pytorchs() -> None:
    with pytest.raises(PortingError, match=r"rnn: .* third gate has a bias; nnx\.GRUCell has no such bias"):
        run(recurrent("plain", torch_module=own.Recurrent("GRU"), flax_module=NnxRecurrent(nnx.GRUCell)))


def test_a_loop_in_float32_names_the_option() -> None:
    with pytest.raises(Exception, match=r"carry input(.|\n)*give keep_float64=True, which runs it in float64"):
        run(recurrent("gru both ways", keep_float64=False))


@pytest.mark.parametrize("library", ["equinox", "equinox, mapped by the caller", "haiku"])
def test_models_of_other_libraries_by_the_same_call(library: str) -> None:
    def ours(activation: Any) -> Any:
        if library == "haiku":
            return hk.transform(lambda x: hk.nets.MLP([8, 2], activation=activation)(x))
        return eqx.nn.MLP(4, 2, 8, 1, activation=activation, key=jax.random.key(0))

    options = {"flax_call": lambda model, x: jax.vmap(model)(x)} if "mapped" in library else {}
    case = {"torch_module": mlp(), "inputs": X, "rules": "auto", **QUICK, **options}
    right = run({**case, "flax_module": ours(jax.nn.relu)})
    assert right.passed and right.flax == ("Transformed" if library == "haiku" else "MLP")
    wrong = run({**case, "flax_module": ours(jax.nn.gelu)})
    assert wrong.verdict().startswith("NOT PASSED: the weight map is not proven")
    assert "output" in {row.name for row in wrong.failed_rows}


@pytest.mark.parametrize("keep", [None, True])
def test_an_initialiser_that_fails_under_64_bit_types(keep: bool | None) -> None:
    """Flax runs it at every use of the parameter, to compare shapes."""

    def narrow(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        made = jnp.arange(np.prod(shape)).reshape(shape) / 7.0
        assert made.dtype == jnp.float32
        return made

    ours = Flax(lambda m, x: nn.Dense(2)(nn.relu(nn.Dense(8, kernel_init=narrow)(x))))
    report = run({"torch_module": mlp(), "flax_module": ours, "inputs": X, **QUICK}, keep_float64=keep)
    assert report.passed and report.weight_map == "proven"


def lists(module: Torch, x: torch.Tensor) -> torch.Tensor:
    """Layers as lists of modules: the lists are never called."""
    for norm, layer in module.layers:
        x = x + layer(norm(x))
    return x


def lists_flax(module: nn.Module, x: Any) -> Any:
    for _ in range(2):
        x = x + nn.Dense(4)(nn.LayerNorm(epsilon=1e-5)(x))
    return x


def test_without_blocks_the_other_modes_are_left_out_with_a_note() -> None:
    stages: list[str] = []
    layers = (torch.nn.ModuleList([torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)]) for _ in range(2))
    case = {"torch_module": Torch(lists, layers=torch.nn.ModuleList(layers)), "flax_module": Flax(lists_flax), "inputs": X}
    report = run(case, dtypes="float64", memory=False, progress=lambda what, done, total: stages.append(what))
    assert report.passed and report.modes == ("off",)
    note = "checkpoint, offload left out: the PyTorch model has no repeated modules that are called; name the classes"
    assert finding(report, "modes").startswith(note)
    assert not any("checkpoint" in stage for stage in stages)


def masked(module: Torch, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """An additive mask that is made inside and then cast to bool, as in a mask converter of transformers."""
    low = torch.finfo(torch.float32).min
    hides = 1.0 - mask[:, None, :].expand(-1, 5, -1).to(x.dtype)
    added = hides.masked_fill(hides.bool(), low)
    bias = torch.zeros(2, 5, 5, dtype=x.dtype).masked_fill(added.bool(), low)
    return (module.q(x) @ module.k(x).mT + bias).softmax(-1) @ x


def masked_flax(shows: int) -> Flax:
    def run(module: nn.Module, x: Any, mask: Any) -> Any:
        scores = nn.Dense(4, name="q")(x) @ nn.Dense(4, name="k")(x).swapaxes(1, 2)
        return nn.softmax(jnp.where(mask[:, None] == shows, scores, jnp.finfo(jnp.float32).min)) @ x

    return Flax(run)


def test_a_mask_made_inside_and_cast_to_bool_is_no_false_alarm() -> None:
    case = {"torch_module": Torch(masked, **linears(4, "q", "k")), "inputs": (SERIES[:2], MASK), **QUICK}
    right = run({**case, "flax_module": masked_flax(1)})
    assert right.passed and not right.differences
    wrong = run({**case, "flax_module": masked_flax(0)})
    assert "a position where input 1 is 1" in [each["what"] for each in wrong.differences]


def test_active_dropout_of_an_nnx_model_is_named() -> None:
    class Dropping(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.a, self.drop, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(self.drop(nnx.relu(self.a(x))))

    model = Dropping()
    case = {"torch_module": mlp(), "flax_module": model, "inputs": X, "rules": "auto", **QUICK}
    with pytest.raises(ArgumentError, match=r"dropout is on in drop, .* call flax_module\.eval\(\)"):
        run(case)
    model.eval()
    assert run(case).passed


def test_a_tensor_of_pytorch_and_a_bool_of_numpy_in_the_pytorch_style() -> None:
    with pytest.raises(ArgumentError, match=r"a Tensor of PyTorch, of shape \(2, 3\), .* by jnp.asarray\(x.detach\(\).numpy"):
        gradient_checkpoint_forward(jnp.tanh, True, False, torch.ones(2, 3))
    assert gradient_checkpoint_forward(jnp.tanh, np.bool_(True), np.bool_(False), jnp.ones(2)).shape == (2,)
