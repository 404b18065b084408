"""Faults whose module was not named, or named wrongly; those at the root are named by their tensor."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.mutants.models import QUICK, run
from parity_tests.mutants.planting import Plant, at, output, scaled_cotangent
from parity_tests.small_pairs import DENSE, Flax, Torch, linears, named
from parity_tests.small_pairs import SERIES as SHORT
from remat_jax.parity import ParityReport

SERIES = np.random.default_rng(1).normal(size=(2, 7, 8)).astype(np.float32)
X = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)


def found(
    torch_module: torch.nn.Module, flax: Any, inputs: Any = X, rules: str = DENSE, plant: Plant = lambda case: case
) -> tuple[Any, Any, ParityReport]:
    """PyTorch's path, the array and the note of each pass, and the whole report."""
    case = {"torch_module": torch_module, "flax_module": Flax(flax), "inputs": inputs, "rules": rules}
    report = run(plant(case), **QUICK)
    assert not report.passed
    forward, backward = (first and (first["torch_path"], first["what"], first["note"]) for first in report.divergences.values())
    return forward, backward, report


def heads_torch(module: Torch, x: torch.Tensor) -> Any:
    """A question-answering head: two outputs of equal shape, not in alphabetical order."""
    start, end = module.head(module.body(x)).unbind(-1)
    return {"logits": {"start": start, "end": end}}


@pytest.mark.parametrize("stops", [False, True])
def test_outputs_of_equal_shape_are_paired_by_key(stops: bool) -> None:
    def heads(module: nn.Module, x: Any) -> Any:
        x = nn.Dense(6, name="body")(x)
        logits = nn.Dense(2, name="head")(jax.lax.stop_gradient(x) if stops else x)
        return {"logits": {"start": logits[..., 0], "end": logits[..., 1] * (1 if stops else 1.01)}}

    model = Torch(heads_torch, body=torch.nn.Linear(8, 6), head=torch.nn.Linear(6, 2))
    forward, backward, _ = found(model, heads)
    if stops:
        assert forward is None and backward[0] == ""
    else:
        assert forward[:2] == ("", "output logits.end") and backward is None


@pytest.mark.parametrize(("name", "weighted"), [("norm", False), ("rescaled", True), ("rescaled", False)])
def test_a_norm_of_ones_own_is_matched_by_its_weights_or_by_what_it_computes(name: str, weighted: bool) -> None:
    """The class of PyTorch's RMS norm has no telling name."""
    norm = Torch(
        lambda m, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * m.weight,
        weight=torch.nn.Parameter(torch.ones(8)) if weighted else 1.0,
    )
    parts = {"up": torch.nn.Linear(8, 8), "norm": norm, "down": torch.nn.Linear(8, 4)}

    def flax(module: nn.Module, x: Any) -> Any:
        norm = nn.RMSNorm(epsilon=1e-3, use_scale=weighted, name=name)
        return nn.Dense(4, name="down")(norm(nn.Dense(8, name="up")(x)))

    scale = f"norm.weight -> params/{name}/scale\n" if weighted else ""
    forward, _, _ = found(Torch(lambda m, x: m.down(m.norm(m.up(x))), **parts), flax, rules=scale + DENSE)
    assert forward == ("norm", "output 0", "")


def conv(rules: str = "") -> str:
    return f"conv.weight -> params/conv/kernel | conv1d\nconv.bias -> params/conv/bias\n{rules}"


@pytest.mark.parametrize("padding", [[(2, 0)], [(1, 1)], [(2, 2)]])
def test_outputs_are_compared_where_the_model_uses_them(padding: Any) -> None:
    """PyTorch's convolution pads both ends; the model drops the end of its output. Flax doubles its gradient."""
    theirs = Torch(
        lambda m, x: m.down(m.conv(m.up(x).mT)[..., : x.shape[1]].mT.tanh()),
        up=torch.nn.Linear(8, 6),
        conv=torch.nn.Conv1d(6, 6, 3, padding=2),
        down=torch.nn.Linear(6, 4),
    )

    def flax(module: nn.Module, x: Any) -> Any:
        y = nn.Conv(6, (3,), padding=padding, name="conv")(nn.Dense(6, name="up")(x))
        return nn.Dense(4, name="down")(jnp.tanh(scaled_cotangent(2.0)(y)[:, : x.shape[1]]))

    forward, backward, _ = found(theirs, flax, SERIES, conv(DENSE))
    assert forward == (("conv", "output 0", "") if padding == [(1, 1)] else None)
    assert padding == [(1, 1)] or backward[0] == ""


