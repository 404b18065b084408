"""`python -m benchmarks.chunked_heads NAME[=FOLDER[:FOLDER]] …`: losses that others wrote, with their heads in chunks.

    python -m benchmarks.chunked_heads optax equinox transformers=PACKAGES easylm=EasyLM axlearn=axlearn tunix=tunix
    python -m benchmarks.chunked_heads --micro-batches optax …         the same losses in two micro-batches

FOLDER holds the library's modules, as in PYTHONPATH; transformers is 4.56, the last one with Flax models. Each library runs in
its own process. The command prints a table: for each loss the largest error of an output or a gradient in float64 against the
unchanged loss, relative to the largest number in the array, or to a thousandth of the largest number in all arrays; or why the
loss is refused. It fails if an error is above 1e-12, if a head is refused that should run, or if one runs that should not.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.figures import markdown
from examples.others.shared import masks_may_be_numbers, package, without
from parity_tests.gallery.widened import widened
from remat_jax.errors import ArgumentError, PlanningError
from remat_jax.train.chunked_head import chunk_head, chunked_heads
from remat_jax.train.micro_batches import micro_batched

ROOT = Path(__file__).parents[1]
BATCH, LENGTH, WIDTH, WORDS = 2, 12, 8, 40
CHUNKS = 5  # divides no axis
LARGEST_ERROR = 1e-12
MICRO = "--micro-batches"

Case = tuple[str, Callable[..., Any], tuple[Any, ...], bool]
"""A name, a loss of the first argument, which is differentiated, its arguments, and whether the head can run in chunks."""


def batch() -> tuple[Any, Any]:
    """Tokens, and a mask of tokens that count."""
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, WORDS)
    return tokens, (tokens % 5 > 0).astype(jnp.float32)


def toy(of_logits: Callable[..., Any], works: bool = True) -> tuple[Callable[..., Any], tuple[Any, ...], bool]:
    """A model with tied embeddings in front of a loss `of_logits(logits, tokens, mask)`."""

    def loss(params: Any, tokens: Any, mask: Any) -> Any:
        hidden = jnp.tanh(params["embedding"][tokens] @ params["kernel"])
        return of_logits(hidden @ params["embedding"].T, tokens, mask)

    return loss, (drawn({"embedding": (WORDS, WIDTH), "kernel": (WIDTH, WIDTH)}), *batch()), works


def drawn(shapes: Any) -> Any:
    """Random arrays of these shapes, given as tuples or as structs."""
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[0], int))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    sizes = [(leaf, jnp.float32) if isinstance(leaf, tuple) else (leaf.shape, leaf.dtype) for leaf in leaves]
    arrays = [_drawn(key, *size) for key, size in zip(keys, sizes, strict=True)]
    return jax.tree.unflatten(treedef, arrays)


def _drawn(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(key, shape)
    if jnp.issubdtype(dtype, jnp.floating):
        return (jax.random.normal(key, shape) * 0.2).astype(dtype)
    return jax.random.randint(key, shape, 0, WORDS, jnp.int32).astype(dtype)


# --- the losses of each library -----------------------------------------------------------------------------------------


def of_optax() -> Iterator[Case]:
    masked = lambda losses, mask: (losses * mask).sum() / mask.sum()  # noqa: E731
    one_hot = lambda tokens: jax.nn.one_hot(tokens, WORDS)  # noqa: E731
    integer, soft = optax.softmax_cross_entropy_with_integer_labels, optax.softmax_cross_entropy
    yield "softmax_cross_entropy_with_integer_labels", *toy(lambda logits, y, mask: masked(integer(logits, y), mask))
    yield "the same, shifted", *toy(lambda logits, y, mask: integer(logits[:, :-1], y[:, 1:]).mean())
    smooth = lambda y: optax.smooth_labels(one_hot(y), 0.1)  # noqa: E731
    yield "softmax_cross_entropy, smooth_labels", *toy(lambda logits, y, mask: masked(soft(logits, smooth(y)), mask))
    safe = optax.losses.safe_softmax_cross_entropy
    yield "safe_softmax_cross_entropy", *toy(lambda logits, y, mask: safe(logits, one_hot(y)).mean())
    yield (
        "poly_loss_cross_entropy",
        *toy(lambda logits, y, mask: optax.losses.poly_loss_cross_entropy(logits, one_hot(y)).mean()),
    )
    yield "perplexity of each row", *toy(lambda logits, y, mask: jnp.exp(integer(logits, y).mean(-1)).sum())
    yield "its hardest tokens", *toy(lambda logits, y, mask: jax.lax.top_k(integer(logits, y).ravel(), 5)[0].mean())


def of_equinox() -> Iterator[Case]:
    import equinox as eqx

    head = eqx.nn.Linear(WIDTH, WORDS, key=jax.random.key(0))
    arrays, rest = eqx.partition(head, eqx.is_array)

    def loss(arrays: Any, tokens: Any, mask: Any) -> Any:
        hidden = jnp.sin(tokens[..., None] + jnp.arange(WIDTH))
        logits = jax.vmap(jax.vmap(eqx.combine(arrays, rest)))(hidden)
        return -(jax.vmap(jax.vmap(lambda row, word: row[word]))(jax.nn.log_softmax(logits), tokens) * mask).mean()

    yield "nn.Linear under vmap", loss, (arrays, *batch()), True


def of_transformers() -> Iterator[Case]:
    import transformers as hf

    clip = jnp.clip  # T5 still calls it with an argument that JAX has renamed
    jnp.clip = lambda x, *bounds, a_max=None, **rest: clip(x, *bounds, **rest, **({} if a_max is None else {"max": a_max}))
    tokens, mask = batch()
    integer = optax.softmax_cross_entropy_with_integer_labels
    small = {"vocab_size": WORDS}

    def of(model: Any) -> Any:
        return drawn(model.params_shape_tree)

    gpt2 = hf.FlaxGPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=WIDTH, n_head=2, **small), _do_init=False)

    def causal(params: Any, tokens: Any) -> Any:
        logits = gpt2(tokens, params=params, train=False).logits
        return integer(logits[:, :-1], tokens[:, 1:]).mean()

    yield "GPT-2, tied", causal, (of(gpt2), tokens), True
    sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    t5 = hf.FlaxT5ForConditionalGeneration(hf.T5Config(**sizes, **small), _do_init=False)

    def encoder_decoder(params: Any, tokens: Any, mask: Any) -> Any:
        logits = t5(tokens, decoder_input_ids=jnp.roll(tokens, 1, -1), params=params, train=False).logits
        return (integer(logits, tokens) * mask).sum() / mask.sum()

    yield "T5, encoder–decoder", encoder_decoder, (of(t5), tokens, mask), True
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = hf.FlaxBertForPreTraining(hf.BertConfig(**sizes, **small), _do_init=False)

    def pretraining(params: Any, tokens: Any, mask: Any) -> Any:
        outputs = bert(tokens, params=params, train=False)
        words = (integer(outputs.prediction_logits, tokens) * (1 - mask)).sum() / (1 - mask).sum()
        accuracy = ((outputs.prediction_logits.argmax(-1) == tokens) * mask).sum()
        return words + integer(outputs.seq_relationship_logits, tokens[:, 0] % 2).mean(), accuracy

    yield "BERT, masked words and next sentence", pretraining, (of(bert), tokens, mask), True
    text, image = {**sizes, **small, "eos_token_id": 2}, {**sizes, "image_size": 8, "patch_size": 4}
    config = hf.CLIPConfig.from_text_vision_configs(
        hf.CLIPTextConfig(**text), hf.CLIPVisionConfig(**image), projection_dim=WIDTH
    )
    pairs = hf.FlaxCLIPModel(config, input_shape=((1, 1), (1, 8, 8, 3)), _do_init=False)

    def contrastive(params: Any, tokens: Any, pixels: Any) -> Any:
        logits = pairs(tokens, pixels, params=params, train=False).logits_per_text
        labels = jnp.arange(logits.shape[0])
        return (integer(logits, labels).mean() + integer(logits.T, labels).mean()) / 2

    rows = jax.random.randint(jax.random.key(1), (16, LENGTH), 0, WORDS)
    yield "CLIP, contrastive", contrastive, (of(pairs), rows, jnp.ones((16, 3, 8, 8))), False


def of_easylm() -> Iterator[Case]:
    easylm_llama = importlib.import_module("examples.others.easylm_llama")
    losses = importlib.import_module("EasyLM.jax_utils").cross_entropy_loss_and_accuracy
    yield "cross_entropy_loss_and_accuracy", *toy(lambda logits, y, mask: losses(logits, y, mask))
    job = easylm_llama.small()
    yield "Llama", job.loss, (drawn(job.params), *drawn(job.batch)), True


def of_maxtext() -> Iterator[Case]:
    job = importlib.import_module("examples.others.maxtext_llama").small()
    utils = importlib.import_module("maxtext.utils.max_utils")

    def stable(logits: Any, tokens: Any, mask: Any) -> Any:
        losses, z = utils.cross_entropy_with_logits(logits, jax.nn.one_hot(tokens, WORDS), z_loss=1e-2)
        return (losses * mask).sum() / (mask.sum() + 1e-8), (z * mask).sum()

    yield "cross_entropy_with_logits, z-loss", *toy(stable)
    yield "Llama", job.loss, (drawn(job.params), *drawn(job.batch)), True


def of_axlearn() -> Iterator[Case]:
    without("tensorflow", "seqio", "grain", "google.cloud", "orbax", "tensorstore", "cloudpickle")
    loss = importlib.import_module("axlearn.common.loss")

    def smooth(logits: Any, tokens: Any, mask: Any) -> Any:
        return loss.cross_entropy(logits, tokens, live_targets=mask, z_loss_scale=1e-3, label_smoothing=0.1)

    yield "cross_entropy, z-loss, label smoothing", *toy(smooth)

    def pairs(params: Any) -> Any:
        logits = loss.contrastive_logits(params["image"], params["text"])
        return loss.symmetric_contrastive_loss_from_logits(logits, logits.T)

    yield "contrastive loss", pairs, (drawn({"image": (WORDS, WIDTH), "text": (WORDS, WIDTH)}),), False


def of_levanter() -> Iterator[Case]:
    import haliax as hax

    masks_may_be_numbers()
    package("levanter")
    losses = importlib.import_module("levanter.models.loss")
    sizes = {"rows": BATCH, "position": LENGTH, "embed": WIDTH, "vocab": WORDS}
    rows, position, embed, vocab = (hax.Axis(name, size) for name, size in sizes.items())

    def next_token(params: Any, tokens: Any, mask: Any, **options: Any) -> Any:
        hidden = hax.named(jnp.tanh(params["embedding"][tokens]), (rows, position, embed))
        kernel = hax.named(params["embedding"], (vocab, embed))
        ids, mask = hax.named(tokens, (rows, position)), hax.named(mask > 0, (rows, position))
        args = (position, embed, vocab, hidden, kernel, ids, mask)
        return losses.maybe_fused_next_token_loss(*args, logsumexp_weight=1e-3, **options).scalar()

    args = (drawn({"embedding": (WORDS, WIDTH)}), *batch())
    yield "maybe_fused_next_token_loss", next_token, args, True
    yield "the same, soft cap", lambda *args: next_token(*args, logit_soft_cap=30.0), args, True
    yield "the same, fused in blocks", lambda *args: next_token(*args, block_size=8), args, False


def of_tunix() -> Iterator[Case]:
    absent = "orbax wandb tensorboardX metrax clu grain kagglehub datasets jinja2 vllm sentencepiece perfetto pandas"
    without(*absent.split())
    trainer = importlib.import_module("tunix.sft.peft_trainer")

    def supervised(logits: Any, tokens: Any, mask: Any) -> Any:
        metric = trainer._default_loss_fn(lambda *_: (logits, None), tokens, mask, None, None).primary_loss
        return metric.unreduced_sum / (metric.denominator + 1e-8)

    yield "_default_loss_fn", *toy(supervised)
    strategy = importlib.import_module("tunix.distillation.strategies.logit").LogitStrategy

    def distilled(params: Any, tokens: Any, mask: Any) -> Any:
        hidden = jnp.tanh(params["embedding"][tokens])
        student, teacher = hidden @ params["kernel"], jax.lax.stop_gradient(jnp.sin(hidden) @ params["kernel"])
        make = strategy(lambda *_: None, lambda *_: None, lambda *_: None, temperature=2.0, alpha=0.5)
        return make.compute_loss(student, teacher, jax.nn.one_hot(tokens, WORDS))[0]

    yield "LogitStrategy", distilled, (drawn({"embedding": (WORDS, WIDTH), "kernel": (WIDTH, WORDS)}), *batch()), True


LIBRARIES: dict[str, Callable[[], Iterator[Case]]] = {
    "optax": of_optax,
    "equinox": of_equinox,
    "transformers": of_transformers,
    "easylm": of_easylm,
    "maxtext": of_maxtext,
    "levanter": of_levanter,
    "tunix": of_tunix,
    "axlearn": of_axlearn,
}


# --- the check -----------------------------------------------------------------------------------------------------------


def check(loss: Callable[..., Any], args: tuple[Any, ...], works: bool) -> tuple[str, str, bool]:
    """The logits, the error or the reason for the refusal, and whether this is as expected."""
    try:
        heads = chunked_heads(loss, *args, chunks=CHUNKS)
    except PlanningError as error:
        return "", f"refused: {error}", not works
    error = _error(_results(loss, args), _results(chunk_head(loss, chunks=CHUNKS), args))
    shown = ", ".join(f"{head.dtype}{list(head.shape)}" for head in heads)
    return shown, f"{error:.1e}", works and error < LARGEST_ERROR


def check_micro_batches(loss: Callable[..., Any], args: tuple[Any, ...], works: bool) -> tuple[str, bool]:
    """The error in two micro-batches, or the reason for the refusal, and whether the loss stays the same."""

    def with_aux(params: Any, _: Any, *batch: Any) -> Any:
        result = loss(params, *batch)
        return result if isinstance(result, tuple) else (result, None)

    try:
        before = _results(loss, args)
    except Exception as error:  # a gradient that does not work in the versions at hand
        return f"its own gradient fails: {error}", True
    in_two = micro_batched(with_aux, 2, has_aux=True)
    try:
        after = _evaluated(lambda params, *batch: in_two(params, (), *batch), args)
    except (ArgumentError, PlanningError) as error:
        return f"refused: {error}", True
    error = _error(before, after)
    return f"{error:.1e}", error < LARGEST_ERROR


def _error(before: list[Any], after: list[Any]) -> float:
    sizes = [float(jnp.max(jnp.abs(each), initial=0)) for each in before]
    differences = [float(jnp.max(jnp.abs(a - b), initial=0)) for a, b in zip(before, after, strict=True)]
    # Some gradients are zero but for rounding, such as that of the bias of an attention's keys.
    return max(each / max(size, max(sizes) / 1000) for each, size in zip(differences, sizes, strict=True))


def _results(loss: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """The outputs of the loss and its gradient, in float64."""

    def outputs(params: Any, *rest: Any) -> Any:
        result = loss(params, *rest)
        return result if isinstance(result, tuple) else (result, None)

    return _evaluated(jax.value_and_grad(outputs, has_aux=True, allow_int=True), args)


def _evaluated(function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    jaxpr = jax.make_jaxpr(function)(*args)
    leaves = jax.tree.leaves(args)
    with jax.enable_x64(True):
        results = jax.jit(widened(jaxpr))(*leaves)
    return [result for result in results if jnp.issubdtype(result.dtype, jnp.number)]


def main(arguments: list[str]) -> int:
    flags = [argument for argument in arguments if argument == MICRO]
    arguments = [argument for argument in arguments if argument != MICRO]
    if arguments[:1] == ["--one"]:
        jax.config.update("jax_disable_most_optimizations", True)  # compiles in a fraction of the time
        cases, checked = LIBRARIES[arguments[1]](), check_micro_batches if flags else check
        print(json.dumps([(name, *checked(loss, args, works)) for name, loss, args, works in cases]))
        return 0
    folders = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := [name for name in folders if name not in LIBRARIES] or not folders:
        print(f"NAME={unknown}: choose among {', '.join(LIBRARIES)}; {__doc__}", file=sys.stderr)
        return 2
    rows, failed = [], 0
    for name, folder in folders.items():
        path = os.pathsep.join(filter(None, (str(ROOT), folder, os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.chunked_heads", "--one", name, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
        found = [] if done.returncode else json.loads(done.stdout.splitlines()[-1])
        failed += not found or not all(row[-1] for row in found)
        rows += [(name, *row[:-1]) for row in found] or [(name, *[""] * (1 if flags else 2), "failed")]
    print(markdown(["library", "loss", *([] if flags else ["logits"]), "error"], rows))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
