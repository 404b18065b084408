"""One rank of `test_sharded`, in its own process: the decoder under FSDP2 in every mode. It does not use JAX.

python -m parity_tests.sharded_rank RANK RANKS PORT FOLDER
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_ref
from examples import pytorch

# Under the model's own flags, gradient_checkpoint_forward wraps each sharded block; a policy applies inside it.
FLAGS = torch_ref.MODES
POLICIES = ("off", "full", "offload_inputs", "dots", "offload: *ffn*:dot_general*; save: @dots")


def modes() -> list[tuple[str, str, str]]:
    """A name, a policy and the flags' mode, one of which is `off`."""
    return [(f"flags {mode}", "off", mode) for mode in FLAGS] + [(policy, policy, "off") for policy in POLICIES]


def measured(run: Callable[[], torch.Tensor], blocks: Any) -> dict[str, Any]:
    """The loss of one step with its backward pass, and its executions, copies and kept bytes."""
    saved = torch_ref.saved_for_backward(run)
    with torch_ref.count_calls(*blocks) as calls, torch_ref.count_matmuls() as matmuls, torch_ref.receipt() as receipt:
        loss = run()
        loss.backward()
    return {
        "loss": loss.detach(),
        "calls": [calls.total, len(blocks)],
        "matmuls": matmuls.total,
        "on_host": receipt.bytes_on_host,
        "brought_back": receipt.bytes_brought_back,
        "saved": (saved.device_bytes, saved.host_bytes),
    }


def in_mode(given: dict[str, Any], mesh: DeviceMesh, rows: slice, policy: str, mode: str) -> dict[str, Any]:
    """This rank's figures, and the whole gradients."""
    model = made(given)
    sharded = torch_ref.shard_blocks(model, mesh, policy)
    flags = torch_ref.mode_flags(mode)
    figures = measured(lambda: model.loss(given["tokens"][rows], given["targets"][rows], **flags), model.decoder.layers)
    dist.all_reduce(figures["loss"])  # gloo supports only sums
    bytes_here = {"parameters": sharded.parameter_bytes, "gradients": sharded.gradient_bytes, "blocks": sharded.blocks}
    return figures | {"bytes": bytes_here, "whole": sharded.gradients()}


def made(given: dict[str, Any]) -> pytorch.ByteDecoder:
    model = pytorch.ByteDecoder(**given["sizes"]).double()
    model.load_state_dict(given["state"])
    return model


def refused(given: dict[str, Any], mesh: DeviceMesh) -> str:
    """The error of a policy around a sharded block; a policy must be inside."""
    stack = pytorch.DecoderStack(2, given["sizes"]["d_model"], given["sizes"]["nhead"]).double()
    torch_ref.shard_blocks(stack, mesh)
    x = torch.ones(1, 3, given["sizes"]["d_model"], dtype=torch.float64, requires_grad=True)
    try:
        torch_ref.selective_checkpoint(stack.layers[0], "dots", x).sum().backward()
    except torch_ref.ChangedRecomputationError as error:
        return str(error)
    return "nothing"


def main(rank: int, ranks: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    # Counting kept arrays collects garbage, which takes long if much is imported.
    gc.freeze()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    given = torch.load(folder / "given.pt")
    mesh = init_device_mesh("cpu", (ranks,))
    share = len(given["tokens"]) // ranks
    rows = slice(rank * share, (rank + 1) * share)
    results = {name: in_mode(given, mesh, rows, policy, mode) for name, policy, mode in modes()}
    # The same rows without FSDP: kept arrays and executions must be the same.
    alone = {}
    for name, policy, mode in modes():
        model, flags = made(given), torch_ref.mode_flags(mode)
        if policy != "off":
            torch_ref.gradient_checkpointing_enable(model, policy)
        alone[name] = measured(
            lambda model=model, flags=flags: model.loss(given["tokens"][rows], given["targets"][rows], **flags),
            model.decoder.layers,
        )
    torch.save({"sharded": results, "alone": alone, "refused": refused(given, mesh)}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
