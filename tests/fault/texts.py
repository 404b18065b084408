"""Malformed texts: each is refused by our own error, or means what it says."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from remat_jax import porting
from remat_jax.errors import RematError
from remat_jax.hardware import Target, target
from remat_jax.hardware.target import read_table
from remat_jax.mesh import as_mesh
from remat_jax.planning.check_budget import budget_bytes, host_budget_bytes
from remat_jax.policy import LayerPolicies, Policy, as_block_policy
from remat_jax.policy.text import ALIASES, NAMED_TEXTS

LIMIT_S = 20.0
"""Any text takes far less, also on a busy machine."""

_PIECES = [
    *":;,|@*?[]{}()#/\\\"'%._-+= \t\n\0",
    *("\u00d7", "\u202e", "\ufeff", "\ud800", "\U0001f600", "²", "٣", "é", "\x1b[2J", "</script>"),
    *"save offload recompute @inputs @dots @primitive: off full 1e999 nan inf -1 0x GiB True null None".split(),
    *("->", "{i}", "{a,b}", "8 x", "h100", "__import__('os').abort()", "../", "${HOME}"),
]
_BOMBS = ("[", "(", "{", "9", "1x", "{a,b}", "a.", "[[", "*", "?", "save: x; ", "1 x full | ", '{"a":', "\u00d7", "i+", "(a ")


def mutated(text: str, draw: random.Random) -> str:
    """`text` with one to four changes: a part removed, doubled, moved, inserted, or a piece repeated thousands of times."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        first, last = sorted(draw.randint(0, len(text)) for _ in range(2))
        last = min(last, first + draw.choice((1, 2, 8, 200)))
        change = draw.randint(0, 9)
        if change < 2:
            text = text[:first] + text[last:]
        elif change < 4:
            text = text[:first] + text[first:last] * 2 + text[last:]
        elif change < 7:
            text = text[:first] + draw.choice(_PIECES) + text[first:]
        elif change < 8:
            text = text[last:] + text[:last]
        elif change < 9:
            text = text[:first] + chr(draw.choice((draw.randint(0, 255), draw.randint(0, 0x10FFFF)))) + text[last:]
        elif draw.random() < 0.2:
            text = text[:first] + draw.choice(_BOMBS) * draw.choice((30, 3000, 20_000)) + text[last:]
    return text


class TooSlow(BaseException):
    """A text that takes too long; not an Exception, so that nothing takes it for another fault."""


