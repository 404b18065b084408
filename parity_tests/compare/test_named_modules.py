"""Faults whose module was not named, or named wrongly: outputs of equal shape, own norms, stopped outputs, padding."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare import cases as c
from parity_tests.compare.cases import run

SERIES = np.random.default_rng(1).normal(size=(2, 7, 8)).astype(np.float32)
X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
LAYERS = "{n}.weight -> params/{n}/kernel | linear\n{n}.bias -> params/{n}/bias"


def found(torch_module: torch.nn.Module, flax_module: Any, inputs: Any = X, rules: str = LAYERS) -> tuple[Any, ...]:
    """PyTorch's path and the array of each pass, and the whole report."""
    report = run({"torch_module": torch_module, "flax_module": flax_module, "inputs": inputs, "rules": rules, **c.QUICK})
    assert not report.passed
    named = [first and (first["torch_path"], first["what"], first["note"]) for first in report.divergences.values()]
    return *named, report


class Heads(torch.nn.Module):
    """A question-answering head: two outputs of equal shape, not in alphabetical order."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(8, 6)
        self.head = torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        start, end = self.head(self.body(x)).unbind(-1)
        return {"logits": {"start": start, "end": end}}


class HeadsFlax(nn.Module):
    factor: float = 1.0
    stops: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Dense(6, name="body")(x)
        logits = nn.Dense(2, name="head")(jax.lax.stop_gradient(x) if self.stops else x)
        return {"logits": {"start": logits[..., 0], "end": logits[..., 1] * self.factor}}


def test_outputs_of_equal_shape_are_paired_by_key() -> None:
    forward, backward, _ = found(Heads(), HeadsFlax(1.01))
    assert forward[:2] == ("", "output logits.end") and backward is None
    forward, backward, _ = found(Heads(), HeadsFlax(stops=True))
    assert forward is None and backward[0] == ""


class Scale(torch.nn.Module):
    """An RMS norm of one's own, whose class has no telling name."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8)) if weighted else 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class WithScale(torch.nn.Module):
    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(8, 8), Scale(weighted), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ["norm", "rescaled"])
def test_a_norm_of_ones_own_is_matched_by_its_weights_or_by_what_it_computes(name: str, weighted: bool) -> None:
    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            norm = nn.RMSNorm(epsilon=1e-3, use_scale=weighted, name=name)
            return nn.Dense(4, name="down")(norm(nn.Dense(8, name="up")(x)))

    scale = f"norm.weight -> params/{name}/scale\n" if weighted else ""
    forward, _, _ = found(WithScale(weighted), Flax(), rules=scale + LAYERS)
    assert forward == ("norm", "output 0", "")


class Causal(torch.nn.Module):
    """A convolution that pads both ends; the model drops the end of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv, self.down = torch.nn.Linear(8, 6), torch.nn.Conv1d(6, 6, 3, padding=2), torch.nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.conv(self.up(x).mT)[..., : x.shape[1]].mT.tanh())


@pytest.mark.parametrize("padding", [[(2, 0)], [(1, 1)], [(2, 2)]])
def test_outputs_are_compared_where_the_model_uses_them(padding: Any) -> None:
    class Flax(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            y = nn.Conv(6, (3,), padding=padding, name="conv")(nn.Dense(6, name="up")(x))
            return nn.Dense(4, name="down")(jnp.tanh(scaled_gradient(y)[:, : x.shape[1]]))

    @jax.custom_vjp
    def scaled_gradient(y: Any) -> Any:
        return y

    scaled_gradient.defvjp(lambda y: (y, None), lambda _, cotangent: (2 * cotangent,))
    rules = f"conv.weight -> params/conv/kernel | conv1d\nconv.bias -> params/conv/bias\n{LAYERS}"
    forward, backward, _ = found(Causal(), Flax(), SERIES, rules)
    assert forward == (("conv", "output 0", "") if padding == [(1, 1)] else None)
    assert padding == [(1, 1)] or backward[0] == ""


class ScaledEmbedding(torch.nn.Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3.0


class Scaling(torch.nn.Module):
    """The embedding is scaled by its own class, as in some models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.left, self.right = ScaledEmbedding(9, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        return self.left(x).tanh() * self.right(x).tanh()


@pytest.mark.parametrize("wrong", ["words", "left", "right"])
def test_a_difference_that_the_code_around_a_module_makes_up_for_is_not_named(wrong: str) -> None:
    class Flax(nn.Module):
        @nn.compact
        def __call__(self, ids: Any) -> Any:
            scale = {name: 1.01 if name == wrong else 1.0 for name in ("words", "left", "right")}
            x = 3.0 * scale["words"] * nn.Embed(9, 6, name="words")(ids)
            return jnp.tanh(scale["left"] * nn.Dense(6, name="left")(x)) * jnp.tanh(Scaled(scale["right"], name="right")(x))

    class Scaled(nn.Module):
        scale: float

        @nn.compact
        def __call__(self, x: Any) -> Any:
            kernel = self.param("kernel", nn.initializers.lecun_normal(), (6, 6))
            return (x @ kernel + self.param("bias", nn.initializers.zeros, (6,))) * self.scale

    ids = np.array([[1, 2, 3], [4, 5, 6]])
    rules = "words.weight -> params/words/embedding\n{n}.weight -> params/{n}/kernel | linear\n{n}.bias -> params/{n}/bias"
    forward, _, _ = found(Scaling(), Flax(), ids, rules)
    assert forward[:2] == {"words": ("words", "output 0"), "left": ("", "output 0"), "right": ("right", "output 0")}[wrong]


class Chain(torch.nn.Module):
    def __init__(self, words: bool) -> None:
        super().__init__()
        self.first = torch.nn.Embedding(9, 6, padding_idx=0) if words else torch.nn.Linear(8, 6)
        self.second, self.third = torch.nn.Linear(6, 6), torch.nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)).tanh())


