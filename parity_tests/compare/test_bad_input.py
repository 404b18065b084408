"""Bad input gives a clear error, or a report that does not pass."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
import torch

from parity_tests.mutants import models as c
from parity_tests.mutants.models import run
from parity_tests.small_pairs import LINEAR, Flax, Torch, finding
from remat_jax.errors import ArgumentError, PolicyError, PortingError
from remat_jax.parity import Optimizer, compare

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


MASKED = Flax(lambda m, x, mask: nn.Dense(2)(x) * mask)
BLOCKS = {"torch_blocks": torch.nn.Linear, "flax_blocks": nn.Dense}
WRAPPED = r"flax_module is a Wrapper, which holds a module .* give its module, a Dense, as flax_module=wrapper.module"
LACKS_MASK = r"TypeError: .* missing 1 required positional argument: 'mask'; add it to inputs, or pass it in {}_call"
ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "torch_call": lambda m, x: {"logits": m(x), "states": m(x) * 2},
            "flax_call": lambda m, x: {"logits": m(x), "hidden": m(x) * 2},
        },
        r"states \(4, 2\): only PyTorch has it\n.*hidden \(4, 2\): only Flax has it",
    ),
    ({"flax_call": lambda model, x: model(x)[:, None]}, r"output: \(4, 2\) in PyTorch and \(4, 1, 2\) in Flax"),
    (
        {"torch_call": lambda model, x: {"y": model(x), "cache": object()}},
        "its output cache is a object, not an array; select arrays with torch_call",
    ),
    ({"torch_module": infinite()}, "torch_module: bias holds NaN or infinity"),
    ({"inputs": (X * np.float32("nan"),)}, "inputs: 0 holds NaN"),
    ({"torch_module": torch.nn.Linear(3, 2, device="meta")}, "torch_module: weight, bias is on the device meta"),
    (
        {"inputs": X[:, :2], "flax_module": lambda dtype: nn.Dense(2)},
        "torch_module cannot be run on inputs: RuntimeError: .*shapes",
    ),
    (
        {"flax_module": Flax(lambda m, x: nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x)))},
        "flax_module cannot be run on inputs: InvalidRngError: .*make the model determ",
    ),
    ({"torch_call": lambda m, x: m(x).detach()}, "outputs without a graph, so nothing has a gradient"),
    ({"torch_module": wrapped()}, "'0._checkpoint_wrapped_module.weight' has another name in state_di"),
    ({"flax_module": Wrapper()}, WRAPPED),
    ({"flax_module": Wrapper(), "rules": "auto"}, WRAPPED),
    ({"flax_module": MASKED}, f"flax_module cannot be run on inputs: {LACKS_MASK.format('flax')}"),
    ({"flax_module": MASKED, "rules": "auto"}, LACKS_MASK.format("flax")),
    ({"torch_module": Torch(lambda m, x, mask: m.layer(x) * mask, layer=torch.nn.Linear(3, 2))}, LACKS_MASK.format("torch")),
    ({"inputs": (X, X)}, r"torch_module cannot be run on inputs: TypeError: .*forward\(\) takes 2 .* arg"),
    ({"torch_module": failing}, r"torch_module\(\) cannot be built: ValueError: no weig"),
    ({"flax_module": failing}, r"flax_module\('float\d\d'\) cannot be made: ValueError: no"),
    ({"loss": failing}, "loss cannot be computed from PyTorch's output: ValueError: no weights"),
    ({"loss": (torch.mean, failing)}, "loss cannot be computed from Flax's output: ValueError: no"),
    ({"torch_module": torch.nn.Linear}, "torch_module=.*expected a torch.nn.Module, or a function that builds one"),
    ({"flax_module": nn.Dense}, "flax_module=.*expected a module of Linen, NNX, Equinox or Haiku, or a function of a dtype"),
    (
        {"torch_module": nn.Dense(2), "flax_module": torch.nn.Linear(3, 2)},
        "expected a torch.nn.Module, or a function that builds one",
    ),
    ({"flax_module": torch.nn.Linear(3, 2)}, "expected a module of Linen, NNX, Equinox or Haiku, or a func"),
    ({"inputs": {"x": None}}, "inputs=.*expected arrays"),
    ({"loss": 3}, "loss=3: expected a function"),
    ({"torch_blocks": "Linear"}, "torch_blocks='Linear': expected a class"),
    ({"modes": ("off", "off")}, "each once"),
    ({"dtypes": "int8"}, "dtype='int8' has no ε"),
    ({"optimizer": "adamv"}, "name='adamv' is unknown.*Did you mean 'adam"),
    ({"steps": 0}, "steps=0: expected the number of training steps"),
    ({"modes": "checkpoint", "flax_blocks": nn.Dense}, "the PyTorch model has no list of modules of one class"),
    ({"modes": "checkpoint", "torch_blocks": torch.nn.Linear}, "no Flax class has the weights"),
    (
        {"modes": ("off", "full"), **BLOCKS, "torch_blocks": torch.nn.Dropout},
        "modes: 'full' in PyTorch: .*Dropout, but it has no module in the model",
    ),
]


@pytest.mark.parametrize(("options", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_an_error_names_the_argument_and_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ArgumentError, PortingError), match=message) as error:
        compare(**linear(**options))
    assert "RuntimeError" not in message or isinstance(error.value.__cause__, RuntimeError)


def test_unknown_modes_and_selectors_that_match_nothing() -> None:
    with pytest.raises(PolicyError, match="modes='chekpoint'"):
        compare(**linear(modes="chekpoint"))
    with pytest.raises(PolicyError, match=r"the selector '\*nowhere\*' matches no residual"):
        run(c.stack(), **{**c.QUICK, "modes": "save: *nowhere*"})


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


def test_neither_model_is_changed() -> None:
    case = linear(optimizer=Optimizer("sgd", momentum=0.0), modes=("off", "full"), **BLOCKS)
    before = {name: tensor.clone() for name, tensor in case["torch_module"].state_dict().items()}
    assert compare(**case).passed
    after = case["torch_module"].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in case["torch_module"].parameters())
