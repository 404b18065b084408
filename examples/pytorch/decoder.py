"""A post-norm transformer: one layer, a stack of them, and a language model over bytes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from torch_ref.checkpoint import gradient_checkpoint_forward
from torch_ref.errors import InvalidArgumentError


class ExplicitMultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` for self-attention, in plain matrix multiplications.

    Parameters, names and results are the same. PyTorch's fused attention is an opaque operator; here both of its products
    are `bmm`, so that they can be counted and their operands are visible residuals.

    >>> layer, x = ExplicitMultiheadAttention(8, 2), torch.ones(3, 1, 8)
    >>> torch.allclose(layer(x), nn.MultiheadAttention.forward(layer, x, x, x)[0], atol=1e-6)
    True
    """

    def forward(self, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Attend within `x` of shape (time, batch, d_model); with `causal` only to the past and the present."""
        time, batch, d_model = x.shape
        heads = (time, batch * self.num_heads, self.head_dim)
        packed = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (part.reshape(heads).transpose(0, 1) for part in packed.chunk(3, dim=-1))
        scores = torch.bmm(q * math.sqrt(1.0 / self.head_dim), k.transpose(1, 2))
        if causal:
            future = torch.full((time, time), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
            scores = scores + future
        weights = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        mixed = torch.bmm(weights, v).transpose(0, 1).reshape(time, batch, d_model)
        return self.out_proj(mixed)


class DecoderLayer(nn.Module):
    """Self-attention and a ReLU feed-forward network of four times the width, each with a norm after it (post-norm).

    Input and output have shape (batch, time, d_model). With `explicit_attention=False` the attention is
    `nn.MultiheadAttention` itself; parameters and results are the same.

    Raises:
        InvalidArgumentError: if `d_model` is not a multiple of `nhead`.

    >>> DecoderLayer(d_model=8, nhead=2)(torch.zeros(3, 5, 8)).shape
    torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        *,
        dropout: float = 0.0,
        causal: bool = False,
        explicit_attention: bool = True,
    ) -> None:
        super().__init__()
        if nhead < 1 or d_model % nhead:
            raise InvalidArgumentError(f"nhead is {nhead}, expected a divisor of d_model, which is {d_model}.")
        attention = ExplicitMultiheadAttention if explicit_attention else nn.MultiheadAttention
        self.self_attn = attention(d_model, nhead, dropout=dropout)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_model * 4), nn.ReLU(), nn.Linear(d_model * 4, d_model))
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the layer for `x` of shape (batch, time, d_model)."""
        attended = self._attend(x.transpose(0, 1)).transpose(0, 1)
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.dropout(self.ffn(x)))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.self_attn, ExplicitMultiheadAttention):
            return self.self_attn(x, causal=self.causal)
        mask = None
        if self.causal:
            mask = torch.full((len(x), len(x)), -math.inf, dtype=x.dtype, device=x.device).triu(1)
        return self.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0]


class ToyModel(nn.Module):
    """A single sigmoid.

    >>> ToyModel()(torch.zeros(1)).item()
    0.5
    """

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the sigmoid to a tensor of any shape."""
        return self.activation(x)


class DecoderStack(nn.Module):
    """`num_layers` decoder layers, each a block that is called by keyword.

    Parameters are named `layers.N.…`; the keyword options are those of `DecoderLayer`.

    >>> stack = DecoderStack(num_layers=2, d_model=8, nhead=2)
    >>> stack(torch.zeros(3, 5, 8), use_gradient_checkpointing=True).shape
    torch.Size([3, 5, 8])
    """

    def __init__(
        self,
        num_layers: int,
        d_model: int = 512,
        nhead: int = 8,
        *,
        dropout: float = 0.0,
        causal: bool = False,
        explicit_attention: bool = True,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise InvalidArgumentError(f"num_layers is {num_layers}, expected at least 1.")
        self.layers = nn.ModuleList(
            DecoderLayer(d_model, nhead, dropout=dropout, causal=causal, explicit_attention=explicit_attention)
            for _ in range(num_layers)
        )

    def forward(
        self,
        x: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """Run all layers on `x` of shape (batch, time, d_model), each in the mode that the flags select."""
        for layer in self.layers:
            x = gradient_checkpoint_forward(
                layer,
                use_gradient_checkpointing=use_gradient_checkpointing,
                use_gradient_checkpointing_offload=use_gradient_checkpointing_offload,
                x=x,
            )
        return x


class ByteDecoder(nn.Module):
    """A causal language model over bytes: embedding and learned positions, decoder layers, a linear head.

    The layers are post-norm, so there is no final norm. Parameters: `embedding.weight` (vocab, d_model),
    `position.weight` (max_len, d_model), `decoder.layers.N.…`, `head.weight` (vocab, d_model), `head.bias`.

    >>> model = ByteDecoder(d_model=8, nhead=2, num_layers=1, max_len=16)
    >>> model(torch.zeros(3, 5, dtype=torch.long)).shape
    torch.Size([3, 5, 256])
    """

    def __init__(
        self,
        vocab: int = 256,
        d_model: int = 128,
        nhead: int = 4,
        num_layers: int = 4,
        max_len: int = 128,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, d_model)
        self.position = nn.Embedding(max_len, d_model)
        self.decoder = DecoderStack(num_layers, d_model, nhead, dropout=dropout, causal=True)
        self.head = nn.Linear(d_model, vocab)

    def forward(
        self,
        tokens: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """Compute the logits (batch, time, vocab) of the next byte for `tokens`, integers of shape (batch, time).

        Raises:
            InvalidArgumentError: if `tokens` has another rank or type, or is longer than `max_len`.
        """
        self._check(tokens)
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.decoder(x, use_gradient_checkpointing, use_gradient_checkpointing_offload))

    def loss(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        use_gradient_checkpointing: bool = False,
        use_gradient_checkpointing_offload: bool = False,
    ) -> torch.Tensor:
        """Compute the mean cross entropy of `targets`, integers of the shape of `tokens`, in nats."""
        if targets.shape != tokens.shape:
            raise InvalidArgumentError(
                f"targets has shape {tuple(targets.shape)}, expected that of tokens, {tuple(tokens.shape)}."
            )
        logits = self(tokens, use_gradient_checkpointing, use_gradient_checkpointing_offload)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _check(self, tokens: torch.Tensor) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise InvalidArgumentError(
                f"tokens is {tokens.dtype} of shape {tuple(tokens.shape)}, expected integers of shape (batch, time)."
            )
        if tokens.shape[1] > self.position.num_embeddings:
            raise InvalidArgumentError(
                f"tokens has {tokens.shape[1]} positions, expected at most max_len, {self.position.num_embeddings}."
            )
