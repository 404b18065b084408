"""The decoder under FSDP2 on two ranks, in every mode: the gradients of one process, of PyTorch and of Flax; half the bytes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import remat_jax as rj
import torch_ref
from examples import pytorch
from examples.models import linen
from examples.models import weights as w
from parity_tests import support as s
from parity_tests.sharded_rank import modes
from tests.test_train_anywhere import free_port

KIND, RANKS = "ByteDecoder", 2
ROOT = Path(__file__).resolve().parents[1]
NAMES = [name for name, _, _ in modes()]
every_mode = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of both processes."""
    folder = tmp_path_factory.mktemp("ranks")
    batch = s.data(KIND)
    model = s.torch_model(KIND)
    given = {"state": model.state_dict(), "sizes": s.SIZES[KIND]}
    given |= {"tokens": torch.tensor(batch.x).long(), "targets": torch.tensor(batch.target).long()}
    torch.save(given, folder / "given.pt")
    with started(folder) as children:
        for child in children:
            assert child.wait(240) == 0, (folder / "log").read_text()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@contextlib.contextmanager
def started(folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run the ranks as processes, which end with the tests."""
    port = str(free_port())
    children: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        try:
            for rank in range(RANKS):
                line = [sys.executable, "-m", "parity_tests.sharded_rank", str(rank), str(RANKS), port, str(folder)]
                children.append(subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=log))
            yield children
        finally:
            for child in children:
                child.kill()
                child.wait()


@pytest.fixture(scope="module")
def expected() -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one process with the whole batch."""
    model, batch = s.make_torch(KIND), s.data(KIND)
    loss = model.loss(torch.tensor(batch.x).long(), torch.tensor(batch.target).long())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(gradients: dict[str, Any], expected: dict[str, Any]) -> float:
    """Norm-wise, relative to the norm of all gradients."""
    assert gradients.keys() == expected.keys()
    pairs = {name: (np.asarray(gradients[name]), np.asarray(expected[name])) for name in expected}
    scale = np.sqrt(sum(np.linalg.norm(right) ** 2 for _, right in pairs.values()))
    return max(float(np.linalg.norm(left - right)) for left, right in pairs.values()) / scale


@every_mode
def test_loss_and_gradients_are_those_of_one_process(
    ranks: list[dict[str, Any]], expected: tuple[float, dict[str, torch.Tensor]], name: str
) -> None:
    loss, gradients = expected
    for result in (rank["sharded"][name] for rank in ranks):
        assert result["loss"].item() / RANKS == pytest.approx(loss, rel=1e-12)
        assert largest_difference(result["whole"], gradients) < 1e-12


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("policy", ["off", "full", "offload_inputs", "dots"])
def test_gradients_are_those_of_flax_under_the_same_policy(ranks: list[dict[str, Any]], policy: str) -> None:
    twin, batch = s.twin(KIND, "linen", True, s.parameters(KIND, True)), s.data(KIND)

    def loss(parameters: Any, tokens: Any, targets: Any) -> jax.Array:
        return twin.apply(parameters, tokens, targets, method="loss")

    under = loss if policy == "off" else rj.checkpoint_blocks(loss, {linen.DecoderLayer: policy})
    value, gradients = s.run(jax.value_and_grad(under), twin.parameters, *batch)
    result = ranks[0]["sharded"][policy]
    assert result["loss"].item() / RANKS == pytest.approx(float(value), rel=1e-10)
    assert largest_difference(result["whole"], w.gradients_to_torch(gradients, KIND)) < 1e-10


@every_mode
def test_each_rank_keeps_half_of_parameters_and_gradients(ranks: list[dict[str, Any]], name: str) -> None:
    whole = sum(parameter.nbytes for parameter in s.torch_model(KIND).parameters())
    for rank in ranks:
        sizes = rank["sharded"][name]["bytes"]
        assert sizes["parameters"] == sizes["gradients"] == whole / RANKS
        assert sizes["blocks"] == ("decoder.layers.0", "decoder.layers.1")


@every_mode
def test_each_rank_runs_and_keeps_what_it_would_without_fsdp(ranks: list[dict[str, Any]], name: str) -> None:
    """For its own rows: every checkpointed block twice, the same products, kept bytes, and bytes on the host."""
    executions = 1 if name in ("off", "flags off") else 2
    for rank in ranks:
        result, alone = rank["sharded"][name], rank["alone"][name]
        assert result["calls"] == [executions * s.LAYERS, s.LAYERS]
        for figure in ("calls", "matmuls", "on_host", "brought_back", "saved"):
            assert result[figure] == alone[figure], figure
        is_offload = "offload" in name
        assert (result["on_host"] > 0) == is_offload and result["saved"][1] == result["on_host"] == result["brought_back"]
    inputs = s.data(KIND).x.size // RANKS * s.SIZES[KIND]["d_model"] * 8 * s.LAYERS
    assert [ranks[0]["sharded"][name]["on_host"] for name in ("flags offload", "offload_inputs")] == [inputs, inputs]


def test_a_policy_around_a_sharded_block_is_refused(ranks: list[dict[str, Any]]) -> None:
    """The arrays that FSDP gathers would be part of the block, and the recomputation would not gather them again."""
    assert {rank["refused"].startswith("the recomputation of FSDPDecoderLayer computes") for rank in ranks} == {True}
    assert "where its forward pass computed :all_gather_copy_in#0" in ranks[0]["refused"]


def test_what_cannot_be_sharded_is_told() -> None:
    model = pytorch.DecoderStack(num_layers=2, d_model=8, nhead=2)
    with pytest.raises(torch_ref.InvalidArgumentError, match="mesh is a int, expected a DeviceMesh"):
        torch_ref.shard_blocks(model, 2)
    wrong: dict[str, tuple[Any, dict[str, Any]]] = {
        "model is a Linear without blocks, expected a list of two": (nn.Linear(2, 2), {}),
        "model is a function, expected a module": (alone_in_a_group, {}),
        "fulll": (model, {"policy": "fulll"}),
        "blocks is 'DecoderLayer', expected a class of modules": (model, {"blocks": "DecoderLayer"}),
    }
    with alone_in_a_group() as mesh:
        for message, (given, options) in wrong.items():
            with pytest.raises(torch_ref.TorchRefError, match=message):
                torch_ref.shard_blocks(given, mesh, **options)
        sharded = torch_ref.shard_blocks(model, mesh, blocks=nn.Linear)
        assert "layers.1.ffn.2" in sharded.blocks and sharded.policies is None
        with pytest.raises(torch_ref.InvalidArgumentError, match="layers.0.self_attn.in_proj_weight and 23 other parameters"):
            sharded.gradients()
        with pytest.raises(torch_ref.InvalidArgumentError, match="model is sharded already at 'its root'"):
            torch_ref.shard_blocks(model, mesh)


def test_frozen_parameters_have_no_gradients_to_wait_for() -> None:
    model = nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    assert list(torch_ref.sharded.ShardedModel(model, None, ()).gradients()) == ["bias"]


@contextlib.contextmanager
def alone_in_a_group() -> Iterator[Any]:
    from torch import distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()
