"""Bad input gives a clear error, or a report that does not pass."""

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
from parity_tests.small_pairs import Flax, Torch, finding, named
from remat_jax.errors import ArgumentError, PolicyError, PortingError
from remat_jax.parity import Optimizer, compare

LINEAR = "weight -> params/kernel | linear\nbias -> params/bias"
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def linear(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    right = {"torch_module": torch.nn.Linear(3, 2), "flax_module": nn.Dense(2), "inputs": X, "rules": LINEAR}
    return {**right, **c.QUICK, **options}


def infinite() -> torch.nn.Module:
    module = torch.nn.Linear(3, 2)
    module.bias.data[1] = float("inf")
    return module


def failing(*_: Any) -> Any:
    raise ValueError("no weights")


def wrapped() -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(3, 2)))


class Wrapper:
    """A module with its weights, wrapped as libraries do."""

    def __init__(self) -> None:
        self.module, self.params = nn.Dense(2), {}

    def __call__(self, x: Any) -> Any:
        return self.module.apply({"params": self.params}, x)


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        return nn.Dense(2)(x) * mask


class MaskedTorch(torch.nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mask


BLOCKS = {"torch_blocks": torch.nn.Linear, "flax_blocks": nn.Dense}
WRAPPED = r"flax_module is a Wrapper, which holds a module .* give its module, a Dense, as flax_module=wrapper.module"
LACKS_MASK = r"TypeError: .* missing 1 required positional argument: 'mask'; add it to inputs, or pass it in {}_call"
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "other output trees": (
        {
            "torch_call": lambda m, x: {"logits": m(x), "states": m(x) * 2},
            "flax_call": lambda m, x: {"logits": m(x), "hidden": m(x) * 2},
        },
        r"states \(4, 2\): only PyTorch has it\n.*hidden \(4, 2\): only Flax has it",
    ),
    "no broadcasting": (
        {"flax_call": lambda model, x: model(x)[:, None]},
        r"output: \(4, 2\) in PyTorch and \(4, 1, 2\) in Flax",
    ),
    "an output that is no array": (
        {"torch_call": lambda model, x: {"y": model(x), "cache": object()}},
        "its output cache is a object, not an array; select arrays with torch_call",
    ),
    "an infinite weight": ({"torch_module": infinite()}, "torch_module: bias holds NaN or infinity"),
    "an input that is no number": ({"inputs": (X * np.float32("nan"),)}, "inputs: 0 holds NaN"),
    "no weights in memory": (
        {"torch_module": torch.nn.Linear(3, 2, device="meta")},
        "torch_module: weight, bias is on the device meta",
    ),
    "another width": (
        {"inputs": X[:, :2], "flax_module": lambda dtype: nn.Dense(2)},
        "torch_module cannot be run on inputs: RuntimeError: .*shapes",
    ),
    "dropout in Flax": (
        {"flax_module": Flax(lambda m, x: nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x)))},
        "flax_module cannot be run on inputs: InvalidRngError: .*make the model determ",
    ),
    "no graph": ({"torch_call": lambda m, x: m(x).detach()}, "outputs without a graph, so nothing has a gradient"),
    "a wrapper of PyTorch's": (
        {"torch_module": wrapped()},
        "'0._checkpoint_wrapped_module.weight' has another name in state_di",
    ),
    "a wrapper of Flax's": ({"flax_module": Wrapper()}, WRAPPED),
    "a wrapper of Flax's, without rules": ({"flax_module": Wrapper(), "rules": "auto"}, WRAPPED),
    "no mask": ({"flax_module": Masked()}, f"flax_module cannot be run on inputs: {LACKS_MASK.format('flax')}"),
    "no mask, without rules": ({"flax_module": Masked(), "rules": "auto"}, LACKS_MASK.format("flax")),
    "no mask in PyTorch": ({"torch_module": MaskedTorch(3, 2)}, LACKS_MASK.format("torch")),
    "one input too many": (
        {"inputs": (X, X)},
        r"torch_module cannot be run on inputs: TypeError: .*forward\(\) takes 2 .* arg",
    ),
    "a PyTorch model that cannot be built": (
        {"torch_module": failing},
        r"torch_module\(\) cannot be built: ValueError: no weig",
    ),
    "a Flax model that cannot be made": (
        {"flax_module": failing},
        r"flax_module\('float\d\d'\) cannot be made: ValueError: no",
    ),
    "a loss that fails": ({"loss": failing}, "loss cannot be computed from PyTorch's output: ValueError: no weights"),
    "a loss that fails in Flax": (
        {"loss": (torch.mean, failing)},
        "loss cannot be computed from Flax's output: ValueError: no",
    ),
    "a class": ({"torch_module": torch.nn.Linear}, "torch_module=.*expected a torch.nn.Module, or a function that builds one"),
    "a class of Flax's": (
        {"flax_module": nn.Dense},
        "flax_module=.*expected a module of Linen, NNX, Equinox or Haiku, or a function of a dtype",
    ),
    "models exchanged": (
        {"torch_module": nn.Dense(2), "flax_module": torch.nn.Linear(3, 2)},
        "expected a torch.nn.Module, or a function that builds one",
    ),
    "PyTorch twice": ({"flax_module": torch.nn.Linear(3, 2)}, "expected a module of Linen, NNX, Equinox or Haiku, or a func"),
    "inputs": ({"inputs": {"x": None}}, "inputs=.*expected arrays"),
    "loss": ({"loss": 3}, "loss=3: expected a function"),
    "torch_blocks": ({"torch_blocks": "Linear"}, "torch_blocks='Linear': expected a class"),
    "modes": ({"modes": ("off", "off")}, "each once"),
    "dtypes": ({"dtypes": "int8"}, "dtype='int8' has no ε"),
    "optimizer": ({"optimizer": "adamv"}, "name='adamv' is unknown.*Did you mean 'adam"),
    "steps": ({"steps": 0}, "steps=0: expected the number of training steps"),
    "no list of modules": (
        {"modes": "checkpoint", "flax_blocks": nn.Dense},
        "the PyTorch model has no list of modules of one class",
    ),
    "no Flax class": ({"modes": "checkpoint", "torch_blocks": torch.nn.Linear}, "no Flax class has the weights"),
    "blocks that the model lacks": (
        {"modes": ("off", "full"), **BLOCKS, "torch_blocks": torch.nn.Dropout},
        "modes: 'full' in PyTorch: .*Dropout, but it has no module in the model",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_names_the_argument_and_the_remedy(name: str) -> None:
    options, message = ERRORS[name]
    with pytest.raises((ArgumentError, PortingError), match=message) as error:
        compare(**linear(**options))
    assert name != "another width" or isinstance(error.value.__cause__, RuntimeError)


def test_unknown_modes_and_selectors_that_match_nothing() -> None:
    with pytest.raises(PolicyError, match="modes='chekpoint'"):
        compare(**linear(modes="chekpoint"))
    with pytest.raises(PolicyError, match=r"the selector '\*nowhere\*' matches no residual"):
        run(c.stack(), **{**c.QUICK, "modes": "save: *nowhere*"})


@pytest.mark.parametrize("side", ["torch", "flax", "both"])
def test_not_a_number_never_passes(side: str) -> None:
    def spoil(model: Any, x: Any) -> Any:
        return model(x) / (x[:, :1] * 0)

    calls = {f"{each}_call": spoil for each in ("torch", "flax") if side in (each, "both")}
    report = compare(**linear(**calls, dtypes=("float64", "float32")))
    assert not report.passed
    output = next(row for row in report.rows if row.name == "output")
    assert any("not finite in" in problem for problem in output.problems)


NO_BIAS = {
    "torch_call": lambda m, x: x @ m.weight.T,
    "flax_call": lambda model, x: model(x) - model.variables["params"]["bias"],
}
PROVES_NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": (
        {"torch_call": lambda m, x: m(x) * float("nan"), "flax_call": lambda m, x: m(x) * float("nan")},
        "not finite in PyTorch, so they prove nothing: output, weight, bias",
    ),
    # Multiplied by 0 and not left out: there is a graph, and a gradient of exactly 0.
    "zero": ({"loss": lambda y: (y * 0).sum()}, "every gradient is 0 in PyTorch"),
    "an unused parameter": (NO_BIAS, "prove nothing about bias"),
}