@contextlib.contextmanager
def in_time(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raise TooSlow in code that runs too long; in the main thread, which receives signals."""

    def expired(*_: Any) -> None:
        raise TooSlow(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- what texts are given to ------------------------------------------------------------------------------------------

H200 = target("h200")


def _policy(text: str) -> None:
    policy = Policy.parse(text)
    assert Policy.parse(str(policy)) == policy == Policy.from_json(policy.to_json())


def _block_policy(text: str) -> None:
    policy = as_block_policy(text)
    assert as_block_policy(str(policy)) == policy


def _layers(text: str) -> None:
    policies = LayerPolicies.parse(text)
    assert LayerPolicies.parse(str(policies)) == policies == LayerPolicies.from_json(policies.to_json())
    assert policies.layers == sum(count for count, _ in policies.runs) > 0


def _budget(text: str) -> None:
    assert H200.memory_bytes is not None and 0 < budget_bytes(text, H200) <= H200.memory_bytes
    # A text of digits is also a number.
    if text.strip().isascii() and text.strip().isdigit():
        assert budget_bytes(int(text), H200) == budget_bytes(text, H200)


def _host_budget(text: str) -> None:
    budget = host_budget_bytes(text)
    assert budget is not None and budget >= 0


def _target(text: str) -> None:
    gpu = target(text)
    assert gpu.devices >= gpu.hosts >= 1 and gpu.devices % gpu.hosts == 0
    if gpu.devices == 1:
        assert gpu.name == target(gpu.name).name


def _table(text: str) -> None:
    for entry in read_table(text).values():
        assert Target(**entry.to_dict()) == entry and json.dumps(entry.to_dict())


def _rules(text: str) -> None:
    rules = porting.Rules.parse(text)
    assert porting.Rules.parse(str(rules)) == rules == porting.Rules.from_json(rules.to_json())


def _mesh(text: str) -> None:
    """The value of a mesh in a file or on a command line, read as JSON."""
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        sizes = text
    assert as_mesh(sizes).size > 0


_POLICY_TEXTS = (
    *NAMED_TEXTS,
    *ALIASES,
    "offload: *ffn/up*; save: @dots_with_no_batch_dims; recompute: *",
    "save: @dots, attention_out; offload: @inputs;",
    "save: @primitive:exp, layers_[0-9]/ffn/up:dot_general#0; recompute: *",
    "save: b?d|8 × name; offload: é*",
)
_LAYER_TEXTS = ("8 x full | 4 x dots", "1x save: *up*; offload: @inputs | 2 × off", "3 × everything")
_TABLE = """
[mine]
kind = "gpu"
description = "a GPU, of mine"
memory_bytes = 80_000_000_000
hbm_bytes_per_s = 3.35e12
peak_flops = { bfloat16 = 9.9e14, float32 = 6.7e13 }
device_kinds = ["NVIDIA Mine"]
[mine.compiler]
compute_capability = "9.0"
core_count = 132
fpus_per_core = 128
clock_rate_ghz = 1.785
threads_per_core_limit = 2048
shared_memory_per_core = 233472
shared_memory_per_block_optin = 232448
l2_cache_size = 52428800
[mine.source]
memory_bytes = "data sheet"
hbm_bytes_per_s = "data sheet"
peak_flops = "data sheet"
compiler = "device query"
[mine.measured]
flops = { bfloat16 = 7e14 }
hidden_share = 0.9
source = "a run"
[host]
kind = "cpu"
description = "a CPU"
[host.source]
"""
_RULES = """
embed.weight -> params/embed/embedding
layers.{i}.up.weight -> params/layers_{i}/up/kernel | linear
layers.{i}.{q,k}.weight -> params/layers/{q,k}/kernel[{i}] | (h d) e -> e h d, h=8
layers.{i+1}.in_proj -> params/layers/{a,b,c}/kernel[{i}, :] | in_proj
n.weight -> params/n/scale | shift(1) | scale(sqrt(16)) | flip(0, 1)
tie: embed.weight = head.weight
extra: *.inv_freq, rotary*
missing: params/new/*
"""

SURFACES: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "policy": (_policy, _POLICY_TEXTS),
    "policy of blocks": (_block_policy, (*_POLICY_TEXTS, *_LAYER_TEXTS)),
    "policies by layer": (_layers, _LAYER_TEXTS),
    "budget": (_budget, ("40GiB", "38 GB", "80%", "0.8", "1000000", "1.5 TB", ".5", "12345678901 B")),
    "host budget": (_host_budget, ("1.5 kB", "0", "64GiB")),
    "target": (_target, ("h200", "8xh100", "2x8xh200", "cpu", "NVIDIA H200", "rtx4090", "none.toml:mine", "attached")),
    "table of targets": (_table, (_TABLE,)),
    "rules": (_rules, (_RULES, *_RULES.strip().splitlines())),
    "mesh": (_mesh, ('{"data": 8, "fsdp": 4}', '{"x": 1}')),
}


def check_texts(number: int, seed: int, say: Callable[[str], None]) -> int:
    """Try a number of texts; report each that raises anything but RematError, and return their number."""
    draw = random.Random(seed)

    def attempt(name: str) -> tuple[str | None, str]:
        read, valid = SURFACES[name]
        text = mutated(draw.choice(valid), draw)
        return fault_of(read, text), ascii(text)

    return tried("texts", list(SURFACES), number, attempt, say)


def tried(
    what: str, names: list[str], number: int, attempt: Callable[[str], tuple[str | None, str]], say: Callable[[str], None]
) -> int:
    """Attempt each name in turn, and report what is wrong and the numbers; return the number of faults."""
    taken, refused, wrong = Counter[str](), Counter[str](), 0
    for index in range(number):
        name = names[index % len(names)]
        fault, given = attempt(name)
        taken[name] += fault is None
        refused[name] += fault == ""
        if fault:
            wrong += 1
            say(f"WRONG {name}: {fault}\n  {given[:300]}")
    if number:
        say(f"{number} {what}, {wrong} wrong; taken as they are: {dict(taken)}; refused: {dict(refused)}")
    return wrong


def fault_of(read: Callable[[Any], object], given: Any) -> str | None:
    """What is wrong with `read`'s handling of `given`; "" for our own error, None if it is accepted."""
    try:
        with in_time():
            read(given)
    except RematError as error:
        return "" if str(error) else "an error of ours without a word"
    except (Exception, TooSlow) as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None
