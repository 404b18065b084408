"""The gradient checkpointing switch of OpenPI's PyTorch code, with its quirks, on `examples.pytorch.JointDecoder`.

Written from the behaviour of `models_pytorch/pi0_pytorch.py`, `gemma_pytorch.py` and `scripts/train_pytorch.py`:

1. `gradient_checkpointing_enable` and `_disable` set a flag on the model and on three submodels. The vision tower's flag
   is never read.
2. Checkpointing takes effect only in training, in two places: around each part of the outer model if the outer flag is
   set, and around each layer and the final norms if the expert's flag is set.
3. In training the inner model *sets* the expert's flag if it is not set. After `gradient_checkpointing_disable` the
   layers are therefore still checkpointed; only the outer parts are not.
4. Checkpoints are nested: the outer model checkpoints the whole transformer, and each layer inside is checkpointed again.
   A layer runs three times (the last layer twice, because its recomputation ends early). The streams are a list. The
   inner checkpoint holds a list where the outer checkpoint does not see its tensors: the outputs of all layers stay alive
   although the whole transformer is checkpointed.
5. The random state is not restored: the gradient of a layer with dropout would use a different mask than its output.
6. The training script checks `hasattr(model, "gradient_checkpointing_enable")`, and trains without checkpointing if false.

`torch_ref.gradient_checkpointing_enable` is the correct form of the switch, `examples.pytorch.JointDecoder` of the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..joint import JointDecoder

logger = logging.getLogger(__name__)


class Flagged(nn.Module):
    """A submodel that has only the flag `gradient_checkpointing`."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False


class TransformerWithExpert(nn.Module):
    """The inner model: runs the joint layers and the final norms, each checkpointed if the expert's flag is set."""

    def __init__(self, layers: nn.ModuleList, norms: nn.ModuleList) -> None:
        super().__init__()
        self.layers, self.norms = layers, norms
        self.language_model, self.vision_tower, self.expert = Flagged(), Flagged(), Flagged()
        self._has_logged = False

    def forward(self, streams: list[torch.Tensor], *shared: Any, for_norms: tuple[Any, ...] = ()) -> list[torch.Tensor]:
        """Run all layers on the list of two streams; each reads `shared`, the final norms read `for_norms`."""
        use_checkpointing = self.expert.gradient_checkpointing and self.training
        if self.training:
            if not self.expert.gradient_checkpointing:
                logger.info("Forcing gradient checkpointing to be enabled for Gemma expert model")
                self.expert.gradient_checkpointing = True
            use_checkpointing = True
        self._log(use_checkpointing)
        for index in range(len(self.layers)):
            if use_checkpointing:
                streams = checkpointed(self._layer, index, streams, *shared)
            else:
                streams = self._layer(index, streams, *shared)
        return checkpointed(self._norms, streams, *for_norms) if use_checkpointing else self._norms(streams, *for_norms)

    def _layer(self, index: int, streams: list[torch.Tensor], *shared: Any) -> list[torch.Tensor]:
        return self.layers[index](streams, *shared)

    def _norms(self, streams: Sequence[torch.Tensor], *for_norms: Any) -> list[torch.Tensor]:
        return [norm(x) for norm, x in zip(self.norms, streams, strict=True)]

    def _log(self, use_checkpointing: bool) -> None:
        if self._has_logged:
            return
        self._has_logged = True
        logger.info("Gemma expert model gradient checkpointing: %s", use_checkpointing)
        logger.info("Model training mode: %s", self.training)
        logger.info("Gemma expert model has gradient_checkpointing attr: %s", hasattr(self.expert, "gradient_checkpointing"))
        logger.info("Gemma expert model gradient_checkpointing value: %s", self.expert.gradient_checkpointing)


class Switched(nn.Module):
    """An outer model with OpenPI's switch, which sets four flags: its own and three submodels' flags."""

    def __init__(self, transformer: TransformerWithExpert) -> None:
        super().__init__()
        self.transformer = transformer
        self.gradient_checkpointing_enabled = False

    def gradient_checkpointing_enable(self) -> None:
        """Set all four flags."""
        self._set(True)
        logger.info("Enabled gradient checkpointing for PI0Pytorch model")

    def gradient_checkpointing_disable(self) -> None:
        """Clear all four flags; the next forward pass in training sets the expert's again."""
        self._set(False)
        logger.info("Disabled gradient checkpointing for PI0Pytorch model")

    def _set(self, value: bool) -> None:
        self.gradient_checkpointing_enabled = value
        for submodel in (self.transformer.language_model, self.transformer.vision_tower, self.transformer.expert):
            submodel.gradient_checkpointing = value

    def _apply_checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        if self.gradient_checkpointing_enabled and self.training:
            return checkpointed(function, *args)
        return function(*args)


class Pi0(Switched):
    """The outer model, with the parameters of the given `JointDecoder`.

    `PI0Pytorch` is the outer model of the whole π0.

    >>> model = Pi0(JointDecoder(num_layers=1, widths=(8, 4), patch=12, action_dim=3))
    >>> model.gradient_checkpointing_enable()
    >>> model.transformer.vision_tower.gradient_checkpointing, model(torch.zeros(2, 5, 12), torch.zeros(2, 4, 3)).shape
    (True, torch.Size([2, 4, 3]))
    """

    def __init__(self, decoder: JointDecoder) -> None:
        super().__init__(TransformerWithExpert(decoder.layers, decoder.norms))
        self.decoder = decoder

    def forward(self, patches: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Predict actions like `JointDecoder`."""
        streams = [
            self._apply_checkpoint(self.decoder.vision_tower, patches),
            self._apply_checkpoint(self.decoder.action_in, actions),
        ]
        mask = self.decoder.mask(streams)

        def whole(prefix: torch.Tensor, suffix: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            _, suffix = self.transformer([prefix, suffix], mask)
            return suffix

        suffix = self._apply_checkpoint(whole, *streams, mask)
        return self._apply_checkpoint(self.decoder.action_out, suffix)


def prepare_for_training(model: nn.Module) -> bool:
    """Switch checkpointing on if the model has the method, like the training script; return whether it has.

    >>> prepare_for_training(nn.Linear(1, 1))
    False
    """
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable()
        logger.info("Enabled gradient checkpointing for memory optimization")
        return True
    logger.info("Gradient checkpointing is not supported for this model")
    return False


def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint like OpenPI, without restoring the random state."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