@pytest.mark.parametrize("name", PROVES_NOTHING)
def test_gradients_that_prove_nothing_fail(name: str) -> None:
    options, text = PROVES_NOTHING[name]
    report = compare(**linear(**options))
    assert not report.passed and text in finding(report, "gradients")
    assert name == "an unused parameter" or (not report.proves and "proves nothing" in report.verdict())


def test_a_frozen_parameter_needs_no_gradient() -> None:
    case = linear(**NO_BIAS)
    case["torch_module"].bias.requires_grad_(False)
    assert compare(**case).passed


def test_dropout_in_training_is_refused_and_in_evaluation_is_not() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5))
    rules = "0.weight -> params/kernel | linear\n0.bias -> params/bias"
    with pytest.raises(ArgumentError, match=r"draws random numbers .*dropout in 1.*torch_module.eval\(\)"):
        compare(**linear(torch_module=module, rules=rules))
    assert module.training
    assert compare(**linear(torch_module=module.eval(), rules=rules)).passed


def test_a_flax_model_of_one_dtype_is_an_error_and_a_function_of_a_dtype_is_the_remedy() -> None:
    with pytest.raises(ArgumentError, match="returns output in float32, although weights and inputs are float64"):
        compare(**linear(flax_module=nn.Dense(2, dtype=jnp.float32), keep_float64=False))
    report = compare(**linear(flax_module=lambda dtype: nn.Dense(2, dtype=dtype), dtypes=("float64", "float32")))
    assert report.passed, str(report)


