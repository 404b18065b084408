"""`porting.propose`: maps found by names and shapes, decided by running both models, and refused if that cannot decide."""

from __future__ import annotations

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from parity_tests.small_pairs import DENSE, Flax, Kernel, Torch, linears
from parity_tests.support import MODULES, SIZES, data, make_torch
from remat_jax import porting
from remat_jax.errors import PortingError
from remat_jax.porting.links import links_of_tensors
from remat_jax.warning import RematWarning

F64 = {"param_dtype": jnp.float64}
NAMES = ("first", "second", "third")


def found(rules: porting.Rules, module: torch.nn.Module) -> dict[str, tuple[str, str]]:
    """Each tensor's place and transform."""
    links = links_of_tensors(rules, module.state_dict())
    return {name: (", ".join(map(str, link.flax)), str(link.rule.transform)) for name, link in links.items()}


def random_input(*shape: int) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape)


def in_a_row(names: tuple[str, ...] = NAMES) -> Torch:
    """Square layers with names, of which those in `names` are called."""

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = getattr(module, name)(x).tanh()
        return x

    return Torch(run, **linears(4, *NAMES))


def in_a_row_flax(order: tuple[str, ...] = NAMES, turned: tuple[bool, ...] = (False,) * 3) -> Flax:
    """The same; the k-th called layer has the name `order[k]` and the layout `turned[k]`."""

    def run(module: nn.Module, x: Any) -> Any:
        for name, is_turned in zip(order, turned, strict=True):
            x = jnp.tanh(Kernel(is_turned, name=name)(x))
        return x

    return Flax(run)


@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_a_mistake_among_square_layers_is_impossible(order: tuple[str, ...]) -> None:
    """Whatever the names and the kernels' layouts are, the models decide."""
    module, x = in_a_row(), random_input(3, 4)
    number = list(itertools.permutations(NAMES)).index(order)
    turned = tuple(bool((number >> bit) % 2) for bit in range(3))
    rules = porting.propose(module, in_a_row_flax(order, turned), x)
    for name, place, is_turned in zip(NAMES, order, turned, strict=True):
        assert found(rules, module)[f"{name}.weight"] == (f"params/{place}/kernel", "identity" if is_turned else "linear")
        assert found(rules, module)[f"{name}.bias"] == (f"params/{place}/bias", "identity")


def branches() -> Torch:
    """A sum of two exchangeable branches with two layers each."""
    parts = {
        name: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4, bias=False)) for name in "ab"
    }
    return Torch(lambda m, x: m.a(x) + m.b(x), **parts)


def branches_flax(module: nn.Module, x: Any) -> Any:
    def branch(name: str) -> Any:
        hidden = jnp.tanh(nn.Dense(4, name=f"{name}_in", **F64)(x))
        return nn.Dense(4, use_bias=False, name=f"{name}_out", **F64)(hidden)

    return branch("left") + branch("right")


def test_what_the_models_cannot_decide_is_listed_and_decided_by_rules() -> None:
    module = branches()
    with pytest.raises(PortingError, match="several maps agree with both models") as error:
        porting.propose(module, Flax(branches_flax), random_input(3, 4))
    text = str(error.value)
    places = ("left_in", "right_in"), ("left_out", "right_out")
    assert all(
        f"a.{n}.weight -> params/{place}/kernel" in text for n, both in zip((0, 2), places, strict=True) for place in both
    )
    given = "a.0.weight -> params/right_in/kernel | linear\na.0.bias -> params/right_in/bias"
    rules = porting.propose(module, Flax(branches_flax), random_input(3, 4), rules=given)
    assert found(rules, module)["b.2.weight"] == ("params/left_out/kernel", "linear")


def test_a_kernel_that_may_lie_either_way_is_reported() -> None:
    """xᵀ W x is the same for Wᵀ."""
    quadratic = Torch(lambda m, x: (m.form(x) * x).sum(-1), form=torch.nn.Linear(4, 4, bias=False))
    ours = Flax(lambda m, x: jnp.sum(nn.Dense(4, use_bias=False, name="form", **F64)(x) * x, -1))
    with pytest.raises(PortingError, match="several maps agree") as error:
        porting.propose(quadratic, ours, random_input(3, 4))
    assert "form.weight -> params/form/kernel | linear" in str(error.value)
    assert "form.weight -> params/form/kernel\n" in f"{error.value}\n"


