"""What PyTorch keeps and recomputes under an `activation_memory_budget`: AOTAutograd's partitioned graphs, on fake tensors.

    python -m benchmarks.torch_budgets '{"layers": 8, "d_model": 128, "heads": 4, "length": 64, "batch": 16}' 0 0.5 1

prints JSON. Nothing is compiled or allocated, and no GPU is needed. The decompositions are those of `torch.compile`, so that
the partitioner sees the same graph as in `torch.compile`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from examples import pytorch
from torch_ref.executions import MATMULS, Matmul

KNAPSACK = {"activation_memory_budget_runtime_estimator": "flops", "activation_memory_budget_solver": "dp"}
"""PyTorch's defaults: an operation costs its FLOPs, and dynamic programming solves the knapsack."""


class Training(torch.nn.Module):
    """The loss of the decoder, as one module."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.model = pytorch.ByteDecoder(
            d_model=sizes["d_model"], nhead=sizes["heads"], num_layers=sizes["layers"], max_len=sizes["length"]
        )

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy."""
        return self.model.loss(tokens, targets)


def at_budgets(sizes: Mapping[str, int], budgets: Sequence[float]) -> list[dict[str, Any]]:
    """For each budget: the bytes saved for backward, and the matrix products' FLOPs, recomputed and in the plain step."""
    rows: list[dict[str, Any]] = []

    def cut(joint: Any, arguments: Any, **options: Any) -> Any:
        plain, graphs = matmul_flops(joint), None
        for budget in budgets:
            with config.patch(activation_memory_budget=budget, **KNAPSACK):
                # The partitioner changes its input graph.
                given = copy.deepcopy(joint)
                graphs = min_cut_rematerialization_partition(given, arguments, compiler="inductor", **options)
            again = sum(map(matmul_flops, graphs)) - plain
            saved = saved_bytes(graphs[0], options["num_fwd_outputs"])
            rows.append({"budget": budget, "saved_bytes": saved, "again_flops": again, "step_flops": plain})
        return graphs

    with FakeTensorMode():
        module, shape = Training(sizes), (sizes["batch"], sizes["length"])
        tokens, targets = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        traced = aot_function(
            lambda parameters, *batch: functional_call(module, parameters, batch),
            fw_compiler=_as_it_is,
            bw_compiler=_as_it_is,
            partition_fn=cut,
            decompositions=select_decomp_table(),
        )
        traced(dict(module.named_parameters()), tokens, targets)
    return rows


def _as_it_is(graph: Any, arguments: Any) -> Any:
    def run(given: list[Any]) -> Any:
        return graph(*given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def matmul_flops(module: Any) -> int:
    """The FLOPs of the matrix products in a graph."""
    total = 0
    for node in module.graph.nodes:
        if node.target in MATMULS:
            name, first = MATMULS[node.target]
            left, right = (tuple(node.args[place].meta["val"].shape) for place in (first, first + 1))
            total += Matmul(name, left, right).flops
    return total


def saved_bytes(forward: Any, outputs: int) -> int:
    """The bytes that the forward graph saves for the backward graph: its results after the first `outputs`, without inputs.

    Several views of one array count once. If they show only a part of the array, only the part counts. This favours PyTorch,
    where a view keeps the whole array alive.
    """
    nodes = list(forward.graph.nodes)
    given = {_storage(node.meta["val"]) for node in nodes if node.op == "placeholder"}
    whole: dict[int, int] = {}
    parts: dict[int, int] = {}
    for node in nodes[-1].args[0][outputs:]:
        tensor = node.meta["val"]
        storage = _storage(tensor)
        if storage not in given:
            whole[storage] = tensor.untyped_storage().nbytes()
            parts[storage] = parts.get(storage, 0) + tensor.numel() * tensor.element_size()
    return sum(min(size, parts[storage]) for storage, size in whole.items())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


if __name__ == "__main__":
    print(json.dumps(at_budgets(json.loads(sys.argv[1]), [float(budget) for budget in sys.argv[2:]])))
