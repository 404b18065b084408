"""The models of the reference against PyTorch's own layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples import pytorch
from parity_tests.reference.blocks import gradients


@pytest.mark.parametrize("causal", [False, True])
def test_explicit_attention_is_that_of_pytorch(causal):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 4).double()
    ours = pytorch.ExplicitMultiheadAttention(24, 4).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(7, 3, 24, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected = gradients(lambda x: theirs(x, x, x, attn_mask=mask)[0], theirs, x)
    grads = gradients(lambda x: ours(x, causal=causal), ours, x)
    scale = max(t.norm().item() for t in expected)
    assert max((a - b).norm().item() for a, b in zip(grads, expected, strict=True)) < 1e-14 * scale
    expected_output, output = theirs(x, x, x, attn_mask=mask)[0], ours(x, causal=causal)
    assert (output - expected_output).norm() < 1e-14 * expected_output.norm()
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]


def test_the_layer_is_pytorchs_own_post_norm_layer():
    torch.manual_seed(6)
    ours = pytorch.DecoderLayer(16, 4).double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs = nn.TransformerEncoderLayer(16, 4, 64, dropout=0.0, batch_first=True, norm_first=False).double()
    names = {"ffn.0": "linear1", "ffn.2": "linear2"}
    weights = {names.get(n[:5], n[:5]) + n[5:]: value for n, value in ours.state_dict().items()}
    theirs.load_state_dict(weights, strict=True)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert (ours(x) - theirs(x)).norm() < 1e-14 * theirs(x).norm()