@pytest.mark.parametrize(("api", "scan"), [("linen", True), ("nnx", False)])
def test_a_decoder_s_map_is_found_unrolled_and_stacked(api: str, scan: bool) -> None:
    module = make_torch("ByteDecoder")
    with jax.enable_x64(True):
        rngs = {"rngs": nnx.Rngs(0)} if api == "nnx" else {}
        flax = MODULES[api].ByteDecoder(**SIZES["ByteDecoder"], scan=scan, **rngs)
    rules = porting.propose(module, flax, data("ByteDecoder").x)
    where = found(rules, module)
    assert where["decoder.layers.1.ffn.2.weight"] == (
        "params/layers/ffn/down/kernel[1]" if scan else "params/layers_1/ffn/down/kernel",
        "linear",
    )
    assert len(rules.rules) == 14 and len(where) == len(module.state_dict())


def gemma() -> Torch:
    """A tied embedding, a norm that multiplies by 1 + weight, and PyTorch's own attention."""

    def run(module: Torch, tokens: torch.Tensor) -> torch.Tensor:
        x = module.embed(tokens)
        x = x + module.attn(x, x, x, need_weights=False)[0].float()
        # As in Gemma: in float32, whatever the input's dtype.
        normed = torch.nn.functional.rms_norm(x.float(), (8,), 1 + module.norm.weight, 1e-6)
        return module.lm_head(normed.type_as(x))

    model = Torch(
        run,
        embed=torch.nn.Embedding(7, 8),
        norm=torch.nn.RMSNorm(8, eps=1e-6),
        attn=torch.nn.MultiheadAttention(8, 2, batch_first=True),
        lm_head=torch.nn.Linear(8, 7, bias=False),
    )
    model.lm_head.weight = model.embed.weight
    model.register_buffer("frequencies", torch.ones(3))
    return model


def gemma_flax(epsilon: float = 1e-6, dtype: Any = None) -> Flax:
    def run(module: nn.Module, tokens: Any) -> Any:
        embed = nn.Embed(7, 8, name="tokens", dtype=dtype, **F64)
        x = embed(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, name="attention", dtype=dtype, **F64)(x)
        return embed.attend(nn.RMSNorm(epsilon=epsilon, use_fast_variance=False, name="scale", dtype=dtype, **F64)(x))

    return Flax(run)


TOKENS = np.random.default_rng(0).integers(0, 7, (2, 5))


def test_ties_buffers_fused_projections_and_shifted_norms_are_found() -> None:
    module = gemma()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    rules = porting.propose(module, gemma_flax(), TOKENS)
    where = found(rules, module)
    assert where["attn.in_proj_weight"] == (
        ", ".join(f"params/attention/{x}/kernel" for x in ("query", "key", "value")),
        "in_proj",
    )
    assert where["attn.out_proj.weight"] == ("params/attention/out/kernel", "heads_out")
    assert where["norm.weight"] == ("params/scale/scale", "norm_plus_one")
    assert [(first.text, second.text) for first, second in rules.ties] == [("embed.weight", "lm_head.weight")]
    assert rules.extra == ("frequencies",)
    assert all(
        torch.equal(tensor, before[name]) and tensor.dtype == torch.float32 for name, tensor in module.state_dict().items()
    )


def test_models_that_differ_in_more_than_weights_are_refused() -> None:
    with pytest.raises(
        PortingError,
        match="no map makes the models agree: with equal weights in all modules of equal shapes, output 0 still differs",
    ):
        porting.propose(gemma(), gemma_flax(epsilon=1e-3), TOKENS)


def test_a_model_that_computes_in_float32_is_named_and_may_be_made_in_float64() -> None:
    with pytest.raises(PortingError, match="computes in float32 .* or give a function of a dtype"):
        porting.propose(gemma(), gemma_flax(dtype=jnp.float32), TOKENS, keep_float64=False)
    assert porting.propose(gemma(), gemma_flax(dtype=jnp.float32), TOKENS).ties
    assert porting.propose(gemma(), lambda dtype: gemma_flax(dtype=jnp.dtype(dtype)), TOKENS).ties


