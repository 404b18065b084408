"""Right pairs that a comparison once called wrong or refused: casts, statistics, recurrent nets, other libraries.

Beside many is a similar wrong pair, whose fault must be named.
"""

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
import torch.nn.functional as F
from flax import nnx

from parity_tests.mutants.models import QUICK, run
from parity_tests.pairs import own
from parity_tests.small_pairs import DENSE, SERIES, Flax, Torch, finding, linears, mlp, named
from remat_jax.apply.pytorch_style import gradient_checkpoint_forward
from remat_jax.errors import ArgumentError, PortingError

# Functional dropout.


def dropping_block() -> Torch:
    """A block with functional dropout, which only its own mode switches on."""
    return Torch(lambda m, x: x + F.dropout(m.linear(x).tanh(), 0.5, training=m.training), linear=torch.nn.Linear(4, 4))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + jnp.tanh(nn.Dense(4, name="linear")(x))


LAYERS = """
    {i}.linear.weight -> params/layers_{i}/linear/kernel | linear
    {i}.linear.bias -> params/layers_{i}/linear/bias
"""


def test_modes_do_not_switch_functional_dropout_on() -> None:
    theirs = torch.nn.Sequential(dropping_block(), dropping_block()).eval()
    ours = Flax(lambda m, x: Block(name="layers_1")(Block(name="layers_0")(x)))
    case = {"torch_module": theirs, "flax_module": ours, "inputs": SERIES, "rules": LAYERS}
    report = run(case, modes=("checkpoint", "offload"), dtypes="float64", memory=True)
    assert report.passed, str(report)
    kept = {row.mode: (row.device_bytes, row.host_bytes) for row in report.memory if row.framework == "PyTorch"}
    assert kept == {"checkpoint": (2 * 960, 0), "offload": (960, 2 * 960)}  # the inputs of two blocks; the loss keeps one


# Running statistics.

NORM = """
    weight -> params/scale
    bias -> params/bias
    running_{name} -> batch_stats/{name}
    extra: num_batches_tracked
"""


def norms(*, train: bool, momentum: float = 0.9) -> dict[str, Any]:
    return {
        "torch_module": torch.nn.BatchNorm1d(5).train(train),
        "flax_module": nn.BatchNorm(not train, momentum=momentum, epsilon=1e-5, use_fast_variance=False),
        "inputs": np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32),
        "rules": NORM,
        "modes": "off",
        "memory": False,
    }


@pytest.mark.parametrize(("momentum", "is_named"), [(0.9, False), (0.8, True)])
def test_the_convention_of_statistics_is_named(momentum: float, is_named: bool) -> None:
    """PyTorch keeps the unbiased variance, larger by 7 / 6; a momentum of 0.8 moves twice as far as one of 0.9."""
    report = run(norms(train=True, momentum=momentum))
    found = finding(report, "batch statistics")
    unbiased = "PyTorch keeps the unbiased variance of the batch, 7/6 of the biased variance that Flax keeps: batch_stats/var"
    assert unbiased in found
    moved = "Flax's statistics move 2 times as far in a step as PyTorch's (its momentum differs): batch_stats/mean"
    assert (moved in found) == is_named
    wrong = {"batch_stats/var", "batch_stats/mean"} if is_named else {"batch_stats/var"}
    assert {row.name for row in report.failed_rows} == wrong


def test_statistics_that_differ_otherwise_are_not_explained() -> None:
    """The statistics of other inputs fit no convention."""
    report = run(norms(train=True), flax_call=lambda model, x: model(x * x), dtypes="float64")
    assert not report.passed and "batch statistics" not in [check.name for check in report.checks]


# Casts.


def buckets_torch(module: Torch, x: torch.Tensor) -> torch.Tensor:
    """Distances in logarithmic buckets, each with a learnt number."""
    distances = torch.arange(1, x.shape[1] + 1, dtype=torch.float64)
    return module.linear(x) + module.table(torch.log2(distances).to(torch.long))


@pytest.mark.parametrize("after", [False, True])
def test_a_cast_counts_only_where_what_is_compared_flows_through_it(after: bool) -> None:
    """The distances are float32; with `after`, the learnt numbers are cast too."""

    def buckets(module: nn.Module, x: Any) -> Any:
        distances = jnp.arange(1, x.shape[1] + 1) + 0 * jax.lax.stop_gradient(x[0, :, 0])
        chosen = nn.Embed(4, 4, name="table")(jnp.floor(jnp.log2(distances.astype(jnp.float32))).astype(jnp.int32))
        return nn.Dense(4, name="linear")(x) + (chosen.astype(jnp.float32) if after else chosen)

    theirs = Torch(buckets_torch, table=torch.nn.Embedding(4, 4), linear=torch.nn.Linear(4, 4))
    rules = f"table.weight -> params/table/embedding\n{DENSE}"
    case = {"torch_module": theirs, "flax_module": Flax(buckets), "inputs": SERIES, "rules": rules, **QUICK}
    report = run(case, keep_float64=False)
    assert report.passed != after, str(report)
    assert run(case).passed
    casts = [check.found for check in report.checks if check.name == "Flax stays in float64"]
    text = "its float64 step casts to a smaller dtype: float64 to float32 in Flax"
    assert [cast.partition("; ")[0] for cast in casts] == [text] * after


