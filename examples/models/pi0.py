"""π0 and π0.5, the policies of OpenPI, in Flax Linen, made of the layers of `siglip` and `gemma`.

Images and a prompt form the prefix; the state and the noisy actions form the suffix. Each part has its own weights, and a
layer has one attention over both parts. The model predicts the velocity from actions to noise (flow matching).

`rules.pi0` carries the weights of the PyTorch twin, `examples.pytorch.Pi0`, and those of OpenPI's JAX and PyTorch models.
Black et al., "π0: A Vision-Language-Action Flow Model for General Robot Control", 2024.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from ..pi0_sizes import check_shapes
from .diffusion import exact_angles
from .gemma import GatedFeedForward, dense, root_mean_square
from .pi0_config import Observation, Pi0Config
from .siglip import encode
from .transformer import attention, rotate, rotations, run_blocks, split_heads, wide

MIN_PERIOD, MAX_PERIOD = 4e-3, 4.0
EPSILON = 1e-6

Streams = tuple[jax.Array, jax.Array]


class AdaptiveRMSNorm(nn.Module):
    """A root-mean-square norm; a condition (B, C), if there is one, sets its scale, a shift and a gate.

    (B, T, E) → the same, and a gate (B, 1, E); without a condition the gate is None. `modulation` starts at zero.
    """

    adaptive: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, condition: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        width, normed, zeros = x.shape[-1], root_mean_square(x, EPSILON), nn.initializers.zeros
        if not self.adaptive:
            scale = self.param("scale", zeros, (width,), self.param_dtype)
            return (normed * (1 + scale.astype(normed.dtype))).astype(x.dtype), None
        modulation = nn.Dense(3 * width, kernel_init=zeros, param_dtype=self.param_dtype, name="modulation")
        scale, shift, gate = jnp.split(modulation(condition)[:, None].astype(normed.dtype), 3, axis=-1)
        return (normed * (1 + scale) + shift).astype(x.dtype), gate.astype(x.dtype)


class Stream(nn.Module):
    """The weights of one stream in one layer: projections into the shared attention and out of it, and a feed-forward layer."""

    config: Pi0Config
    index: int
    param_dtype: Any = jnp.float32

    def setup(self) -> None:
        gemma, adaptive = self.config.gemma(self.index), self.config.adaptive and self.index == 1
        self.input_norm = AdaptiveRMSNorm(adaptive, self.param_dtype)
        self.post_attention_norm = AdaptiveRMSNorm(adaptive, self.param_dtype)
        self.q_proj = dense(gemma.num_heads * gemma.head_dim, None, self.param_dtype)
        self.k_proj, self.v_proj = (dense(gemma.num_kv_heads * gemma.head_dim, None, self.param_dtype) for _ in range(2))
        self.o_proj = dense(gemma.hidden_size, None, self.param_dtype)
        self.mlp = GatedFeedForward(gemma, self.param_dtype)

    def project(self, x: jax.Array, condition: jax.Array | None) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """Return query, key and value (B, T, heads, D), and the gate of the residual."""
        normed, gate = self.input_norm(x, condition)
        heads = (self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads)
        projections = zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
        return tuple(split_heads(project(normed), count) for project, count in projections), gate

    def finish(self, x: jax.Array, mixed: jax.Array, gate: jax.Array | None, condition: jax.Array | None) -> jax.Array:
        """Return the part after the attention: the gated residual, and a gated feed-forward layer."""
        x = gated_residual(x, self.o_proj(mixed), gate)
        normed, gate = self.post_attention_norm(x, condition)
        return gated_residual(x, self.mlp(normed), gate)


class JointLayer(nn.Module):
    """One layer of both streams, (B, T_i, E_i) each → the same: the class to checkpoint, beside `siglip.SiglipBlock`."""

    config: Pi0Config
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, streams: Streams, rotation: tuple[jax.Array, jax.Array], bias: jax.Array, condition: jax.Array | None
    ) -> Streams:
        experts = [Stream(self.config, index, self.param_dtype, name=f"experts_{index}") for index in range(2)]
        conditions = (None, condition)
        projected, gates = zip(*map(Stream.project, experts, streams, conditions), strict=True)
        query, key, value = (jnp.concatenate(parts, axis=1) for parts in zip(*projected, strict=True))
        mixed = attention(rotate(query, rotation), rotate(key, rotation), value, bias)
        parts = jnp.split(mixed, [streams[0].shape[1]], axis=1)
        prefix, suffix = map(Stream.finish, experts, streams, parts, gates, conditions)
        return prefix, suffix


class VisionTower(nn.Module):
    """Images (B, size, size, 3) → tokens (B, patches, E) of the language model's width."""

    config: Pi0Config
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        states = encode(images, self.config.vision, self.param_dtype, scan=self.scan)
        return nn.Dense(self.config.widths[0], param_dtype=self.param_dtype, name="projector")(states)


