"""Pairs of kinds that transformers has no Flax classes for: LoRA, experts, a UNet, Mamba, recurrent nets.

Each is written in the habits of its framework: PyTorch's with the names of public models, Flax's as Linen modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

RANDOM = np.random.default_rng(1)
SERIES = RANDOM.normal(size=(2, 6, 8)).astype(np.float32)
IMAGES = RANDOM.normal(size=(2, 3, 8, 8)).astype(np.float32)
TIMES = np.array([3.0, 40.0], np.float32)
WIDTH, HIDDEN, RANK, EXPERTS, STATES, TAPS, CHANNELS = 8, 12, 3, 4, 5, 4, 8


class Stack(torch.nn.Module):
    """Two layers, each with a norm before it and a residual connection around it."""

    def __init__(self, layer: Callable[[], torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Residual(layer()) for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Residual(torch.nn.Module):
    def __init__(self, mixer: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = torch.nn.LayerNorm(WIDTH), mixer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixer(self.norm(x))


class ResidualFlax(nn.Module):
    mixer: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return x + self.mixer(name="mixer")(nn.LayerNorm(epsilon=1e-5, name="norm")(x))


class StackFlax(nn.Module):
    mixer: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index in range(2):
            x = ResidualFlax(self.mixer, name=f"layers_{index}")(x)
        return nn.LayerNorm(epsilon=1e-5, name="norm")(x)


# Attention whose queries and values have LoRA adapters.


class LoraLinear(torch.nn.Module):
    """A frozen layer with a trained adapter, with the names of PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_A = torch.nn.Linear(WIDTH, RANK, bias=False)
        self.lora_B = torch.nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = LoraLinear(), LoraLinear()
        self.k_proj, self.o_proj = (torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part(x).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class LoraDense(nn.Module):
    scale: float = 2.0

    @nn.compact
    def __call__(self, x: Any) -> Any:
        down = self.param("lora_a", nn.initializers.lecun_normal(), (WIDTH, RANK))
        up = self.param("lora_b", nn.initializers.zeros, (RANK, WIDTH))
        return nn.Dense(WIDTH, name="base_layer")(x) + self.scale * (x @ down @ up)


class AttentionFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        parts = LoraDense(name="q_proj")(x), nn.Dense(WIDTH, name="k_proj")(x), LoraDense(name="v_proj")(x)
        query, key, value = (part.reshape(*x.shape[:2], 2, -1) for part in parts)
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        return nn.Dense(WIDTH, name="o_proj")(nn.dot_product_attention(query, key, value, mask=mask).reshape(x.shape))


# Two of four experts for each token, as in Mixtral; Flax stacks the experts' weights.


class Expert(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (torch.nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.w2 = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, rank = torch.where(chosen == index)
            y = y.index_add(0, rows, expert(tokens[rows]) * weights[rows, rank, None])
        return y.view_as(x)


class ExpertFlax(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        hidden = nn.silu(nn.Dense(HIDDEN, use_bias=False, name="w1")(x)) * nn.Dense(HIDDEN, use_bias=False, name="w3")(x)
        return nn.Dense(WIDTH, use_bias=False, name="w2")(hidden)


class MixtureFlax(nn.Module):
    chosen: int = 2
    normalises: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shares = nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x))
        weights, chosen = jax.lax.top_k(shares, self.chosen)
        weights = weights / weights.sum(-1, keepdims=True) if self.normalises else weights
        each = (weights[..., None] * jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype)).sum(-2)
        experts = nn.vmap(ExpertFlax, {"params": 0}, {"params": True}, in_axes=None, out_axes=-2, axis_size=EXPERTS)
        return jnp.einsum("bte,bted->btd", each, experts(name="experts")(x))


# A selective state space layer, as in Mamba.


class Mamba(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = torch.nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.conv1d = torch.nn.Conv1d(HIDDEN, HIDDEN, TAPS, padding=TAPS - 1, groups=HIDDEN)
        self.x_proj = torch.nn.Linear(HIDDEN, RANK + 2 * STATES, bias=False)
        self.dt_proj = torch.nn.Linear(RANK, HIDDEN)
        self.A_log = torch.nn.Parameter(torch.arange(1.0, STATES + 1).repeat(HIDDEN, 1).log())
        self.D = torch.nn.Parameter(torch.ones(HIDDEN))
        self.out_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.in_proj(x).chunk(2, -1)
        x = F.silu(self.conv1d(x.mT)[..., : x.shape[1]].mT)
        step, into, out = self.x_proj(x).split((RANK, STATES, STATES), -1)
        step = F.softplus(self.dt_proj(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.A_log))
        given = (step * x)[..., None] * into[:, :, None]
        state, made = torch.zeros_like(given[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + given[:, t]
            made.append((state * out[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(made, 1) + x * self.D) * F.silu(gate))


class MambaFlax(nn.Module):
    padding: Any = ((TAPS - 1, 0),)
    positive: Callable[[Any], Any] = nn.softplus

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x, gate = jnp.split(nn.Dense(2 * HIDDEN, use_bias=False, name="in_proj")(x), 2, -1)
        conv = nn.Conv(HIDDEN, (TAPS,), padding=self.padding, feature_group_count=HIDDEN, name="conv1d")
        x = nn.silu(conv(x))
        made = nn.Dense(RANK + 2 * STATES, use_bias=False, name="x_proj")(x)
        step, into, out = jnp.split(made, (RANK, RANK + STATES), -1)
        step = self.positive(nn.Dense(HIDDEN, name="dt_proj")(step))
        rates = self.param("A_log", lambda key: jnp.log(jnp.tile(jnp.arange(1.0, STATES + 1), (HIDDEN, 1))))
        decay = jnp.exp(step[..., None] * -jnp.exp(rates))
        given = (step * x)[..., None] * into[:, :, None]

        def pair(first: Any, second: Any) -> Any:
            return first[0] * second[0], second[0] * first[1] + second[1]

        _, states = jax.lax.associative_scan(pair, (decay, given), axis=1)
        y = jnp.einsum("btds,bts->btd", states, out) + x * self.param("D", nn.initializers.ones, (HIDDEN,))
        return nn.Dense(WIDTH, use_bias=False, name="out_proj")(y * nn.silu(gate))


# A UNet with a time embedding, as in diffusion models; Flax has the channels last.


class Block(torch.nn.Module):
    def __init__(self, read: int, made: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.GroupNorm(2, read), torch.nn.GroupNorm(2, made)
        self.conv1 = torch.nn.Conv2d(read, made, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(made, made, 3, padding=1)
        self.time_emb_proj = torch.nn.Linear(CHANNELS, made)
        self.shortcut = torch.nn.Conv2d(read, made, 1) if read != made else torch.nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(time)[..., None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class UNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_embedding = torch.nn.Sequential(
            torch.nn.Linear(6, CHANNELS), torch.nn.SiLU(), torch.nn.Linear(CHANNELS, CHANNELS)
        )
        self.conv_in = torch.nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.down_block = Block(CHANNELS, CHANNELS)
        self.downsample = torch.nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.mid_block = Block(CHANNELS, 2 * CHANNELS)
        self.upsample = torch.nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 2, stride=2)
        self.up_block = Block(2 * CHANNELS, CHANNELS)
        self.conv_out = torch.nn.Conv2d(CHANNELS, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time[:, None] * 100.0 ** -(torch.arange(3, dtype=x.dtype) / 3)
        time = self.time_embedding(torch.cat((angles.sin(), angles.cos()), -1))
        skip = self.down_block(self.conv_in(x), time)
        x = self.upsample(self.mid_block(self.downsample(skip), time))
        return self.conv_out(self.up_block(torch.cat((x, skip), 1), time))


class BlockFlax(nn.Module):
    made: int
    groups: int = 2

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        conv = functools.partial(nn.Conv, self.made, padding=1)
        y = conv((3, 3), name="conv1")(nn.silu(nn.GroupNorm(self.groups, epsilon=1e-5, name="norm1")(x)))
        y = y + nn.Dense(self.made, name="time_emb_proj")(time)[:, None, None]
        y = conv((3, 3), name="conv2")(nn.silu(nn.GroupNorm(self.groups, epsilon=1e-5, name="norm2")(y)))
        return y + (x if x.shape[-1] == self.made else nn.Conv(self.made, (1, 1), name="shortcut")(x))


class UNetFlax(nn.Module):
    skips: bool = True

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        angles = time[:, None] * 100.0 ** -(jnp.arange(3, dtype=x.dtype) / 3)
        time = nn.Dense(CHANNELS, name="time_embedding_0")(jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1))
        time = nn.Dense(CHANNELS, name="time_embedding_2")(nn.silu(time))
        first = nn.Conv(CHANNELS, (3, 3), padding=1, name="conv_in")(x)
        skip = BlockFlax(CHANNELS, name="down_block")(first, time)
        x = nn.Conv(CHANNELS, (3, 3), strides=2, padding=1, name="downsample")(skip)
        x = BlockFlax(2 * CHANNELS, name="mid_block")(x, time)
        x = nn.ConvTranspose(CHANNELS, (2, 2), strides=(2, 2), padding="VALID", name="upsample")(x)
        x = BlockFlax(CHANNELS, name="up_block")(jnp.concatenate((x, skip if self.skips else first), -1), time)
        return nn.Conv(3, (3, 3), padding=1, name="conv_out")(x)


# Recurrent nets.


class Recurrent(torch.nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.rnn = getattr(torch.nn, kind)(WIDTH, HIDDEN, batch_first=True, **options)
        self.hidden = torch.nn.Linear(HIDDEN * (1 + self.rnn.bidirectional), WIDTH)
        self.gate, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.hidden(self.rnn(x)[0])
        return self.head(y * self.gate(x).sigmoid())


class RecurrentFlax(nn.Module):
    cell: Any
    layers: int = 1
    both: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = x
        for _ in range(self.layers):
            layer = nn.RNN(self.cell(HIDDEN))
            y = nn.Bidirectional(layer, nn.RNN(self.cell(HIDDEN)))(y) if self.both else layer(y)
        y = nn.Dense(WIDTH, name="hidden")(y)
        return nn.Dense(3, name="head")(y * nn.sigmoid(nn.Dense(WIDTH, name="gate")(x)))


Models = tuple[Callable[[], torch.nn.Module], nn.Module, dict[str, np.ndarray]]
OWN: dict[str, Models] = {
    "lora": (lambda: Stack(Attention), StackFlax(AttentionFlax), {"x": SERIES}),
    "experts": (lambda: Stack(Mixture), StackFlax(MixtureFlax), {"x": SERIES}),
    "mamba": (lambda: Stack(Mamba), StackFlax(MambaFlax), {"x": SERIES}),
    "unet": (UNet, UNetFlax(), {"x": IMAGES, "time": TIMES}),
    "lstm": (lambda: Recurrent("LSTM", num_layers=2), RecurrentFlax(nn.OptimizedLSTMCell, 2), {"x": SERIES}),
    "gru": (lambda: Recurrent("GRU", bidirectional=True), RecurrentFlax(nn.GRUCell, both=True), {"x": SERIES}),
}


def make(name: str) -> dict[str, Any]:
    """The arguments of `compare` for a pair."""
    theirs, ours, inputs = OWN[name]

    def torch_module() -> torch.nn.Module:
        torch.manual_seed(0)
        return theirs().eval()

    def flax_call(model: Any, **inputs: Any) -> Any:
        """Flax's images have the channels last."""
        x = inputs["x"]
        return model(**inputs) if x.ndim < 4 else jnp.moveaxis(model(**inputs | {"x": jnp.moveaxis(x, 1, -1)}), -1, 1)

    return {"torch_module": torch_module, "flax_module": ours, "inputs": inputs, "flax_call": flax_call}
