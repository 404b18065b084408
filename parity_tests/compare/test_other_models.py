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

from parity_tests.compare import cases as c
from parity_tests.compare.cases import run
from remat_jax.apply.pytorch_style import gradient_checkpoint_forward
from remat_jax.errors import ArgumentError, PortingError
from remat_jax.parity import ParityReport

SERIES = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
X = SERIES[0]


def checks(report: ParityReport) -> dict[str, str]:
    return {check.name: check.found for check in report.checks}


class RecurrentTorch(torch.nn.Module):
    def __init__(self, kind: str, layers: int, both: bool) -> None:
        super().__init__()
        self.inp = torch.nn.Linear(4, 5)
        self.rnn = getattr(torch.nn, kind)(5, 6, num_layers=layers, batch_first=True, bidirectional=both)
        self.head = torch.nn.Linear(12 if both else 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.inp(x))[0])


class Recurrent(nn.Module):
    cell: Any
    layers: int
    both: bool

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(5, name="inp")(x)
        for _ in range(self.layers):
            layer = nn.RNN(self.cell(6))
            x = nn.Bidirectional(layer, nn.RNN(self.cell(6)))(x) if self.both else layer(x)
        return nn.Dense(3, name="head")(x)


class NnxRecurrent(nnx.Module):
    """Its cell draws its first carry from a random key, which counts."""

    def __init__(self, cell: Any) -> None:
        rngs = nnx.Rngs(0)
        self.inp, self.head = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)
        self.rnn = nnx.RNN(cell(5, 6, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        return self.head(self.rnn(self.inp(x)))


RECURRENT = {
    "lstm": (RecurrentTorch("LSTM", 2, False), Recurrent(nn.OptimizedLSTMCell, 2, False)),
    "lstm both ways": (RecurrentTorch("LSTM", 1, True), Recurrent(nn.LSTMCell, 1, True)),
    "gru": (RecurrentTorch("GRU", 1, False), Recurrent(nn.GRUCell, 1, False)),
    "plain": (RecurrentTorch("RNN", 1, False), Recurrent(nn.SimpleCell, 1, False)),
    "nnx": (RecurrentTorch("LSTM", 1, False), NnxRecurrent(nnx.OptimizedLSTMCell)),
    "nnx, plain": (RecurrentTorch("RNN", 1, False), NnxRecurrent(nnx.SimpleCell)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_nets_are_mapped_and_run_in_float64(name: str) -> None:
    theirs, ours = RECURRENT[name]
    report = run({"torch_module": theirs, "flax_module": ours, "inputs": SERIES, "rules": "auto", **c.QUICK})
    assert report.passed and report.weight_map == "proven"
    assert "keep_float64=True" in checks(report)["Flax stays in float64"]


def test_nnxs_gru_is_named_as_a_cell_without_a_bias_of_pytorchs() -> None:
    case = {"torch_module": RecurrentTorch("GRU", 1, False), "flax_module": NnxRecurrent(nnx.GRUCell), "inputs": SERIES}
    with pytest.raises(PortingError, match=r"rnn: .* third gate has a bias; nnx\.GRUCell has no such bias"):
        run(case, rules="auto", **c.QUICK)


def mlp() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@pytest.mark.parametrize("library", ["equinox", "equinox, mapped by the caller", "haiku"])
def test_models_of_other_libraries_by_the_same_call(library: str) -> None:
    def ours(activation: Any) -> Any:
        if library == "haiku":
            return hk.transform(lambda x: hk.nets.MLP([8, 2], activation=activation)(x))
        return eqx.nn.MLP(4, 2, 8, 1, activation=activation, key=jax.random.key(0))

    options = {"flax_call": lambda model, x: jax.vmap(model)(x)} if "mapped" in library else {}
    case = {"torch_module": mlp(), "inputs": X, "rules": "auto", **c.QUICK, **options}
    right = run({**case, "flax_module": ours(jax.nn.relu)})
    assert right.passed and right.flax == ("Transformed" if library == "haiku" else "MLP")
    wrong = run({**case, "flax_module": ours(jax.nn.gelu)})
    assert wrong.verdict().startswith("NOT PASSED: the weight map is not proven")
    assert "output" in {row.name for row in wrong.failed_rows}


class Lists(torch.nn.Module):
    """Layers as lists of modules: the lists are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList([torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in self.layers:
            x = x + layer(norm(x))
        return x


class ListsFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = x + nn.Dense(4)(nn.LayerNorm(epsilon=1e-5)(x))
        return x


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.relu(nn.Dense(8)(x)))


@pytest.mark.parametrize("keep", [None, True])
def test_an_initialiser_that_fails_under_64_bit_types(keep: bool | None) -> None:
    """Flax runs it at every use of the parameter, to compare shapes."""

    def narrow(key: Any, shape: tuple[int, ...]) -> Any:
        made = jnp.arange(np.prod(shape)).reshape(shape) / 7.0
        assert made.dtype == jnp.float32
        return made

    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2)(nn.relu(nn.Dense(8, kernel_init=lambda key, shape, dtype: narrow(key, shape))(x)))

    report = run({"torch_module": mlp(), "flax_module": Flax(), "inputs": X, "rules": "auto", **c.QUICK}, keep_float64=keep)
    assert report.passed and report.weight_map == "proven"


@pytest.mark.parametrize(("theirs", "ours"), [(Lists, ListsFlax), (mlp, MLP)])
def test_without_blocks_the_other_modes_are_left_out_with_a_note(theirs: Any, ours: Any) -> None:
    stages: list[str] = []
    case = {"torch_module": theirs(), "flax_module": ours(), "inputs": X}
    report = run(case, dtypes="float64", memory=False, progress=lambda what, done, total: stages.append(what))
    assert report.passed and report.modes == ("off",)
    note = "checkpoint, offload left out: the PyTorch model has no repeated modules that are called; name the classes"
    assert checks(report)["modes"].startswith(note)
    assert not any("checkpoint" in stage for stage in stages)


class Masked(torch.nn.Module):
    """An additive mask that is made inside and then cast to bool, as in a mask converter of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        low = torch.finfo(torch.float32).min
        hides = 1.0 - mask[:, None, :].expand(-1, 5, -1).to(x.dtype)
        added = hides.masked_fill(hides.bool(), low)
        bias = torch.zeros(2, 5, 5, dtype=x.dtype).masked_fill(added.bool(), low)
        return (self.q(x) @ self.k(x).mT + bias).softmax(-1) @ x


class MaskedFlax(nn.Module):
    shows: int = 1

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        scores = nn.Dense(4, name="q")(x) @ nn.Dense(4, name="k")(x).swapaxes(1, 2)
        return nn.softmax(jnp.where(mask[:, None] == self.shows, scores, jnp.finfo(jnp.float32).min)) @ x


def test_a_mask_made_inside_and_cast_to_bool_is_no_false_alarm() -> None:
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    case = {"torch_module": Masked(), "inputs": (SERIES, mask), **c.QUICK}
    right = run({**case, "flax_module": MaskedFlax()})
    assert right.passed and not right.differences
    wrong = run({**case, "flax_module": MaskedFlax(shows=0)})
    assert "a position where input 1 is 1" in [each["what"] for each in wrong.differences]


def test_active_dropout_of_an_nnx_model_is_named() -> None:
    class Dropping(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.a, self.drop, self.b = nnx.Linear(4, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.b(self.drop(nnx.relu(self.a(x))))

    model = Dropping()
    case = {"torch_module": mlp(), "flax_module": model, "inputs": X, "rules": "auto", **c.QUICK}
    with pytest.raises(ArgumentError, match=r"dropout is on in drop, .* call flax_module\.eval\(\)"):
        run(case)
    model.eval()
    assert run(case).passed


def test_a_loop_in_float32_names_the_option() -> None:
    theirs, ours = RECURRENT["gru"]
    case = {"torch_module": theirs, "flax_module": ours, "inputs": SERIES, **c.QUICK}
    with pytest.raises(Exception, match=r"carry input(.|\n)*give keep_float64=True, which runs it in float64"):
        run(case, keep_float64=False)


def test_a_tensor_of_pytorch_and_a_bool_of_numpy_in_the_pytorch_style() -> None:
    with pytest.raises(ArgumentError, match=r"a Tensor of PyTorch, of shape \(2, 3\), .* by jnp.asarray\(x.detach\(\).numpy"):
        gradient_checkpoint_forward(jnp.tanh, True, False, torch.ones(2, 3))
    assert gradient_checkpoint_forward(jnp.tanh, np.bool_(True), np.bool_(False), jnp.ones(2)).shape == (2,)
