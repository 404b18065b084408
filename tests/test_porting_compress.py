"""Placeholders in a proposed map, for words and for names that end alike: only where the map stays the same."""

from __future__ import annotations

from remat_jax.porting import Rules
from remat_jax.porting.auto.compress import compress


def compressed(lines: list[str], also: tuple[str, ...] = ()) -> list[str]:
    """The shorter map of models with the names in `lines`, all of one shape; `also` are further names of PyTorch."""
    rules = Rules.parse("\n".join(lines))
    tensors = [rule.torch[0].text for rule in rules.rules]
    arrays = [str(rule.flax[0]) for rule in rules.rules]
    return str(compress(rules, dict.fromkeys((*tensors, *also), (3, 3)), dict.fromkeys(arrays, (3, 3)))).splitlines()


def weights(*names: str, steps: str = " | linear") -> list[str]:
    return [f"{name}.weight -> params/{name.replace('.', '/')}/kernel{steps}" for name in names]


def test_words_of_both_names_become_placeholders() -> None:
    names = [f"{side}.{i}.{name}" for side in ("encoder", "decoder") for i in range(2) for name in ("query", "key")]
    assert compressed(weights(*names, "head")) == [
        "{part}.{i}.{name}.weight -> params/{part}/{i}/{name}/kernel | linear",
        *weights("head"),
    ]


def test_what_is_transformed_otherwise_comes_first() -> None:
    lines = [*weights("attn.query", "attn.key"), *weights("attn.rotary", steps="")]
    assert compressed(lines) == [
        *weights("attn.rotary", steps=""),
        "attn.{name}.weight -> params/attn/{name}/kernel | linear",
    ]


def test_no_placeholder_takes_a_tensor_that_has_no_place() -> None:
    lines = weights("attn.query", "attn.key")
    assert compressed([*lines, "extra: attn.unused.weight"], ("attn.unused.weight",))[:2] == lines


def test_extra_names_that_end_alike_are_a_glob() -> None:
    lines = [*weights("a", "b"), "extra: a.count, b.count, a.mean, c"]
    also = ("a.count", "b.count", "a.mean", "b.mean", "c")
    assert compressed(lines, also)[-1] == "extra: *.count, a.mean, c"