def test_images_statistics_and_convolutions() -> None:
    module = torch.nn.Sequential(
        torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ConvTranspose2d(4, 4, 2)
    ).eval()

    def net(module: nn.Module, x: Any) -> Any:
        x = nn.Conv(4, (3, 3), padding=[(1, 1)] * 2, **F64)(x)
        x = nn.BatchNorm(use_running_average=True, epsilon=1e-5, **F64)(x)
        return nn.ConvTranspose(4, (2, 2), padding="VALID", **F64)(x)

    def call(model: Any, x: Any) -> Any:
        return jnp.moveaxis(model(jnp.moveaxis(x, 1, -1)), -1, 1)

    rules = porting.propose(module, Flax(net), random_input(2, 4, 5, 5), flax_call=call)
    where = found(rules, module)
    assert where["0.weight"] == ("params/Conv_0/kernel", "conv2d")
    assert where["1.running_var"] == ("batch_stats/BatchNorm_0/var", "identity")
    assert where["2.weight"][1] == "flip(2, 3) | i o h w -> h w i o"
    assert rules.extra == ("1.num_batches_tracked",)


def test_an_unused_module_of_one_framework_is_left_over_and_named() -> None:
    with pytest.warns(RematWarning, match=r"only PyTorch has third\.weight, third\.bias; the outputs do not depend on them"):
        rules = porting.propose(in_a_row(NAMES[:2]), in_a_row_flax(NAMES[:2], (False,) * 2), random_input(3, 4))
    assert str(rules).splitlines()[-1] == "extra: third.weight, third.bias"


def deep_torch() -> Torch:
    """Stages of blocks, a list in a list, as in a residual network, and a table that is not trained."""

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        x = x + module.table
        for norm, stage in zip(module.norms, module.stages, strict=True):
            x = norm(x)
            for block in stage:
                x = block(x).tanh()
        return x

    stages = (torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(blocks)) for blocks in (2, 3))
    return Torch(
        run,
        table=torch.nn.Parameter(torch.randn(3, 4), requires_grad=False),
        norms=torch.nn.ModuleList(torch.nn.LayerNorm(4) for _ in range(2)),
        stages=torch.nn.ModuleList(stages),
    )


class Numbered(nn.Module):
    blocks: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for block in range(self.blocks):
            x = jnp.tanh(nn.Dense(4, name=str(block), **F64)(x))
        return x


def deep(module: nn.Module, x: Any) -> Any:
    """The same with numbers as names, the norms counted from one, and the table behind a stopped gradient."""
    x = x + jax.lax.stop_gradient(module.param("table", nn.initializers.normal(), (3, 4), jnp.float64))
    for number, blocks in enumerate((2, 3)):
        x = nn.LayerNorm(epsilon=1e-5, name=f"norm{number + 1}", **F64)(x)
        x = Numbered(blocks, name=f"stages_{number}")(x)
    return x


def test_nested_numbers_become_placeholders_and_a_frozen_weight_is_mapped() -> None:
    rules = porting.propose(deep_torch(), Flax(deep), random_input(2, 3, 4))
    assert str(rules).splitlines() == [
        "table -> params/table",
        "norms.{i}.weight -> params/norm{i+1}/scale",
        "norms.{i}.bias -> params/norm{i+1}/bias",
        "stages.{i}.{j}.weight -> params/stages_{i}/{j}/kernel | linear",
        "stages.{i}.{j}.bias -> params/stages_{i}/{j}/bias",
    ]


