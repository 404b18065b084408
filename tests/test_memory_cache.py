"""Compiled results are cached by content, in memory and for GPUs on disk, and never stale."""

from __future__ import annotations

import contextlib
import dataclasses
import grp
import hashlib
import json
import os
import pathlib
import pwd
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import remat_jax as rj
from remat_jax import compat
from remat_jax.errors import CompileError
from remat_jax.hardware import target
from remat_jax.memory.compile import cache, compiler
from remat_jax.memory.compile.compiler import compile_programs
from remat_jax.memory.compile.exported import ExportedProgram
from remat_jax.memory.compile.exporting import export_step
from remat_jax.memory.compile.process import NotDoneError
from remat_jax.memory.compile.sizes import Sizes
from remat_jax.memory.hlo.copies import Copies, Overlap
from remat_jax.memory.hlo.live import LiveBuffer
from remat_jax.memory.step_time.schedule import StepTime
from remat_jax.step import TrainingStep

OVERLAP = Overlap(Copies(1, 2, 0.1, 0.2, 0.3), Copies(3, 4, 0.4, 0.5, 0.6), 1 / 3, 2e-9, 0.7)
SIZES = Sizes(
    *range(1, 9),
    live=(LiveBuffer("a/b:dot", "a/b", "forward", 12, "f32[3]"), LiveBuffer("x", "", "other", 4, "f32[]")),
    time=StepTime(1.5, 0.5, OVERLAP, Copies(5, 6, 0.7, 0.8, 0.9), ("mine",), ("flops",)),
    miscompiled=None,
)
H200 = target("h200")