class ScaledEmbedding(torch.nn.Embedding):
    """The embedding is scaled by its own class, as in some models of transformers."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 3.0


@pytest.mark.parametrize("wrong", ["words", "left", "right"])
def test_a_difference_that_the_code_around_a_module_makes_up_for_is_not_named(wrong: str) -> None:
    scale = {name: 1.01 if name == wrong else 1.0 for name in ("words", "left", "right")}

    def theirs(module: Torch, ids: torch.Tensor) -> torch.Tensor:
        x = module.words(ids)
        return module.left(x).tanh() * module.right(x).tanh()

    def flax(module: nn.Module, ids: Any) -> Any:
        x = 3.0 * scale["words"] * nn.Embed(9, 6, name="words")(ids)
        return jnp.tanh(scale["left"] * nn.Dense(6, name="left")(x)) * jnp.tanh(nn.Dense(6, name="right")(x))

    model = Torch(theirs, words=ScaledEmbedding(9, 6), **linears(6, "left", "right"))
    rules = f"words.weight -> params/words/embedding\n{DENSE}"
    inside = at("right", output(lambda x: scale["right"] * x))
    forward, _, _ = found(model, flax, np.array([[1, 2, 3], [4, 5, 6]]), rules, inside)
    assert forward[:2] == {"words": ("words", "output 0"), "left": ("", "output 0"), "right": ("right", "output 0")}[wrong]


# Three modules, one after the other.

WORDS = f"first.weight -> params/first/embedding\n{DENSE}"
IDS = np.array([[3, 4, 5, 6], [7, 8, 2, 1]])


def chain_torch(words: bool) -> Torch:
    first = torch.nn.Embedding(9, 6, padding_idx=0) if words else torch.nn.Linear(8, 6)
    parts = {"first": first, "second": torch.nn.Linear(6, 6), "third": torch.nn.Linear(6, 2)}
    return Torch(lambda m, x: m.third(m.second(m.first(x)).tanh()), **parts)


def chain(words: bool, dtype: Any = None) -> Any:
    def run(module: nn.Module, x: Any) -> Any:
        x = nn.Embed(9, 6, name="first")(x) if words else nn.Dense(6, name="first")(x)
        return nn.Dense(2, name="third")(nn.tanh(nn.Dense(6, dtype=dtype, name="second")(x)))

    return run


@pytest.mark.parametrize(("words", "stopped"), [(True, "first"), (False, "first"), (False, "second")])
def test_a_module_that_stops_the_gradient_of_its_output_is_named(words: bool, stopped: str) -> None:
    inputs, rules = (IDS, WORDS) if words else (X, DENSE)
    stops = at(stopped, output(jax.lax.stop_gradient))
    forward, backward, _ = found(chain_torch(words), chain(words), inputs, rules, stops)
    assert forward is None and backward[0] == stopped and "in Flax, its output has no gradient" in backward[2]


def test_a_padding_index_is_a_setting_where_the_inputs_use_it() -> None:
    padded = np.array([[3, 4, 5, 6], [7, 8, 0, 0]])
    forward, backward, report = found(chain_torch(words=True), chain(words=True), padded, WORDS)
    assert forward is None and backward[:2] == ("first", "gradient of weight")
    [difference] = report.differences
    assert [*difference.values()] == ["first", "padding_idx", "0 (its row gets no gradient)", "None"]
    assert "first: padding_idx is 0 (its row gets no gradient) in PyTorch and None in Flax" in str(report.checks)
    case = {"torch_module": chain_torch(words=True), "flax_module": Flax(chain(words=True)), "rules": WORDS, **QUICK}
    right = run({**case, "inputs": IDS})
    assert right.passed and not right.differences


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_layer_in_a_narrow_dtype_is_named(dtype: Any) -> None:
    forward, _, report = found(chain_torch(words=False), chain(words=False, dtype=dtype))
    assert forward[:2] == ("second", "output 0")
    assert [(each["path"], each["what"]) for each in report.differences] == [("second", "dtype")]
    assert "keep_float64=True" in str([check.found for check in report.checks])


@pytest.mark.parametrize("mode", ["causal", "reflect"])
def test_padding_is_a_setting_only_where_it_has_an_effect(mode: str) -> None:
    """PyTorch pads with a function, or by the convolution's mode; the wrong model pads both ends with zeros."""

    def flax(mode: str) -> Flax:
        def run(module: nn.Module, x: Any) -> Any:
            x = jnp.pad(x, ((0, 0), (2, 2), (0, 0)), mode="reflect") if mode == "reflect" else x
            padding: Any = {"causal": "CAUSAL", "reflect": "VALID", "zeros": 2}[mode]
            return nn.Conv(4, (5,), padding=padding, name="conv")(x)

        return Flax(run)

    if mode == "causal":
        theirs = Torch(lambda m, x: m.conv(torch.nn.functional.pad(x.mT, (4, 0))).mT, conv=torch.nn.Conv1d(8, 4, 5))
    else:
        theirs = Torch(lambda m, x: m.conv(x.mT).mT, conv=torch.nn.Conv1d(8, 4, 5, padding=2, padding_mode="reflect"))
    case = {"torch_module": theirs, "inputs": SERIES, "rules": conv(), **QUICK}
    right = run({**case, "flax_module": flax(mode)})
    assert right.passed and not right.differences
    assert "no setting that modules state differs" in [check.found for check in right.checks]
    wrong = run({**case, "flax_module": flax("zeros")})
    assert not wrong.passed and [(each["path"], each["what"]) for each in wrong.differences] == [("conv", "padding")]