# What settings say, and what is a table.


class QuickGELU(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("ours", [True, False])
def test_settings_that_do_not_differ_are_not_told_and_quick_gelu_is(theirs: bool, ours: bool) -> None:
    """A convolution of one pixel with a stride, an activation, functional dropout, and a masking constant."""

    def flax(module: nn.Module, x: Any) -> Any:
        x = nn.Conv(4, (1, 1), strides=2, name="conv")(x.transpose(0, 2, 3, 1))
        x = x * nn.sigmoid(1.702 * x) if ours else nn.gelu(x, approximate=False)
        return nn.Dropout(0.1, deterministic=True)(x).transpose(0, 3, 1, 2)

    model = Torch(
        lambda m, x: F.dropout(m.act(m.conv(x)), 0.1, m.training),
        conv=torch.nn.Conv2d(3, 4, 1, stride=2),
        act=QuickGELU() if theirs else torch.nn.GELU(),
    )
    model.register_buffer("masked_bias", torch.tensor(-1e9), persistent=False)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 6, 6)).astype(np.float32)
    rules = "conv.weight -> params/conv/kernel | conv2d\nconv.bias -> params/conv/bias"
    report = run({"torch_module": model.eval(), "flax_module": Flax(flax), "inputs": pixels}, rules=rules, **QUICK)
    assert report.passed == (theirs == ours), str(report)
    forms = {True: "quick", False: "exact"}
    expected = [] if theirs == ours else [("", "GELU", forms[theirs], forms[ours])]
    assert [tuple(difference.values()) for difference in report.differences] == expected
    assert "PyTorch's tables" not in [check.name for check in report.checks]


# Float32 that is written into the model.


def in_float32_torch() -> Torch:
    return Torch(
        lambda m, x: m.linear(m.norm(x.float()).softmax(-1)) * torch.sigmoid(x.float().mean()),
        norm=torch.nn.LayerNorm(4),
        **linears(4, "linear"),
    )


def in_float32(epsilon: float = 1e-5) -> Flax:
    """The same, by casts and by dtypes."""

    def run(module: nn.Module, x: Any) -> Any:
        y = nn.softmax(nn.LayerNorm(epsilon, dtype=jnp.float32, name="norm")(x.astype(jnp.float32)))
        y = nn.Dense(4, dtype=jnp.float32, name="linear")(y)
        return y * nn.sigmoid(jnp.mean(x, dtype=jnp.float32))

    return Flax(run)


def test_float32_that_is_written_into_a_model_is_widened_where_it_is_meant() -> None:
    rules = f"norm.weight -> params/norm/scale\nnorm.bias -> params/norm/bias\n{DENSE.replace('{name}', 'linear')}"
    case = {"torch_module": in_float32_torch(), "flax_module": in_float32(), "inputs": SERIES, "rules": rules, "modes": "off"}
    with pytest.raises(ArgumentError, match=r"returns output in float32, .*; if the model intends this, give keep_float64"):
        run(case, keep_float64=False)
    report = run(case, memory=False)
    said = finding(report, "Flax stays in float64")
    assert said.startswith("its float64 step casts to float32: ") and "keep_float64=True is on" in said
    assert report.passed, str(report)
    assert max(row.error or 0 for row in report.rows) < 1e-13
    wrong = run({**case, "flax_module": in_float32(1e-4)}, keep_float64=True, **QUICK)
    assert named(wrong, "forward", "flax_path") == ("norm",)
    alone = run(case, dtypes="float32", memory=False)  # widening has left no trace
    assert alone.passed, str(alone)


# Recurrent nets, other libraries, models without blocks, masks cast to bool.

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
    case = {"torch_module": mlp(), "inputs": SERIES[0], "rules": "auto", **QUICK, **options}
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
    report = run({"torch_module": mlp(), "flax_module": ours, "inputs": SERIES[0], **QUICK}, keep_float64=keep)
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
    case = {
        "torch_module": Torch(lists, layers=torch.nn.ModuleList(layers)),
        "flax_module": Flax(lists_flax),
        "inputs": SERIES[0],
    }
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
    case = {"torch_module": mlp(), "flax_module": model, "inputs": SERIES[0], "rules": "auto", **QUICK}
    with pytest.raises(ArgumentError, match=r"dropout is on in drop, .* call flax_module\.eval\(\)"):
        run(case)
    model.eval()
    assert run(case).passed


def test_a_tensor_of_pytorch_and_a_bool_of_numpy_in_the_pytorch_style() -> None:
    with pytest.raises(ArgumentError, match=r"a Tensor of PyTorch, of shape \(2, 3\), .* by jnp.asarray\(x.detach\(\).numpy"):
        gradient_checkpoint_forward(jnp.tanh, True, False, torch.ones(2, 3))
    assert gradient_checkpoint_forward(jnp.tanh, np.bool_(True), np.bool_(False), jnp.ones(2)).shape == (2,)
