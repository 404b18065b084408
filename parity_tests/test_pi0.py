"""π0 and π0.5, small: PyTorch, OpenPI's own flow and Flax compute the same loss and gradient in every mode; executions."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import remat_jax as rj
import torch_ref
from examples import pytorch
from examples.models import pi0
from examples.models.pi0_config import Observation, Pi0Config
from examples.models.rules.pi0 import rules
from examples.models.siglip import SiglipBlock
from examples.pytorch.faithful import PI0Pytorch
from parity_tests import support as s
from parity_tests.small_pairs import gradients_of
from remat_jax import porting
from remat_jax.cost.count import matmuls
from remat_jax.parity import float64_error
from remat_jax.porting.links import fit

POLICIES = {"off": "off", "checkpoint": "full", "offload": "offload_inputs"}
BLOCKS = (pi0.JointLayer, SiglipBlock)
FAITHFUL = ("enabled", "disabled")
# All sizes differ, so that a misplaced tensor does not fit.
CONFIGS = {
    name: Pi0Config(widths=(24, 20), mlp_dims=(40, 36), depth=2, num_heads=4, num_kv_heads=2, head_dim=6, adaptive=adaptive)
    for name, adaptive in (("pi0", False), ("pi05", True))
}


class Step(NamedTuple):
    """The results of a step, by PyTorch's names; unused parameters have a gradient of zero."""

    loss: np.ndarray
    gradients: dict[str, np.ndarray]


@functools.cache
def batch(config: Pi0Config) -> tuple[Any, ...]:
    """Observation, actions, noise and time; one camera is missing, prompts are padded, times are at both ends."""
    random, size, n = np.random.default_rng(0), config.image_size, 3
    images = random.normal(size=(n, config.num_images, size, size, 3))
    present = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    prompt = random.integers(0, config.vocab_size, (n, config.prompt_length))
    words = np.arange(config.prompt_length) < np.array([[config.prompt_length], [5], [0]])
    state = random.normal(size=(n, config.action_dim))
    actions, noise = random.normal(size=(2, n, config.horizon, config.action_dim))
    observation = Observation(images, present, prompt, words, state)
    return observation, actions, noise, np.array([0.001, 0.4, 1.0])


def as_torch(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same for PyTorch: channels first."""
    observation = given[0]._replace(images=np.moveaxis(given[0].images, -1, 2).copy())
    return pytorch.Observation(*map(torch.tensor, observation)), *map(torch.tensor, given[1:])


@functools.cache
def weights(config: Pi0Config) -> dict[str, torch.Tensor]:
    """The state dict of all tests, in float64: at their initial 0 gates and scales would hide a wrong map."""
    torch.manual_seed(0)
    model = pytorch.Pi0(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.state_dict()


def make_torch(config: Pi0Config) -> pytorch.Pi0:
    """A fresh model in training mode with the weights of all tests."""
    model = pytorch.Pi0(config).double()
    model.load_state_dict(weights(config))
    return model.train()


def faithful(model: pytorch.Pi0, switch: str) -> PI0Pytorch:
    """OpenPI's form of a model, its switch `enabled` or `disabled`."""
    made = PI0Pytorch(model).train()
    made.gradient_checkpointing_enable()
    if switch == "disabled":
        made.gradient_checkpointing_disable()
    return made


@functools.cache
def torch_step(config: Pi0Config, form: str = "off") -> Step:
    """PyTorch's step: in a mode of the correct form, or under OpenPI's switch."""
    model = make_torch(config)
    if form in FAITHFUL:
        loss = faithful(model, form).loss(*as_torch(batch(config)))
    else:
        loss = model.loss(*as_torch(batch(config)), **torch_ref.mode_flags(form))
    loss.backward()
    return Step(loss.detach().numpy(), gradients_of(model))


def make_flax(config: Pi0Config, mode: str, scan: bool) -> tuple[Any, Any]:
    """The Flax model under the switch, and its parameters."""
    plain = pi0.Pi0(config, scan=scan, param_dtype="float64")
    observation, actions, _, time = batch(config)
    empty = jax.eval_shape(plain.init, jax.random.key(0), observation, actions, time)
    params = porting.from_torch(weights(config), empty, rules(config, scan))["params"]
    model = plain if mode == "off" else rj.enable_gradient_checkpointing(plain, POLICIES[mode], blocks=BLOCKS)
    return model, params


def jax_step(config: Pi0Config, mode: str, scan: bool) -> Step:
    """The step in Flax, in a mode."""
    with jax.enable_x64(True):
        model, params = make_flax(config, mode, scan)
        loss, gradients = s.run(jax.value_and_grad(functools.partial(pi0.flow_matching_loss, model)), params, *batch(config))
        ported = porting.gradients_to_torch({"params": gradients}, rules(config, scan), numpy=True)
        return Step(np.asarray(loss), dict(ported))


variants = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
FORMS = [("pi0", "unrolled", "offload"), ("pi05", "scan", "checkpoint"), ("pi05", "unrolled", "off")]


def error(config: Pi0Config, step: Step) -> float:
    """The largest relative error of the loss or of a gradient against plain PyTorch."""
    exact = torch_step(config)
    worst, _ = float64_error(exact.gradients, step.gradients)
    return max(worst, abs(float(step.loss / exact.loss) - 1))


@variants
@pytest.mark.parametrize("form", ["checkpoint", "offload", *FAITHFUL])
def test_pytorch_computes_one_gradient_in_every_form(config: Pi0Config, form: str) -> None:
    assert error(config, torch_step(config, form)) <= s.LIMIT


@pytest.mark.parametrize(("variant", "form", "mode"), FORMS)
def test_flax_computes_that_of_pytorch(variant: str, form: str, mode: str) -> None:
    config = CONFIGS[variant]
    assert error(config, jax_step(config, mode, form == "scan")) <= s.LIMIT


def test_only_what_the_actions_do_not_read_has_no_gradient() -> None:
    """The last layer of the prefix computes keys and values; nothing reads its later results."""
    config = CONFIGS["pi05"]
    unused = {name for name, gradient in torch_step(config).gradients.items() if not gradient.any()}
    last = f"layers.{config.depth - 1}.experts.0"
    names = ("self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm")
    names += tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
    assert unused == {f"{last}.{name}.weight" for name in names} | {"prefix_norm.weight"}


def test_a_checkpoint_runs_each_layer_once_more() -> None:
    """A joint layer has 16 products, two of them for outputs that no derivative reads: 14 are recomputed. A layer of the tower
    has 8, and 7 are recomputed. In π0.5 the expert's gates read its last product, and two norms have one.
    """
    config, counts = CONFIGS["pi05"], {}
    with jax.enable_x64(True):
        for mode in ("off", "checkpoint"):
            model, params = make_flax(config, mode, scan=True)
            step = jax.value_and_grad(functools.partial(pi0.flow_matching_loss, model))
            counts[mode] = matmuls(step, params, *batch(config))
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


# The executions of each part, in the correct form and in OpenPI's.


def executions(model, loss_of, **flags):
    """The executions of each part of the model in a step, by name."""
    with torch_ref.count_calls(torch.nn.Module) as calls:
        loss_of(*as_torch(batch(model.config)), **flags).backward()
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: count for module, count in calls.per_module.items() if module in names}


