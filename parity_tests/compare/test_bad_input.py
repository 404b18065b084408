"""Bad input gives a clear error, or a report that does not pass."""

from __future__ import annotations

import builtins
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from parity_tests.compare import cases as c
from parity_tests.compare.cases import run
from remat_jax.errors import ArgumentError, PolicyError, PortingError, UnsupportedError
from remat_jax.parity import Optimizer, compare

LINEAR = "weight -> params/kernel | linear\nbias -> params/bias"
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def linear(**options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        **{"torch_module": torch.nn.Linear(3, 2), "flax_module": nn.Dense(2), "inputs": X, "rules": LINEAR},
        **c.QUICK,
        **options,
    }


def two(y: Any, *names: str) -> dict[str, Any]:
    return {name: y * (index + 1) for index, name in enumerate(names)}


def test_other_output_trees_are_an_error_that_names_both() -> None:
    ours = lambda model, x: two(model(x), "logits", "states")  # noqa: E731
    theirs = lambda model, x: two(model(x), "logits", "hidden")  # noqa: E731
    with pytest.raises(ArgumentError, match=r"states \(4, 2\): only PyTorch has it\n.*hidden \(4, 2\): only Flax has it"):
        compare(**linear(torch_call=ours, flax_call=theirs))


def test_other_shapes_are_an_error_and_not_broadcast() -> None:
    with pytest.raises(ArgumentError, match=r"output: \(4, 2\) in PyTorch and \(4, 1, 2\) in Flax"):
        compare(**linear(flax_call=lambda model, x: model(x)[:, None]))


def test_an_output_that_is_no_array_is_named() -> None:
    with pytest.raises(ArgumentError, match="its output cache is a object, not an array; select arrays with torch_call"):
        compare(**linear(torch_call=lambda model, x: {"y": model(x), "cache": object()}))


@pytest.mark.parametrize("side", ["torch", "flax", "both"])
def test_not_a_number_never_passes(side: str) -> None:
    def spoil(model: Any, x: Any) -> Any:
        return model(x) / (x[:, :1] * 0)

    calls = {f"{each}_call": spoil for each in ("torch", "flax") if side in (each, "both")}
    report = compare(**linear(**calls, dtypes=("float64", "float32")))
    assert not report.passed
    output = next(row for row in report.rows if row.name == "output")
    assert any("not finite in" in problem for problem in output.problems)


def test_what_pytorch_itself_does_not_compute_is_said_first() -> None:
    report = compare(**linear(torch_call=lambda m, x: m(x) * float("nan"), flax_call=lambda m, x: m(x) * float("nan")))
    assert report.verdict().endswith("proves nothing; see gradients")
    finding = next(check.found for check in report.checks if check.name == "gradients")
    assert finding == "not finite in PyTorch, so they prove nothing: output, weight, bias"
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.bias[1] = float("inf")
    with pytest.raises(ArgumentError, match="torch_module: bias holds NaN or infinity"):
        compare(**linear(torch_module=module))
    with pytest.raises(ArgumentError, match="inputs: 0 holds NaN"):
        compare(**linear(inputs=(X * np.float32("nan"),)))
    with pytest.raises(ArgumentError, match="torch_module: weight, bias is on the device meta"):
        compare(**linear(torch_module=torch.nn.Linear(3, 2, device="meta")))


class Random(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=False)(x))


def test_what_a_model_itself_raises_names_the_argument() -> None:
    with pytest.raises(ArgumentError, match=r"torch_module cannot be run on inputs: RuntimeError: .*shapes") as raised:
        compare(**linear(inputs=X[:, :2], flax_module=lambda dtype: nn.Dense(2)))
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(ArgumentError, match="flax_module cannot be run on inputs: InvalidRngError: .*make the model determ"):
        compare(**linear(flax_module=Random()))
    with pytest.raises(ArgumentError, match="outputs without a graph, so nothing has a gradient"):
        compare(**linear(torch_call=lambda model, x: model(x).detach()))


def test_gradients_that_are_all_zero_prove_nothing() -> None:
    # Multiplied by 0 and not left out: there is a graph, and a gradient of exactly 0.
    report = compare(**linear(loss=lambda y: (y * 0).sum()))
    assert not report.passed and not report.proves
    assert "every gradient is 0 in PyTorch" in str([check.found for check in report.checks])
    assert "proves nothing" in report.verdict()


def test_a_parameter_that_nothing_uses_is_named() -> None:
    report = compare(**linear(torch_call=lambda m, x: x @ m.weight.T, flax_call=unbiased))
    check = next(check for check in report.checks if check.name == "gradients")
    assert not check.passed and "prove nothing about bias" in check.found
    frozen = linear(torch_call=lambda m, x: x @ m.weight.T, flax_call=unbiased)
    frozen["torch_module"].bias.requires_grad_(False)
    assert compare(**frozen).passed


def unbiased(model: Any, x: Any) -> Any:
    made = model(x)
    return made - model.variables["params"]["bias"]


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
    assert compare(**linear(flax_module=nn.Dense(2, dtype=jnp.float32))).passed
    report = compare(**linear(flax_module=lambda dtype: nn.Dense(2, dtype=dtype), dtypes=("float64", "float32")))
    assert report.passed, str(report)