def test_a_cast_inside_is_named() -> None:
    def narrow(model: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return model(x).astype(jnp.float32).astype(x.dtype)

    kept = compare(**linear(flax_call=narrow))
    found = finding(kept, "Flax stays in float64")
    assert kept.passed and "casts to float32: float64 to float32 in head; keep_float64=True is on" in found
    report = compare(**linear(flax_call=narrow, keep_float64=False))
    assert not report.passed and "dtype: float64 to float32 in head; " in finding(report, "Flax stays in float64")


def test_a_lower_precision_is_found_first() -> None:
    with jax.default_matmul_precision("bfloat16"):
        report = compare(**linear())
    assert not report.passed and "jax_default_matmul_precision is 'bfloat16'" in report.checks[0].found
    torch.set_float32_matmul_precision("high")
    try:
        report = compare(**linear())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not report.passed and "PyTorch multiplies float32 at 'high'" in report.checks[0].found


TOKENS = np.arange(7).reshape(1, 7)
UNTIED = Flax(lambda m, tokens: nn.Dense(7, use_bias=False, name="head")(nn.Embed(7, 4, name="embed")(tokens)))
TABLE = "embed.weight -> params/embed/embedding\n"
TIE = TABLE + "tie: embed.weight = head.weight"


def tied_in_flax(module: nn.Module, tokens: Any) -> Any:
    embed = nn.Embed(7, 4, name="embed")
    return embed(tokens) @ embed.embedding.T


def embedding_and_head(shared: bool) -> Torch:
    """Both have one tensor, or two with equal values."""
    embed, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
    head.weight = embed.weight if shared else torch.nn.Parameter(embed.weight.detach().clone())
    return Torch(lambda m, tokens: m.head(m.embed(tokens)), embed=embed, head=head)


def test_a_copy_in_the_place_of_a_tie_is_an_error_on_either_side() -> None:
    copied = {"flax_module": UNTIED, "rules": TABLE + "head.weight -> params/head/kernel | linear", "inputs": TOKENS}
    tied = {"flax_module": Flax(tied_in_flax), "rules": TIE, "inputs": TOKENS}
    with pytest.raises(PortingError, match="head.weight: duplicated: it is the same tensor as embed.weight"):
        compare(embedding_and_head(True), **copied, **c.QUICK)
    with pytest.raises(ArgumentError, match="'tie: embed.weight = head.weight', but these are two parameters"):
        compare(embedding_and_head(False), **tied, **c.QUICK)
    for shared, case in ((True, tied), (False, copied)):
        report = compare(embedding_and_head(shared), **case, **{**c.QUICK, "optimizer": "sgd"})
        assert report.passed, str(report)


def test_a_copy_that_the_map_leaves_out_is_named_by_the_tied_parameter() -> None:
    model = embedding_and_head(True)
    table = model.embed.weight.detach().numpy()
    variables = {"params": {"embed": {"embedding": table}, "head": {"kernel": table.T}}}
    rules = TIE + "\nmissing: params/head/kernel"
    report = compare(model, UNTIED, TOKENS, rules=rules, variables=variables, **c.QUICK)
    assert [row.name for row in report.failed_rows] == ["embed.weight"]
    expected = ("embed", "gradient of weight, the same tensor as head.weight")
    assert named(report, "backward", "torch_path", "what") == expected


def test_neither_model_is_changed() -> None:
    case = linear(optimizer=Optimizer("sgd", momentum=0.0), modes=("off", "full"), **BLOCKS)
    before = {name: tensor.clone() for name, tensor in case["torch_module"].state_dict().items()}
    assert compare(**case).passed
    after = case["torch_module"].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in case["torch_module"].parameters())
