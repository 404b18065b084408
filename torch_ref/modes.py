"""The three modes, and the pair of flags that selects each mode."""

from __future__ import annotations

import numpy as np

from torch_ref.errors import InvalidArgumentError

MODES = ("off", "checkpoint", "offload")


def mode_of(use_gradient_checkpointing: bool, use_gradient_checkpointing_offload: bool) -> str:
    """The mode that a pair of flags selects; the offload flag alone selects `offload`.

    Raises:
        InvalidArgumentError: if a flag is not a bool of Python or NumPy.

    >>> mode_of(False, True)
    'offload'
    """
    flags = {
        "use_gradient_checkpointing": use_gradient_checkpointing,
        "use_gradient_checkpointing_offload": use_gradient_checkpointing_offload,
    }
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise InvalidArgumentError(
                f"{name} is a {type(value).__name__}, expected True or False. The two flags come right after the model;"
                " give the block's own arguments after them or by keyword."
            )
    if use_gradient_checkpointing_offload:
        return "offload"
    return "checkpoint" if use_gradient_checkpointing else "off"


def mode_flags(mode: str) -> dict[str, bool]:
    """The keyword arguments that select a mode in `gradient_checkpoint_forward` and in the models of `examples/`.

    Raises:
        InvalidArgumentError: if `mode` is not one of `MODES`.

    >>> mode_flags("checkpoint")
    {'use_gradient_checkpointing': True, 'use_gradient_checkpointing_offload': False}
    """
    if mode not in MODES:
        raise InvalidArgumentError(f"mode is {mode!r}, expected one of {', '.join(MODES)}.")
    return {
        "use_gradient_checkpointing": mode != "off",
        "use_gradient_checkpointing_offload": mode == "offload",
    }
