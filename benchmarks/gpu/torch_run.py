"""One row of PyTorch: `python -m benchmarks.gpu.torch_run JOB` trains the same decoder and prints one line of JSON."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from flax.traverse_util import unflatten_dict

import torch_ref
from benchmarks.gpu.child import answer_with
from benchmarks.gpu.gradients import compare_and_keep
from benchmarks.gpu.job import ADAM, MICRO_BATCHES, Job, load_arrays
from examples import pytorch
from examples.models import weights


def run(job: Job) -> dict[str, Any]:
    """Train and measure one mode; returns the fields of its row. Offload is `torch_ref`'s, pinned and asynchronous on CUDA."""
    model = load_model(job)
    betas = (ADAM["b1"], ADAM["b2"])
    options = {"lr": ADAM["learning_rate"], "betas": betas, "eps": ADAM["eps"]}
    optimizer: torch.optim.Optimizer
    if job.variant == "host_optimizer":
        optimizer = pytorch.HybridOptimizer(model.parameters(), torch.optim.Adam, **options)
    else:
        optimizer = torch.optim.Adam(model.parameters(), **options, fused=job.device == "cuda")
    flags = torch_ref.mode_flags(job.policy) if job.policy in torch_ref.MODES else {}
    if not flags:
        torch_ref.checkpoint_blocks(model, {pytorch.DecoderLayer: job.policy})

    def summed(tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, int]:
        logits = model(tokens, **flags)
        wide = logits if job.size.dtype == "float64" else logits.float()  # as in the Flax model's loss
        return F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()

    parts = MICRO_BATCHES if job.variant == "accumulate" else 1
    batches = [tuple(torch.tensor(x, dtype=torch.long, device=job.device) for x in batch) for batch in job.batches()]
    losses, gradients, started = [], None, 0.0
    for index, (tokens, targets) in enumerate(batches):
        if index <= job.warm_up:
            # As in `jax_run`: only the last of the timed steps is waited for.
            synchronize(job)
            started = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        micro_batches = list(zip(tokens.chunk(parts), targets.chunk(parts), strict=True))
        if parts > 1:
            loss = pytorch.accumulate_gradients(summed, micro_batches, model.parameters()).loss
        else:
            total, count = summed(tokens, targets)
            (total / count).backward()
            loss = (total / count).detach()
            del total
        if gradients is None:
            gradients = {name: weights.as_numpy(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss)
    synchronize(job)
    seconds = (time.perf_counter() - started) / job.steps
    fields = {
        "measured_peak_bytes": torch.cuda.max_memory_allocated() if job.device == "cuda" else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": [seconds],
        "losses": [float(loss) for loss in losses],
    }
    assert gradients is not None
    return fields | compare_and_keep(job, weights.flatten(weights.gradients_from_torch(gradients, "ByteDecoder")))


def load_model(job: Job) -> pytorch.ByteDecoder:
    """The decoder with the shared weights; PyTorch's own initialisation is skipped."""
    size = job.size
    with torch.device("meta"):
        model = pytorch.ByteDecoder(d_model=size.d_model, nhead=size.heads, num_layers=size.layers, max_len=size.length)
    model = model.to(getattr(torch, size.dtype)).to_empty(device=job.device)
    flat = load_arrays(Path(job.folder, "weights.npz"), size.dtype)
    arrays = weights.gradients_to_torch(unflatten_dict(flat, sep="/"), "ByteDecoder")
    model.load_state_dict({name: as_tensor(array) for name, array in arrays.items()})
    return model


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor of a NumPy array, also of bfloat16, which PyTorch cannot read from NumPy."""
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def synchronize(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    answer_with(run)
