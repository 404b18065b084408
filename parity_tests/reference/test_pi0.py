"""π0 in PyTorch: each part's executions in the correct form and in OpenPI's, and its parts against `transformers`."""

from __future__ import annotations

import pytest
import torch
from transformers import GemmaConfig, GemmaModel, SiglipVisionConfig, SiglipVisionModel

import torch_ref
from examples.pytorch.gemma import AdaptiveRMSNorm
from parity_tests.pipelines import pi0 as p
from remat_jax.parity import keep_float64

PI0, PI05 = p.CONFIGS["pi0"], p.CONFIGS["pi05"]
variants = pytest.mark.parametrize("config", [PI0, PI05], ids=["pi0", "pi05"])


def executions(model, loss_of, **flags):
    """The executions of each part of the model in a step, by name."""
    with torch_ref.count_calls(torch.nn.Module) as calls:
        loss_of(*p.as_torch(p.batch(model.config)), **flags).backward()
    names = {module: name for name, module in model.named_modules()}
    return {names[module]: count for module, count in calls.per_module.items() if module in names}


def layers_of(counts):
    """The counts of the joint layers and of the tower's."""
    depths = ((f"layers.{k}" for k in range(PI0.depth)), (f"vision_tower.encoder.layers.{k}" for k in range(PI0.vision_depth)))
    return [[counts[name] for name in names] for names in depths]


@variants
@pytest.mark.parametrize(("mode", "count"), [("off", 1), ("checkpoint", 2), ("offload", 2)])
def test_the_right_form_runs_each_layer_twice_and_no_more(config, mode, count):
    model = p.make_torch(config)
    counts = executions(model, model.loss, **torch_ref.mode_flags(mode))
    assert layers_of(counts) == [[count] * 2, [count] * 2]
    assert {counts[name] for name in ("embed_tokens", "projector", "prefix_norm", "suffix_norm", "action_out_proj")} == {1}
    assert max(counts.values()) == count


@variants
def test_how_often_openpi_runs_each_part(config):
    """Each layer but the last runs three times, because the outer checkpoint ends one recomputation early. A layer of
    the tower runs twice per camera.
    """
    model = p.make_torch(config)
    counts = executions(model, p.faithful(model, "enabled").loss)
    assert layers_of(counts) == [[3, 2], [6, 6]]
    assert counts["projector"] == counts["vision_tower"] == 2 * config.num_images
    mlp = ("time_mlp_in",) if config.adaptive else ("state_proj", "action_time_mlp_in")
    parts = ("embed_tokens", "action_in_proj", "action_out_proj", "prefix_norm", "suffix_norm", *mlp)
    assert {counts[name] for name in parts} == {2}
    # Switched off: code outside the transformer runs once, but the layers and the norms are still checkpointed.
    counts = executions(model, p.faithful(model, "disabled").loss)
    assert layers_of(counts) == [[2, 2], [3, 3]]
    assert {counts[name] for name in ("prefix_norm", "suffix_norm")} == {2}
    assert {counts[name] for name in ("embed_tokens", "action_in_proj", "action_out_proj", *mlp)} == {1}
    # Outside training nothing is checkpointed, whatever the flags say.
    outer = p.faithful(model, "enabled")
    outer.eval()
    assert layers_of(executions(model, outer.loss)) == [[1, 1], [3, 3]]


@variants
def test_what_the_doctor_says(config):
    model = p.make_torch(config)
    observation, _, noise, time = p.as_torch(p.batch(config))
    diagnosis = torch_ref.doctor(p.faithful(model, "enabled"), observation, noise, time)
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


def test_an_adaptive_norm_scales_shifts_and_gates():
    norm = AdaptiveRMSNorm(2, condition_width=1).double()
    with torch.no_grad():
        norm.dense.weight[:] = torch.tensor([[1.0], [2.0], [10.0], [20.0], [0.5], [0.25]])
    y, gate = norm(torch.tensor([[[3.0, 4.0]]]).double(), torch.tensor([[2.0]]).double())
    root = (12.5 + 1e-6) ** 0.5
    assert y.flatten().tolist() == pytest.approx([3 / root * 3 + 20, 4 / root * 5 + 40], rel=1e-14)
    assert gate.tolist() == [[[1.0, 0.5]]]