def layers_of(counts):
    """The counts of the joint layers and of the tower's."""
    depths = {"layers": CONFIGS["pi0"].depth, "vision_tower.encoder.layers": CONFIGS["pi0"].vision_depth}
    return [[counts[f"{name}.{k}"] for k in range(depth)] for name, depth in depths.items()]


@variants
@pytest.mark.parametrize(("mode", "count"), [("off", 1), ("checkpoint", 2), ("offload", 2)])
def test_the_right_form_runs_each_layer_twice_and_no_more(config, mode, count):
    model = make_torch(config)
    counts = executions(model, model.loss, **torch_ref.mode_flags(mode))
    assert layers_of(counts) == [[count] * 2, [count] * 2]
    assert {counts[name] for name in ("embed_tokens", "projector", "prefix_norm", "suffix_norm", "action_out_proj")} == {1}
    assert max(counts.values()) == count


@variants
def test_how_often_openpi_runs_each_part(config):
    """Each layer but the last runs three times, because the outer checkpoint ends one recomputation early. A layer of
    the tower runs twice per camera.
    """
    model = make_torch(config)
    counts = executions(model, faithful(model, "enabled").loss)
    assert layers_of(counts) == [[3, 2], [6, 6]]
    assert counts["projector"] == counts["vision_tower"] == 2 * config.num_images
    mlp = ("time_mlp_in",) if config.adaptive else ("state_proj", "action_time_mlp_in")
    parts = ("embed_tokens", "action_in_proj", "action_out_proj", "prefix_norm", "suffix_norm", *mlp)
    assert {counts[name] for name in parts} == {2}
    # Switched off: code outside the transformer runs once, but the layers and the norms are still checkpointed.
    counts = executions(model, faithful(model, "disabled").loss)
    assert layers_of(counts) == [[2, 2], [3, 3]]
    assert {counts[name] for name in ("prefix_norm", "suffix_norm")} == {2}
    assert {counts[name] for name in ("embed_tokens", "action_in_proj", "action_out_proj", *mlp)} == {1}
    # Outside training nothing is checkpointed, whatever the flags say.
    outer = faithful(model, "enabled")
    outer.eval()
    assert layers_of(executions(model, outer.loss)) == [[1, 1], [3, 3]]


@variants
def test_what_the_doctor_says(config):
    model = make_torch(config)
    observation, _, noise, time = as_torch(batch(config))
    diagnosis = torch_ref.doctor(faithful(model, "enabled"), observation, noise, time)
    assert [(finding.trap, finding.block.split(" ")[0]) for finding in diagnosis.findings] == [
        ("flag_without_effect", "transformer.language_model"),
        ("flag_without_effect", "transformer.vision_tower"),
        ("nested_container", "transformer"),
        ("nested_container", "transformer"),
    ]
    # Three cameras, the prompt, the projections and MLPs, the whole transformer; inside it two layers and the norms.
    assert diagnosis.regions == 3 + 1 + (2 if config.adaptive else 3) + 1 + 2 + 1 + 1
    right = torch_ref.doctor(model, observation, noise, time, use_gradient_checkpointing=True)
    assert right.ok and right.regions == config.depth + config.vision_depth
