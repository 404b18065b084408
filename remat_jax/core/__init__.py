"""Blocks under a policy: `block.py` wraps the linearisation of each block in a checkpoint, which selects residuals by name.

The modules, in reading order:

- `walk`: evaluates a jaxpr with some equations replaced, and finds the jaxprs inside equations.
- `flow`: propagates a boolean property of values through a jaxpr.
- `matmuls`: matmuls and convolutions: their primitives, their floating-point operations, their batch dimensions.
- `axes`: follows one axis of an array through equations, and makes equations that compute a part of it.
- `module_paths`: module paths in the names of operators.
- `softmax_products`: finds the matmuls of output heads and attentions.
- `naming`: names every array of a block and of its linearisation.
- `alike`: compares two separately traced programs.
- `repeated`: names and linearises identical layers once.
- `decided`: the names that a policy saves and offloads in a block.
- `block`: the checkpoint of a block, around its linearisation.
- `stack_rows`: reads a layer's row from its stack inside the checkpoint.
- `once`: the error for a reverse-mode derivative of a derivative through an offload.
- `rewrite`: evaluates a traced function with other policies for its `jax.checkpoint` regions.
- `nested_offload`: finds offload in a scan inside another scan, which XLA cannot compile.
- `origins`: traces a residual back to the equation that computed it.
- `marks`: placeholders for blocks until the layer of each block is known.
- `shared`: keeps an input that several blocks read on the device.
- `ties`: the barriers that make an offload in an unrolled block free device memory.
- `gradient_ties`: keeps the order of a block's backward pass.
- `tied_chain`: overlaps the copies of one tied block with the compute of the next.
"""

from __future__ import annotations

from remat_jax.core.block import BlockUnderPolicy as BlockUnderPolicy
from remat_jax.core.block import block_under_policy as block_under_policy
from remat_jax.core.block import is_smooth as is_smooth
from remat_jax.core.block import noting_differentiated as noting_differentiated
from remat_jax.core.stack_rows import StackRow as StackRow
