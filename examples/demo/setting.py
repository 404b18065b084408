"""The size of the demo, and the rows of its table."""

from __future__ import annotations

from dataclasses import dataclass

from torch_ref import MODES


@dataclass(frozen=True)
class Setting:
    """Sizes, steps and seeds of the demo, and its rows; the defaults take a minute and a half on two cores.

    Attributes:
      d_model, nhead, num_layers: the sizes of the decoder and the stack.
      length, batch: a batch is `batch` windows of `length` bytes.
      steps: steps of training in every mode. The losses of the first 20 at most are compared.
      learning_rate: Adam's. Where a gradient is almost 0, Adam turns its rounding error into a step as large as the learning
        rate, so a high rate makes two correct trainings diverge.
      seed: of weights and data.
      models: which of `ByteDecoder`, `DecoderStack` and `ToyModel` take part.
      frameworks: which of `JAX Linen`, `JAX NNX` and `JAX Linen, unrolled` are compared with PyTorch.
      target: the GPU that the JAX steps are compiled for; None compiles for no GPU.
      timeout: seconds that compiling for the target may take.

    Raises:
      ValueError: a size that is no positive number, or a model that is unknown.

    >>> Setting(steps=2).steps
    2
    """

    d_model: int = 128
    nhead: int = 4
    num_layers: int = 8
    length: int = 64
    batch: int = 16
    steps: int = 10
    learning_rate: float = 1e-4
    seed: int = 1
    models: tuple[str, ...] = ("ByteDecoder",)
    frameworks: tuple[str, ...] = ("JAX Linen", "JAX NNX")
    target: str | None = "h200"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name in ("d_model", "nhead", "num_layers", "length", "batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for argument, known in (("models", MODELS), ("frameworks", FRAMEWORKS)):
            given = getattr(self, argument)
            if not given or set(given) - set(known):
                raise ValueError(f"{argument}={given}: expected one or more of {', '.join(known)}")

    def forms(self, model: str) -> tuple[Form, ...]:
        """The forms of a Flax model, each with its rows."""
        return tuple(form for form in FORMS[model] if form.framework in self.frameworks)


@dataclass(frozen=True)
class Asked:
    """A JAX row.

    Attributes:
      mode: the row's name in the table.
      policy: the policy of the blocks.
      block_runs: how often each block has to run in one step, counted by its first operation.
      offloads: whether the row must have bytes on the host.
    """

    mode: str
    policy: str
    block_runs: int
    offloads: bool


@dataclass(frozen=True)
class Form:
    """A form of the Flax model, and its rows.

    Attributes:
      framework: the form's name in the table.
      api: `linen` or `nnx`.
      scan: whether the layers run in one `scan` or are unrolled.
    """

    framework: str
    api: str
    scan: bool
    asked: tuple[Asked, ...]


BLOCK_RUNS = dict(zip(MODES, (1, 2, 2), strict=True))
THREE_MODES = tuple(Asked(mode, mode, BLOCK_RUNS[mode], mode == "offload") for mode in MODES)

# Save the products with weights, but offload the widest of them: no policy of JAX's own can express this.
COMPOSED = "offload: *ffn/up:dot_general#0; save: @dots_with_no_batch_dims"
# All of these policies keep a block's first product, so that it is not computed twice.
POLICIES = (
    Asked("dots", "dots", 1, False),
    Asked("offload_dot_with_no_batch_dims", "offload_dot_with_no_batch_dims", 1, True),
    Asked(COMPOSED, COMPOSED, 1, True),
)

LINEN = Form("JAX Linen", "linen", True, THREE_MODES)
FORMS: dict[str, tuple[Form, ...]] = {
    "ByteDecoder": (
        Form("JAX Linen", "linen", True, THREE_MODES + POLICIES),
        Form("JAX NNX", "nnx", True, THREE_MODES),
        Form("JAX Linen, unrolled", "linen", False, THREE_MODES),
    ),
    "DecoderStack": (LINEN,),
    "ToyModel": (LINEN,),
}
"""The Flax rows of every model; PyTorch's rows are the three modes."""

MODELS = tuple(FORMS)
FRAMEWORKS = tuple(form.framework for form in FORMS["ByteDecoder"])
FULL = Setting(models=MODELS, frameworks=FRAMEWORKS, steps=20)
"""Every model in every form, with longer training."""
QUICK = {"num_layers": 2, "length": 16, "batch": 4, "steps": 6}
"""A small model and few steps, to see that everything works."""