def test_a_cast_inside_is_named() -> None:
    def narrow(model: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return model(x).astype(jnp.float32).astype(x.dtype)

    kept = compare(**linear(flax_call=narrow))
    cast_check = next(check for check in kept.checks if check.name == "Flax stays in float64")
    assert kept.passed and "casts to float32: float64 to float32 in head; keep_float64=True is on" in cast_check.found
    report = compare(**linear(flax_call=narrow, keep_float64=False))
    cast_check = next(check for check in report.checks if check.name == "Flax stays in float64")
    assert not report.passed and "dtype: float64 to float32 in head; " in cast_check.found


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


class Untied(nn.Module):
    """An embedding and a head that are one tensor in PyTorch and two arrays in Flax."""

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        return nn.Dense(7, use_bias=False, name="head")(nn.Embed(7, 4, name="embed")(tokens))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(7, 4, name="embed")
        return embed(tokens) @ embed.embedding.T


class TorchTied(torch.nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7, bias=False)
        if shared:
            self.head.weight = self.embed.weight
        else:
            with torch.no_grad():
                self.head.weight.copy_(self.embed.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_a_copy_in_the_place_of_a_tie_is_an_error_on_either_side() -> None:
    tokens = np.arange(7).reshape(1, 7)
    copied = {
        "flax_module": Untied(),
        "rules": "embed.weight -> params/embed/embedding\nhead.weight -> params/head/kernel | linear",
    }
    tied = {"flax_module": Tied(), "rules": "embed.weight -> params/embed/embedding\ntie: embed.weight = head.weight"}
    with pytest.raises(PortingError, match="head.weight: duplicated: it is the same tensor as embed.weight"):
        compare(TorchTied(True), inputs=tokens, **copied, **c.QUICK)
    with pytest.raises(ArgumentError, match="'tie: embed.weight = head.weight', but these are two parameters"):
        compare(TorchTied(False), inputs=tokens, **tied, **c.QUICK)
    for shared, options in ((True, tied), (False, copied)):
        report = compare(TorchTied(shared), inputs=tokens, **options, **{**c.QUICK, "optimizer": "sgd"})
        assert report.passed, str(report)


def test_a_copy_that_the_map_leaves_out_is_named_by_the_tied_parameter() -> None:
    model = TorchTied(True)
    table = model.embed.weight.detach().numpy()
    report = compare(
        model,
        Untied(),
        np.arange(7).reshape(1, 7),
        variables={"params": {"embed": {"embedding": table}, "head": {"kernel": table.T}}},
        rules="embed.weight -> params/embed/embedding\ntie: embed.weight = head.weight\nmissing: params/head/kernel",
        **c.QUICK,
    )
    assert [row.name for row in report.failed_rows] == ["embed.weight"]
    divergence = report.divergences["backward"]
    assert (divergence["torch_path"], divergence["what"]) == ("embed", "gradient of weight, the same tensor as head.weight")


def test_without_pytorch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    case = linear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install 'remat_jax\[torch\]'"):
        compare(**case)


WRONG = {
    "torch_module": (torch.nn.Linear, "torch_module=.*expected a torch.nn.Module"),
    "flax_module": (nn.Dense, "flax_module=.*expected a module of Linen, NNX, Equinox or Haiku"),
    "inputs": ({"x": None}, "inputs=.*expected arrays"),
    "loss": (3, "loss=3: expected a function"),
    "torch_blocks": ("Linear", "torch_blocks='Linear': expected a class"),
    "modes": (("off", "off"), "each once"),
    "dtypes": ("int8", "dtype='int8' has no ε"),
    "optimizer": ("adamv", "name='adamv' is unknown.*Did you mean 'adam"),
    "steps": (0, "steps=0: expected the number of training steps"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name: str) -> None:
    value, message = WRONG[name]
    with pytest.raises(ArgumentError, match=message):
        compare(**linear(**{name: value}))


def test_a_mode_without_blocks_and_an_unknown_one() -> None:
    with pytest.raises(PolicyError, match="modes='chekpoint'"):
        compare(**linear(modes="chekpoint"))
    with pytest.raises(ArgumentError, match="the PyTorch model has no list of modules of one class"):
        compare(**linear(modes=("checkpoint",), torch_blocks=None, flax_blocks=nn.Dense))
    with pytest.raises(ArgumentError, match="no Flax class has the weights"):
        compare(**linear(modes=("checkpoint",), torch_blocks=torch.nn.Linear))
    with pytest.raises(ArgumentError, match="modes: 'full' in PyTorch: .*Dropout, but it has no module in the model"):
        compare(**linear(modes=("off", "full"), torch_blocks=torch.nn.Dropout, flax_blocks=nn.Dense))
    with pytest.raises(PolicyError, match=r"the selector '\*nowhere\*' matches no residual"):
        run(c.stack(), **{**c.QUICK, "modes": "save: *nowhere*"})


def test_neither_model_is_changed() -> None:
    case = linear(
        optimizer=Optimizer("sgd", momentum=0.0), modes=("off", "full"), flax_blocks=nn.Dense, torch_blocks=torch.nn.Linear
    )
    before = {name: tensor.clone() for name, tensor in case["torch_module"].state_dict().items()}
    assert compare(**case).passed
    after = case["torch_module"].state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(parameter.grad is None for parameter in case["torch_module"].parameters())


def test_a_model_that_a_wrapper_renamed_is_refused_by_name():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(3, 2)))
    with pytest.raises(ArgumentError, match=r"'0._checkpoint_wrapped_module.weight' has another name in state_dict"):
        compare(**linear(torch_module=wrapped))