def program(key: str = "full", scale: float = 2.0) -> ExportedProgram:
    return export_step(key, TrainingStep(lambda x: x * scale, (jax.ShapeDtypeStruct((8,), jnp.float32),), (0,)), target("cpu"))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    cache.forget()
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of the compiled programs; the compiler itself is not needed here."""
    keys: list[str] = []

    def answer(programs: Any, *_: Any) -> list[tuple[str, Sizes]]:
        keys.extend(exported.key for exported in programs)
        return [(exported.key, dataclasses.replace(SIZES, temp=len(keys))) for exported in programs]

    monkeypatch.setattr(compiler, "_compiled", answer)
    monkeypatch.setattr(compat, "require_gpu_compiler", lambda: None)
    return keys


def ask(*programs: ExportedProgram, name: str = "h200", **options: Any) -> dict[str, Sizes]:
    return compile_programs(programs, target(name), timeout=10, **options)


def test_equal_programs_are_compiled_once_and_each_key_has_its_answer(folder: pathlib.Path, asked: list[str]) -> None:
    messages: list[str] = []
    sizes = ask(program("a"), program("b", 3.0), program("c"), on_done=messages.append)
    assert asked == ["a", "b"] and list(sizes) == ["a", "b", "c"]
    assert sizes["a"] == sizes["c"] and "c" in messages
    assert ask(program("d")) == {"d": sizes["a"]} and asked == ["a", "b"]


def test_of_equal_programs_one_that_needs_its_time_decides(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enough: dict[str, bool] = {}

    def answer(programs: Any, *rest: Any) -> list[tuple[str, Sizes]]:
        enough.update({exported.key: rest[-1](exported.key) for exported in programs})
        return [(exported.key, SIZES) for exported in programs]

    monkeypatch.setattr(compiler, "_compiled", answer)
    ask(program("a"), program("b", 3.0), program("c"), name="cpu", is_enough=lambda key: key != "c")
    assert enough == {"a": False, "b": True}


def test_what_was_compiled_before_the_timeout_is_kept(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(entries: Any, target: Any, timeout: float, folder: Any, arrived: Callable[[Any], None], *_: Any) -> None:
        arrived({"key": entries[0]["key"]})
        raise NotDoneError("timeout")

    monkeypatch.setattr(compiler, "_answers", late)
    methods = {"require": None, "limit_options": {}, "entry": {"compiler_options": {}}, "read": SIZES, "knows_memory": False}
    backend = types.SimpleNamespace(**{name: lambda *_, answer=answer: answer for name, answer in methods.items()})
    monkeypatch.setattr(compiler, "backend_of", lambda _: backend)
    messages: list[str] = []
    with pytest.raises(NotDoneError):
        ask(program("a"), program("b", 3.0), on_done=messages.append)
    cache.forget()
    assert messages == ["a"] and len(list(folder.iterdir())) == 1
    assert ask(program("a")) == {"a": SIZES}


def test_another_process_finds_it_on_disk_as_it_was(folder: pathlib.Path, asked: list[str]) -> None:
    first = ask(program())
    cache.forget()
    assert ask(program()) == first and asked == ["full"]
    (path,) = folder.iterdir()
    assert ask(program())["full"] == dataclasses.replace(SIZES, temp=1)
    assert json.loads(path.read_text().split("\n", 1)[1])["time"]["overlap"]["back"]["count"] == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"temp": 1,', '"temp": 2,'),
        lambda text: ("1" if text[0] == "0" else "0") + text[1:],
        lambda text: text.replace("\n", ""),
    ],
)
def test_a_file_that_is_not_as_it_was_written_is_compiled_again(folder, asked, spoil):
    ask(program())
    (path,) = folder.iterdir()
    spoiled = spoil(path.read_text())
    assert spoiled != path.read_text()
    path.write_text(spoiled)
    cache.forget()
    assert ask(program())["full"].temp == 2 and asked == ["full", "full"]
    cache.forget()
    assert ask(program())["full"].temp == 2 and asked == ["full", "full"], "and it is whole again"


def test_all_that_the_answer_depends_on_is_in_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def digest(
        exported: ExportedProgram | None = None, described: Any = H200, options: Any = (), child: Any = compiler.CHILD
    ) -> str:
        return cache.digest(exported or program(), described, dict(options), child)

    names = {"plain": digest()}
    assert digest() == digest(program("another key")) == digest(described=dataclasses.replace(H200, name="attached"))
    names["program"] = digest(program(scale=3.0))
    names["donated"] = digest(dataclasses.replace(program(), donated=()))
    names["argument names"] = digest(dataclasses.replace(program(), arguments=("y",)))
    names["kernels"] = digest(dataclasses.replace(program(), kernels=(("mha", 1.0),)))
    names["options"] = digest(options={"xla_gpu_enable_latency_hiding_scheduler": True})
    names["compiler"] = digest(described=target("h100"))
    names["rates"] = digest(described=dataclasses.replace(H200, host_link_bytes_per_s=5e10))
    (tmp_path / "child.py").write_text("another reader of the answer")
    names["code"] = digest(child=tmp_path / "child.py")
    for variable in ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION"):
        with monkeypatch.context() as patched:
            patched.setenv(variable, "--xla_gpu_enable_triton_gemm=false")
            names[variable] = digest()
    with monkeypatch.context() as patched:
        patched.setattr(cache, "_packages", lambda: {"jaxlib": "99.0"})
        names["versions"] = digest()
    assert len(set(names.values())) == len(names) == 12
    assert {"jax", "jaxlib", "jax-cuda13-plugin", "libtpu"} <= set(cache._packages()) and digest() == names["plain"]


def test_nothing_is_kept_on_disk_for_the_cpu_or_where_it_is_off(monkeypatch, folder, asked):
    ask(program(), name="cpu")
    monkeypatch.setenv(cache.VARIABLE, "off")
    ask(program())
    assert asked == ["full", "full"] and not folder.exists()
    assert ask(program()) and len(asked) == 2, "in memory it is"


def test_the_folder_is_the_users_cache_folder_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache._folder(H200) == tmp_path / "remat_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache._folder(H200) == tmp_path / ".cache" / "remat_jax"

    def homeless(_: pathlib.Path) -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "expanduser", homeless)
    cache.forget()
    assert cache._folder(H200) is None and cache.read("none", H200, dict) is None


def test_the_oldest_go_and_nothing_else_is_left_behind(monkeypatch, folder, asked):
    monkeypatch.setattr(cache, "MOST_FILES", 3)
    for index in range(5):
        ask(program(scale=index + 10.0))
    assert len(list(folder.iterdir())) == 3 == len(list(folder.glob("*.json")))
    cache.forget()
    assert ask(program(scale=14.0))["full"].temp == 5 and len(asked) == 5
    assert ask(program(scale=10.0))["full"].temp == 6, "it was gone"


def test_a_failure_is_not_kept(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with monkeypatch.context() as patched:
        (tmp_path / "dies.py").write_text("raise SystemExit(3)")
        patched.setattr(compiler, "CHILD", tmp_path / "dies.py")
        with pytest.raises(CompileError, match="exit status 3"):
            ask(program(), name="cpu")
    assert ask(program(), name="cpu")["full"].argument == 32


@pytest.mark.parametrize(("mode", "used"), [(0o700, True), (0o755, True), (0o777, False), (0o1777, False)])
def test_a_folder_that_others_may_write_is_not_used(folder: pathlib.Path, asked: list[str], mode: int, used: bool) -> None:
    ask(program())
    folder.chmod(mode)
    cache.forget()
    message = f"other users may write to the folder {str(folder)!r}"
    with contextlib.nullcontext() if used else pytest.warns(rj.RematWarning, match=re.escape(message)):
        ask(program())
    assert asked == ["full"] * (1 if used else 2)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temp": value} for value in ("8", -1, 2**80, 1.5, True)),
        *({"live": value} for value in ([[1]], [{"name": "a"}])),
        *({"time": value} for value in ({}, "soon")),
        {"timeline": 0},
        {"other": 1},
    ],
)
def test_an_entry_of_another_form_is_none(folder: pathlib.Path, asked: list[str], wrong: dict[str, Any]) -> None:
    """Its checksum is valid: whoever wrote it could compute that."""
    first = ask(program())
    (path,) = folder.iterdir()
    text = json.dumps(json.loads(path.read_text().split("\n", 1)[1]) | wrong)
    path.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
    cache.forget()
    assert ask(program())["full"] == dataclasses.replace(first["full"], temp=2) and len(asked) == 2


def test_what_lies_in_a_folder_that_others_may_write_is_not_used_unless_that_is_sticky(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "open" / "mine" / "kept"))
    (tmp_path / "open" / "mine").mkdir(parents=True)
    for mode, used in ((0o755, True), (0o777, False), (0o1777, True)):
        (tmp_path / "open").chmod(mode)
        message = f"other users may write to the folder '{tmp_path}/open', so '.*/kept' is not used"
        with contextlib.nullcontext() if used else pytest.warns(rj.RematWarning, match=message):
            assert (cache._folder(H200) is not None) == used


@pytest.mark.parametrize(
    ("name", "members", "used"),
    [("me", [], True), ("me", ["me"], True), ("me", ["me", "you"], False), ("users", [], False), (None, [], False)],
)
def test_what_a_group_may_write_is_used_if_the_user_is_alone_in_it(monkeypatch, tmp_path, name, members, used):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o775)

    def group(_: int) -> Any:
        if name is None:
            raise KeyError
        return types.SimpleNamespace(gr_name=name, gr_mem=members)

    monkeypatch.setattr(grp, "getgrgid", group)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: types.SimpleNamespace(pw_name="me"))
    monkeypatch.setattr(os, "getgid", lambda: os.getuid() + 1)
    assert cache._is_others(tmp_path / "kept", sticky=False) != used


def test_a_home_is_expanded_and_a_folder_that_cannot_be_is_a_warning(monkeypatch, tmp_path, asked):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cache.VARIABLE, "~/kept")
    assert cache._folder(H200) == tmp_path / "kept"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, f"{tmp_path}/file/kept")
    with pytest.warns(rj.RematWarning, match="cannot be written .*nothing is cached"):
        ask(program("none before", 7.0))
    monkeypatch.setenv(cache.VARIABLE, "~nosuchuser/kept")
    with pytest.warns(rj.RematWarning, match="'~nosuchuser/kept': there is no such home folder: nothing is cached"):
        assert cache._folder(H200) is None
    for word in ("off", "OFF ", "none", "No", "0", "false", "Disable", "disabled"):
        monkeypatch.setenv(cache.VARIABLE, word)
        assert cache._folder(H200) is None