NORM = "norm.weight -> params/norm/scale\nnorm.bias -> params/norm/bias\n"

# A mask of the least number.


def biased_torch() -> Torch:
    """Terms added to scores: a learnt bias, and the least number where a key follows its query."""
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    bias = Torch(
        lambda m, x: m.bias + torch.zeros_like(m.bias).masked_fill(later, torch.finfo(x.dtype).min),
        bias=torch.nn.Parameter(torch.randn(5, 5)),
    )

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        x = module.norm(x)
        return module.linear((x @ x.mT + module.bias(x)).softmax(-1) @ x)

    return Torch(run, bias=bias, norm=torch.nn.LayerNorm(4), **linears(4, "linear"))


class Bias(nn.Module):
    scale: float

    @nn.compact
    def __call__(self, x: Any) -> Any:
        bias = self.param("bias", nn.initializers.normal(), (5, 5))
        return jnp.where(~jnp.tri(5, dtype=bool), jnp.finfo(x.dtype).min, self.scale * bias)


@pytest.mark.parametrize(("epsilon", "scale", "wrong"), [(1e-5, 1.0, None), (1e-3, 1.0, ("norm",)), (1e-5, 0.999, ("bias",))])
def test_a_mask_of_the_least_number_hides_no_fault(epsilon: float, scale: float, wrong: Any) -> None:
    """Errors are not measured relative to the size of the mask or of another tensor."""

    def biased(module: nn.Module, x: Any) -> Any:
        x = nn.LayerNorm(epsilon=epsilon, name="norm")(x)
        weights = nn.softmax(x @ x.mT + Bias(scale, name="bias")(x))
        return nn.Dense(4, name="linear")(weights @ x)

    rules = f"bias.bias -> params/bias/bias\n{NORM}{DENSE.replace('{name}', 'linear')}"
    report = run({"torch_module": biased_torch(), "flax_module": Flax(biased), "inputs": SHORT, "rules": rules}, **QUICK)
    assert report.passed == (wrong is None), str(report)
    assert named(report, "forward", "flax_path") == wrong


# Keywords, and faults at the root.


class RootTorch(torch.nn.Module):
    """Tokens with positions, the first of which is pooled; tokens and mask have one shape and type."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(9, 4), torch.nn.Embedding(9, 4)
        self.norm, self.head = torch.nn.LayerNorm(4), torch.nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))) * mask[..., None]
        return {"states": x, "first": x[:, 1] * 2, "pooled": self.head(x[:, 0])}


class Root(nn.Module):
    """The same with its arguments in another order."""

    shift: int = 0
    pooled: int = 0
    factor: float = 2.0

    @nn.compact
    def __call__(self, mask: Any, tokens: Any) -> Any:
        places = self.shift + jnp.arange(tokens.shape[1])
        x = nn.Embed(9, 4, name="tokens")(tokens) + nn.Embed(9, 4, name="positions")(places)
        x = nn.LayerNorm(epsilon=1e-5, name="norm")(x) * mask[..., None]
        return {"states": x, "first": self.factor * x[:, 1], "pooled": nn.Dense(4, name="head")(x[:, self.pooled])}


EMBED = "{n}.weight -> params/{n}/embedding\n"
ROOT = EMBED.format(n="tokens") + EMBED.format(n="positions") + NORM + DENSE.replace("{name}", "head")
TOKENS = np.random.default_rng(2).integers(0, 9, (2, 5))
MASK = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])


def rooted(flax: Root) -> dict[str, Any]:
    inputs = {"tokens": TOKENS, "mask": MASK}
    return {"torch_module": RootTorch(), "flax_module": flax, "inputs": inputs, "rules": ROOT, **QUICK}


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({}, None),
        ({"shift": 1}, "input 0 of 'positions'"),
        ({"pooled": 1}, "input 0 of 'head'"),
        ({"factor": 2.01}, "output first"),
    ],
)
def test_a_fault_at_the_root_is_named_by_its_tensor(wrong: dict[str, Any], what: str | None) -> None:
    """The report does not blame the inputs: keywords are paired by their names."""
    report = run(rooted(Root(**wrong)))
    assert report.passed == (not wrong), str(report)
    assert named(report, "forward", "flax_path", "what", "note") == (what and ("", what, ""))


def test_other_inputs_are_named_by_their_keyword() -> None:
    report = run(rooted(Root()), flax_call=lambda model, tokens, mask: model(tokens=tokens, mask=jnp.ones_like(mask)))
    expected = ("", "input mask", "the two models get different inputs")
    assert named(report, "forward", "flax_path", "what", "note") == expected
