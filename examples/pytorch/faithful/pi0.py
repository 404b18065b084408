"""π0 with the checkpoints of OpenPI's PyTorch code, including its quirks; the switch is that of `openpi`.

Written from the behaviour of `models_pytorch/pi0_pytorch.py` and `gemma_pytorch.py`. In training, with the switch on:

1. Each camera is encoded by itself, and each call of the vision tower is checkpointed as a whole: its layers run twice
   for each camera, and a recomputation holds all of a tower's arrays at once. The tower's own flag is never read.
2. The embedding of the prompt, the projections of state and actions, the MLP of the time, the whole transformer and the
   last projection each have a checkpoint.
3. Inside the transformer each layer and the final norms are checkpointed again, with lists of tensors: a layer runs
   three times, and the outer checkpoint frees nothing.
4. With the switch off, the layers and the final norms are still checkpointed in training.

`examples.pytorch.Pi0` is the correct form: with its flags each layer runs twice, also in the tower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ref.errors import InvalidArgumentError

from ...pi0_sizes import Observation
from ..pi0 import Pi0, beside, check_inputs, check_parts, flow, share
from .openpi import Switched, TransformerWithExpert


class PaliGemmaWithExpertModel(TransformerWithExpert):
    """The inner model: joint layers and final norms; positions and masks are passed by position, the conditions in a list."""

    def __init__(self, model: Pi0) -> None:
        super().__init__(model.layers, torch.nn.ModuleList([model.prefix_norm, model.suffix_norm]))
        self.config = model.config

    def _layer(self, index: int, streams: list[torch.Tensor], *shared: Any) -> list[torch.Tensor]:
        bias, positions, conditions = shared
        return self.layers[index](streams, share(self.config, positions, bias, conditions[1]))

    def _norms(self, streams: Sequence[torch.Tensor], *for_norms: Any) -> list[torch.Tensor]:
        return [norm(x, c)[0] for norm, x, c in zip(self.norms, streams, for_norms[0], strict=True)]


class PI0Pytorch(Switched):
    """OpenPI's π0 and π0.5 around the parameters of an `examples.pytorch.Pi0`; values and gradients are those of that model.

    Raises:
        InvalidArgumentError: if `model` is no `Pi0`, or lacks a part such as its vision tower.

    >>> from examples.pytorch import Pi0Config
    >>> model = PI0Pytorch(Pi0(Pi0Config(depth=1)))
    >>> model.gradient_checkpointing_enable()
    >>> model.transformer.vision_tower.gradient_checkpointing
    True
    """

    def __init__(self, model: Pi0) -> None:
        if not isinstance(model, Pi0):
            raise InvalidArgumentError(f"model is a {type(model).__name__}, expected a Pi0.")
        check_parts(model)
        super().__init__(PaliGemmaWithExpertModel(model))
        self.model = model

    def forward(self, observation: Observation, noisy_actions: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Predict the velocity."""
        check_inputs(self.model.config, observation, noisy_actions, time)
        prefix = self._embed_prefix(observation)
        suffix, condition = self._embed_suffix(observation, noisy_actions, time, prefix.dtype)
        positions, bias = self.model.see(observation, prefix.dtype)

        def forward_func(
            prefix: torch.Tensor,
            suffix: torch.Tensor,
            bias: torch.Tensor,
            positions: torch.Tensor,
            condition: torch.Tensor | None,
        ) -> torch.Tensor:
            conditions = [None, condition]
            return self.transformer([prefix, suffix], bias, positions, conditions, for_norms=(conditions,))[1]

        suffix = self._apply_checkpoint(forward_func, prefix, suffix, bias, positions, condition)
        return self._apply_checkpoint(self.model.action_out_proj, suffix[:, -self.model.config.horizon :])

    def loss(self, observation: Observation, actions: torch.Tensor, noise: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The flow-matching loss, as `examples.pytorch.Pi0.loss`."""
        noisy, velocity = flow(actions, noise, time)
        return (self(observation, noisy, time).to(actions.dtype) - velocity).square().mean()

    def _embed_prefix(self, observation: Observation) -> torch.Tensor:
        images = [self._apply_checkpoint(self.model.embed_image, image) for image in observation.images.unbind(1)]
        return torch.cat([*images, self._apply_checkpoint(self.model.embed_prompt, observation.prompt)], dim=1)

    def _embed_suffix(
        self, observation: Observation, noisy_actions: torch.Tensor, time: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        model = self.model
        actions = self._apply_checkpoint(model.action_in_proj, noisy_actions.to(dtype))
        embedded = model.time_embedding(time, dtype)
        if model.config.adaptive:
            return actions, self._apply_checkpoint(model.time_mlp, embedded)
        state = self._apply_checkpoint(model.state_proj, observation.state.to(dtype))
        # Time and actions are concatenated outside of the checkpoint, which therefore keeps the concatenation.
        suffix = self._apply_checkpoint(model.action_time_mlp, beside(actions, embedded))
        return torch.cat([state[:, None], suffix], dim=1), None
