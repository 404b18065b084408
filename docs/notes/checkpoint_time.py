"""What checkpointing costs in time, on this project's PyTorch models: `python docs/notes/checkpoint_time.py`.

Tutorials say "15 to 30 % slower". A plain step runs the matmuls of the forward pass, and twice as many in the backward pass.
Checkpointing runs the forward matmuls once more: 4/3 of the FLOPs, for any model. It also repeats elementwise operators, and
saves some time because it keeps less. Plain and checkpointed steps alternate; each ratio is of two consecutive steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import torch_ref
from examples import pytorch
from remat_jax.report.tables import render, table

ROUNDS = 15
BLOCKS = (pytorch.DecoderLayer, pytorch.MlpLayer, pytorch.JointLayer)
Step = Callable[[], torch.Tensor]


def models() -> dict[str, tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
    """Name → a model and the inputs of one step."""
    torch.manual_seed(0)
    return {
        "ByteDecoder 4×128, 16×64": (pytorch.ByteDecoder(num_layers=4), (torch.randint(256, (16, 64)),)),
        "DecoderStack 4×256, 8×128": (pytorch.DecoderStack(4, 256, 4), (torch.randn(8, 128, 256),)),
        "DecoderStack 2×512, 4×256": (pytorch.DecoderStack(2, 512, 8), (torch.randn(4, 256, 512),)),
        "DeepMLP 16×512, 256": (pytorch.DeepMLP(16, 512), (torch.randn(256, 1024),)),
        "JointDecoder 6×(128, 64)": (
            pytorch.JointDecoder(6, widths=(128, 64), heads=4),
            (torch.randn(8, 128, 48), torch.randn(8, 50, 8)),
        ),
    }


def measure(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[float, list[float]]:
    """The ratio of matmul FLOPs, checkpointed to plain, and the ratio of times in each round."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    flops: dict[bool, int] = {}
    for round_number in range(ROUNDS + 1):
        for checkpointed in (False, True):
            if checkpointed:
                torch_ref.gradient_checkpointing_enable(model, blocks=tuple({type(m) for m in model.modules()} & set(BLOCKS)))
            with torch_ref.count_matmuls() as count:
                step(model, inputs) if round_number == 0 else None
            started = time.perf_counter()
            step(model, inputs)
            seconds[checkpointed].append(time.perf_counter() - started)
            flops[checkpointed] = flops.get(checkpointed) or count.flops
            torch_ref.gradient_checkpointing_disable(model)
    pairs = zip(seconds[True][1:], seconds[False][1:], strict=True)
    return flops[True] / flops[False], [slow / fast for slow, fast in pairs]


def step(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    model(*inputs).square().mean().backward()


def main() -> None:
    """Print the table."""
    rows = []
    for name, (model, inputs) in models().items():
        flops, ratios = measure(model, inputs)
        low, _, high = statistics.quantiles(ratios, n=4)
        rows.append((name, f"{flops:.3f}×", f"{statistics.median(ratios):.2f}×", f"{low:.2f} to {high:.2f}"))
    columns = ("model", "matmul FLOPs", "time, median", "time, middle half")
    print(render(table(f"a step with every block checkpointed, relative to plain ({ROUNDS} rounds)", columns, rows)))


if __name__ == "__main__":
    main()
