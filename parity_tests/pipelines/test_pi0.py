"""π0 and π0.5: PyTorch, OpenPI's own flow and Flax compute the same loss and gradient, in every mode."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch

from examples import pytorch
from examples.models import pi0
from examples.models.pi0_config import Observation, Pi0Config
from examples.models.rules.pi0 import rules
from parity_tests import support as s
from parity_tests.pipelines import pi0 as p
from remat_jax.cost.count import matmuls
from remat_jax.parity import float64_error
from remat_jax.porting.links import fit

variants = pytest.mark.parametrize("variant", p.CONFIGS)
FORMS = [("pi0", "unrolled", "offload"), ("pi05", "scan", "checkpoint"), ("pi05", "unrolled", "off")]


def error(config: Pi0Config, step: p.Step) -> float:
    """The largest relative error of the loss or of a gradient against plain PyTorch."""
    exact = p.torch_step(config)
    worst, _ = float64_error(exact.gradients, step.gradients)
    return max(worst, abs(float(step.loss / exact.loss) - 1))


@variants
@pytest.mark.parametrize("form", ["checkpoint", "offload", *p.FAITHFUL])
def test_pytorch_computes_one_gradient_in_every_form(variant: str, form: str) -> None:
    assert error(p.CONFIGS[variant], p.torch_step(p.CONFIGS[variant], form)) <= s.LIMIT


@pytest.mark.parametrize(("variant", "form", "mode"), FORMS)
def test_flax_computes_that_of_pytorch(variant: str, form: str, mode: str) -> None:
    config = p.CONFIGS[variant]
    assert error(config, p.jax_step(config, mode, form == "scan")) <= s.LIMIT


def test_only_what_the_actions_do_not_read_has_no_gradient() -> None:
    """The last layer of the prefix computes keys and values; nothing reads its later results."""
    config = p.CONFIGS["pi05"]
    unused = {name for name, gradient in p.torch_step(config).gradients.items() if not gradient.any()}
    last = f"layers.{config.depth - 1}.experts.0"
    names = ("self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm")
    names += tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    assert unused == {f"{last}.{name}.weight" for name in names} | {"prefix_norm.weight"}


def test_a_checkpoint_runs_each_layer_once_more() -> None:
    """A joint layer has 16 products, two of them for outputs that no derivative reads: 14 are recomputed. A layer of the tower
    has 8, and 7 are recomputed. In π0.5 the expert's gates read its last product, and two norms have one.
    """
    config, counts = p.CONFIGS["pi05"], {}
    with jax.enable_x64(True):
        for mode in ("off", "checkpoint"):
            model, params = p.make_flax(config, mode, scan=True)
            step = jax.value_and_grad(functools.partial(pi0.flow_matching_loss, model))
            counts[mode] = matmuls(step, params, *p.batch(config))
    assert counts["checkpoint"] - counts["off"] == config.depth * (14 + 1 + 2) + config.vision_depth * 7


@pytest.mark.parametrize(("config", "millions"), [(Pi0Config.pi0(), 3_238), (Pi0Config.pi05(), 3_353)], ids=["pi0", "pi05"])
def test_published_sizes(config: Pi0Config, millions: int) -> None:
    """The same parameters on paper: equally many in both frameworks, each with a place in the map."""
    with torch.device("meta"):
        original = {name: tuple(x.shape) for name, x in pytorch.Pi0(config).named_parameters()}
    observation, actions, time, _ = config.shapes(1)
    empty = jax.eval_shape(pi0.Pi0(config, scan=True).init, jax.random.key(0), observation, actions, time)
    flat = {"/".join(key.key for key in path): x.shape for path, x in jax.tree.leaves_with_path(empty)}
    assert fit(rules(config, scan=True), original, flat)[1] == []
    assert sum(int(np.prod(shape)) for shape in flat.values()) // 10**6 == millions


def test_who_sees_whom() -> None:
    """Cameras and prompt attend to each other, the state to them and itself, the actions to everything; padding to nothing."""
    config = Pi0Config(image_size=14, num_images=2, prompt_length=2, horizon=2)
    seen = Observation(None, np.array([[True, False]]), None, np.array([[True, False]]), None)
    valid, visible = pi0.see(config, seen)
    expected = ["1010000", "0000000", "1010000", "0000000", "1010100", "1010111", "1010111"]
    assert ["".join(str(int(flag)) for flag in row) for row in visible[0]] == expected
    assert valid[0].tolist() == [True, False, True, False, True, True, True]
    adaptive = pi0.see(dataclasses.replace(config, adaptive=True), seen)[1]
    assert ["".join(str(int(flag)) for flag in row) for row in adaptive[0]][-2:] == ["101011"] * 2
    positions, bias = pytorch.Pi0(config).see(
        pytorch.Observation(*(None if array is None else torch.tensor(array) for array in seen)), torch.float64
    )
    assert np.array_equal(bias[0, 0].numpy() == 0, visible[0]) and positions[0].tolist() == [0, 0, 1, 1, 2, 3, 4]