def test_attentions_fused_and_separate_in_one_model() -> None:
    """As in SigLIP."""

    def theirs(module: Torch, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (module.q_proj, module.k_proj, module.v_proj))
        x = module.out_proj(torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return module.pool(x, x, x, need_weights=False)[0]

    def ours(module: nn.Module, x: Any) -> Any:
        x = nn.MultiHeadDotProductAttention(2, name="attention", **F64)(x)
        return nn.MultiHeadDotProductAttention(2, name="pool", **F64)(x)

    pool = torch.nn.MultiheadAttention(4, 2, batch_first=True)
    module = Torch(theirs, pool=pool, **linears(4, "q_proj", "k_proj", "v_proj", "out_proj"))
    where = found(porting.propose(module, Flax(ours), random_input(2, 5, 4)), module)
    assert where["q_proj.weight"] == ("params/attention/query/kernel", "heads")
    assert where["pool.in_proj_weight"][0].startswith("params/pool/query/kernel, params/pool/key/kernel")


# What is refused.


def test_a_function_that_builds_the_model_is_taken_and_errors_say_whose_they_are() -> None:
    theirs, ours = in_a_row, in_a_row_flax()
    assert str(porting.propose(theirs, ours, random_input(3, 4))) == DENSE
    with pytest.raises(PortingError, match=r"torch_module=3: expected a torch\.nn\.Module, or a function that builds one"):
        porting.propose(3, ours, random_input(3, 4))
    with pytest.raises(PortingError, match=r"torch_module\(\) gave a dict: expected a torch\.nn\.Module"):
        porting.propose(dict, ours, random_input(3, 4))
    with jax.enable_x64(True):
        variables = ours.init(jax.random.key(0), np.ones((3, 4)))
    with pytest.raises(PortingError, match=r"torch_module: Torch cannot be run on inputs: RuntimeError: .*shapes"):
        porting.propose(theirs(), ours, random_input(3, 5), variables=variables)
    narrow = {"flax_call": lambda model, x: model(x[:, :3]), "variables": variables}
    with pytest.raises(PortingError, match=r"flax_module: Flax cannot be run on inputs: TypeError: dot_general"):
        porting.propose(theirs(), ours, random_input(3, 4), **narrow)


def test_what_cannot_be_proved_is_refused_before() -> None:
    with pytest.raises(PortingError, match=r"dropout is on in 1; call torch_module.eval\(\) first"):
        dropping = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1))
        porting.propose(dropping, nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match=r"no map fits the shapes: PyTorch has 1 modules with weights, Flax 1"):
        porting.propose(torch.nn.Linear(4, 5), nn.Dense(4, **F64), random_input(3, 4))
    with pytest.raises(PortingError, match="expected a module of Linen, NNX, Equinox or Haiku"):
        porting.propose(torch.nn.Linear(4, 4), 3, random_input(3, 4))


def angles() -> Any:
    """A table of rotations, by position and pair of features."""
    return np.outer(np.arange(4), 1 / 3 ** np.arange(4))


def turned(x: Any, sin: Any, cos: Any, stack: Any) -> Any:
    first, second = x[..., 0::2], x[..., 1::2]
    return stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)


def turned_torch() -> Torch:
    """Attention with rotated queries and keys; weights as small as at initialisation hide the rotation."""

    def run(module: Torch, x: torch.Tensor) -> torch.Tensor:
        sin, cos = (torch.from_numpy(table(angles())) for table in (np.sin, np.cos))
        query, key = (turned(part(x), sin, cos, torch.stack) for part in (module.query, module.key))
        return (query @ key.mT).softmax(-1) @ module.value(x)

    torch.manual_seed(0)
    model = Torch(run, **linears(8, "query", "key", "value"))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return model


def turned_flax(module: nn.Module, x: Any) -> Any:
    query, key, value = (nn.Dense(8, name=name, **F64)(x) for name in ("query", "key", "value"))
    sin, cos = (table(angles()).astype("float32") for table in (np.sin, np.cos))
    query, key = (turned(part, sin, cos, jnp.stack) for part in (query, key))
    return jax.nn.softmax(query @ key.mT) @ value


def test_a_map_that_a_float32_table_hides_is_answered_with_the_remedy() -> None:
    case = turned_torch(), Flax(turned_flax), random_input(2, 4, 8)
    with pytest.raises(PortingError, match=r"no map was found.* size of float32's rounding.*give keep_float64=True"):
        porting.propose(*case, keep_float64=False)
    assert len(porting.propose(*case, keep_float64=True).rules) == 2