class Pi0(nn.Module):
    """The velocity (B, horizon, action_dim) of noisy actions, given an observation and the time of the flow (B,).

    The computation has the dtype of the images. `scan` stacks the layers' parameters on axis 0, in the tower too.

    Raises:
        ValueError: the message names every argument whose shape does not fit the configuration.

    >>> config = Pi0Config(depth=1)
    >>> arguments = config.shapes(batch=2)[:3]
    >>> model = Pi0(config)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), *arguments)
    >>> jax.eval_shape(model.apply, variables, *arguments).shape
    (2, 10, 8)
    """

    config: Pi0Config
    scan: bool = False
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, observation: Observation, noisy_actions: jax.Array, time: jax.Array) -> jax.Array:
        size = self.config.image_size
        check_shapes(self.config, observation, noisy_actions, time, image_shape=(size, size, 3))
        config, dtype = self.config, observation.images.dtype
        prefix = self._prefix(observation)
        suffix, condition = self._suffix(observation, noisy_actions.astype(dtype), time_embedding(config, time).astype(dtype))
        valid, visible = see(config, observation)
        bias = jnp.where(visible[:, None], 0, jnp.finfo(dtype).min).astype(dtype)
        rotation = rotations(jnp.cumsum(valid, axis=1) - 1, config.head_dim, 10000.0, dtype)

        def block(name: str) -> JointLayer:
            return JointLayer(config, self.param_dtype, name=name)

        streams = run_blocks(block, config.depth, (prefix, suffix), rotation, bias, condition, scan=self.scan)
        # Nothing reads the normed prefix, but the published checkpoint has the norm's weight.
        AdaptiveRMSNorm(False, self.param_dtype, name="prefix_norm")(streams[0], None)
        normed, _ = AdaptiveRMSNorm(config.adaptive, self.param_dtype, name="suffix_norm")(streams[1], condition)
        return self._linear(config.action_dim, "action_out_proj")(normed[:, -config.horizon :])

    def _prefix(self, observation: Observation) -> jax.Array:
        """The tokens of all images, then those of the prompt."""
        batch, width = len(observation.images), self.config.widths[0]
        # All cameras at once: each layer of the tower runs once.
        images = observation.images.reshape(-1, *observation.images.shape[2:])
        seen = VisionTower(self.config, self.scan, self.param_dtype, name="vision")(images)
        table = nn.Embed(self.config.vocab_size, width, param_dtype=self.param_dtype, name="embed_tokens")
        words = table(observation.prompt)
        return jnp.concatenate([seen.reshape(batch, -1, width), words * jnp.asarray(width**0.5, words.dtype)], axis=1)

    def _suffix(self, observation: Observation, actions: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """π0: a state token, and actions with the time. π0.5: actions, and the condition of the norms."""
        width = self.config.widths[1]
        actions = self._linear(width, "action_in_proj")(actions)
        if self.config.adaptive:
            hidden = nn.silu(self._linear(width, "time_mlp_in")(time))
            return actions, nn.silu(self._linear(width, "time_mlp_out")(hidden))
        state = self._linear(width, "state_proj")(observation.state.astype(actions.dtype))
        both = jnp.concatenate([actions, jnp.broadcast_to(time[:, None], actions.shape)], axis=-1)
        hidden = nn.silu(self._linear(width, "action_time_mlp_in")(both))
        actions = self._linear(width, "action_time_mlp_out")(hidden)
        return jnp.concatenate([state[:, None], actions], axis=1), None

    def _linear(self, features: int, name: str) -> nn.Dense:
        return nn.Dense(features, param_dtype=self.param_dtype, name=name)


def flow_matching_loss(
    model: nn.Module, params: Any, observation: Observation, actions: jax.Array, noise: jax.Array, time: jax.Array
) -> jax.Array:
    """Return the mean squared error of the velocity at time · noise + (1 − time) · actions; the target is noise − actions."""
    at = time[:, None, None]
    velocity = model.apply({"params": params}, observation, at * noise + (1 - at) * actions, time)
    return jnp.mean(jnp.square(velocity.astype(actions.dtype) - (noise - actions)))


def gated_residual(x: jax.Array, y: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Return x + y · gate; without a gate x + y."""
    return x + y if gate is None else x + y * gate


def time_embedding(config: Pi0Config, time: jax.Array) -> jax.Array:
    """Return sines and cosines of the time, (B,) → (B, width of the expert), periods from 0.004 to 4, in float32 at least.

    >>> [round(float(one), 4) for one in time_embedding(Pi0Config(widths=(64, 4)), jnp.array([0.0005]))[0]]
    [0.7071, 0.0008, 0.7071, 1.0]
    """
    period = MIN_PERIOD * (MAX_PERIOD / MIN_PERIOD) ** np.linspace(0, 1, config.widths[1] // 2)
    angle = exact_angles(time[:, None].astype(wide(time.dtype)), 2 * np.pi / period)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def see(config: Pi0Config, observation: Observation) -> tuple[jax.Array, jax.Array]:
    """Return a mask that is false for padding (B, T), and the tokens that each token attends to (B, T, T).

    A token sees its own block and the blocks before it; padding sees nothing and is not seen. The prefix, the
    state and the actions are one block each.
    """
    images = jnp.repeat(observation.image_mask.astype(bool), config.image_tokens // config.num_images, axis=1)
    suffix = config.horizon + (not config.adaptive)
    present = jnp.ones((len(images), suffix), bool)
    valid = jnp.concatenate([images, observation.prompt_mask.astype(bool), present], axis=1)
    starts = np.zeros(valid.shape[1], int)
    starts[[-suffix, -config.horizon]] = 1
    blocks = np.cumsum(starts)
    return valid, (blocks[None, :] <= blocks[:, None]) & valid[:, None, :] & valid[:, :, None]