# Against `transformers`: the prefix never attends to the suffix, and a suffix with a fully padded prefix is alone.


def gemma(index):
    """Gemma with the weights of the language model or of the expert, for embeddings."""
    config = GemmaConfig(
        vocab_size=8,
        hidden_size=PI0.widths[index],
        intermediate_size=PI0.mlp_dims[index],
        num_hidden_layers=PI0.depth,
        num_attention_heads=PI0.num_heads,
        num_key_value_heads=PI0.num_kv_heads,
        head_dim=PI0.head_dim,
        use_cache=False,
        attn_implementation="eager",
    )
    with keep_float64():
        model = GemmaModel(config).double()
    stream, expert_path = ("prefix", "suffix")[index], f"experts.{index}."
    state = {
        name.replace(expert_path, ""): x
        for name, x in p.weights(PI0).items()
        if name.startswith("layers.") and expert_path in name
    }
    state["norm.weight"] = p.weights(PI0)[f"{stream}_norm.weight"]
    assert model.load_state_dict(state, strict=False).missing_keys == ["embed_tokens.weight"]
    return model


def run_both(index, observation, noise, time):
    """The stream's final states in our model, and in Gemma given the same embeddings, mask and positions."""
    model, seen = p.make_torch(PI0), {}
    model.layers[0].register_forward_pre_hook(lambda layer, args: seen.update(embedded=args[0][index]))
    norm = (model.prefix_norm, model.suffix_norm)[index]
    norm.register_forward_hook(lambda norm, args, output: seen.update(found=output[0]))
    model(observation, noise, time)
    positions, bias = model.see(observation, torch.float64)
    prefix = PI0.image_tokens + PI0.prompt_length
    part = (slice(0, prefix), slice(prefix, None))[index]
    with keep_float64():
        expected = gemma(index)(
            inputs_embeds=seen["embedded"], attention_mask=bias[:, :, part, part], position_ids=positions[:, part]
        )
    return seen["found"], expected.last_hidden_state, positions[:, part]


@pytest.mark.parametrize("index", [0, 1], ids=["language model", "expert"])
def test_the_language_model_and_the_expert_are_gemma(index):
    observation, _, noise, time = p.as_torch(p.batch(PI0))
    images = observation.image_mask.repeat_interleave(PI0.image_tokens // PI0.num_images, dim=1)
    # Nobody reads the results at padding, and they differ: padding attends to everything equally, also to the suffix.
    read = torch.cat([images, observation.prompt_mask], dim=1)
    if index:
        nothing = (torch.zeros_like(observation.image_mask), torch.zeros_like(observation.prompt_mask))
        observation = observation._replace(image_mask=nothing[0], prompt_mask=nothing[1])
        read = torch.ones(len(read), PI0.horizon + 1, dtype=torch.bool)
    output, expected, positions = run_both(index, observation, noise, time)
    assert not index or positions[0].tolist() == list(range(PI0.horizon + 1))
    assert torch.allclose(output[read], expected[read], rtol=1e-11, atol=1e-11)


def test_the_tower_is_siglip():
    config = SiglipVisionConfig(
        hidden_size=PI0.vision_width,
        intermediate_size=PI0.vision_mlp_dim,
        num_hidden_layers=PI0.vision_depth,
        num_attention_heads=PI0.vision_heads,
        image_size=PI0.image_size,
        patch_size=PI0.patch_size,
        vision_use_head=False,
        attn_implementation="eager",
    )
    with keep_float64():
        original, ours = SiglipVisionModel(config).double(), p.make_torch(PI0).vision_tower
        original.load_state_dict(ours.state_dict())
        images = torch.randn(2, 3, PI0.image_size, PI0.image_size, dtype=torch.float64)
        expected = original(images).last_hidden_state
    assert torch.allclose(ours(images), expected, rtol=1e-11, atol=1e-11)