class ChainFlax(nn.Module):
    words: bool
    stopped: str = ""
    dtype: Any = None

    def setup(self) -> None:
        self.first = nn.Embed(9, 6) if self.words else nn.Dense(6)
        self.second, self.third = nn.Dense(6, dtype=self.dtype), nn.Dense(2)

    def __call__(self, x: Any) -> Any:
        x = self.first(x)
        x = nn.tanh(self.second(x))
        return self.third(x)


class StoppedDense(nn.Dense):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return jax.lax.stop_gradient(super().__call__(x))


class StoppedEmbed(nn.Embed):
    def __call__(self, x: Any) -> Any:
        return jax.lax.stop_gradient(super().__call__(x))


class StoppedFirst(ChainFlax):
    def setup(self) -> None:
        self.first = StoppedEmbed(9, 6) if self.words else StoppedDense(6)
        self.second, self.third = nn.Dense(6), nn.Dense(2)


class StoppedSecond(ChainFlax):
    def setup(self) -> None:
        self.first = nn.Embed(9, 6) if self.words else nn.Dense(6)
        self.second, self.third = StoppedDense(6), nn.Dense(2)


WORDS = f"first.weight -> params/first/embedding\n{LAYERS}"
IDS = np.array([[3, 4, 5, 6], [7, 8, 2, 1]])


@pytest.mark.parametrize("words", [True, False])
@pytest.mark.parametrize(("model", "module"), [(StoppedFirst, "first"), (StoppedSecond, "second")])
def test_a_module_that_stops_the_gradient_of_its_output_is_named(words: bool, model: Any, module: str) -> None:
    inputs, rules = (IDS, WORDS) if words else (X, LAYERS)
    forward, backward, _ = found(Chain(words), model(words), inputs, rules)
    assert forward is None and backward[0] == module and "in Flax, its output has no gradient" in backward[2]


def test_a_padding_index_is_a_setting_where_the_inputs_use_it() -> None:
    padded = np.array([[3, 4, 5, 6], [7, 8, 0, 0]])
    forward, backward, report = found(Chain(words=True), ChainFlax(words=True), padded, WORDS)
    assert forward is None and backward[:2] == ("first", "gradient of weight")
    [difference] = report.differences
    assert [*difference.values()] == ["first", "padding_idx", "0 (its row gets no gradient)", "None"]
    assert "first: padding_idx is 0 (its row gets no gradient) in PyTorch and None in Flax" in str(report.checks)
    case = {"torch_module": Chain(words=True), "flax_module": ChainFlax(words=True), "rules": WORDS, **c.QUICK}
    right = run({**case, "inputs": IDS})
    assert right.passed and not right.differences


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_layer_in_a_narrow_dtype_is_named(dtype: Any) -> None:
    forward, _, report = found(Chain(words=False), ChainFlax(words=False, dtype=dtype))
    assert forward[:2] == ("second", "output 0")
    assert [(each["path"], each["what"]) for each in report.differences] == [("second", "dtype")]
    assert "keep_float64=True" in str([check.found for check in report.checks])


class Padded(torch.nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        padding = {"causal": 0, "reflect": 2, "zeros": 2}[mode]
        self.conv = torch.nn.Conv1d(8, 4, 5, padding=padding, padding_mode="reflect" if mode == "reflect" else "zeros")
        self.mode = mode

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mT
        return self.conv(torch.nn.functional.pad(x, (4, 0)) if self.mode == "causal" else x).mT


class PaddedFlax(nn.Module):
    mode: str

    @nn.compact
    def __call__(self, x: Any) -> Any:
        if self.mode == "reflect":
            x = jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode="reflect")
        padding: Any = {"causal": "CAUSAL", "reflect": "VALID", "zeros": 2}[self.mode]
        return nn.Conv(4, (5,), padding=padding, name="conv")(x)


CONV = "conv.weight -> params/conv/kernel | conv1d\nconv.bias -> params/conv/bias"


@pytest.mark.parametrize("mode", ["causal", "reflect"])
def test_padding_is_a_setting_only_where_it_has_an_effect(mode: str) -> None:
    case = {"torch_module": Padded(mode), "inputs": SERIES, "rules": CONV, **c.QUICK}
    right = run({**case, "flax_module": PaddedFlax(mode)})
    assert right.passed and not right.differences
    assert "no setting that modules state differs" in [check.found for check in right.checks]
    wrong = run({**case, "flax_module": PaddedFlax("zeros")})
    assert not wrong.passed and [(each["path"], each["what"]) for each in wrong.differences] == [("conv", "padding")]
