"""The kernels of a step on a GPU beside their estimates: which instruction a kernel belongs to, and what is added up."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu import kernels
from benchmarks.gpu.__main__ import main as steps_command
from benchmarks.gpu.kernels import COPY, LIBRARY, Event
from benchmarks.gpu.modes import main as modes_command
from remat_jax.hardware.rates import Rates
from remat_jax.memory.hlo.text import parse

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STEPS = RESULTS / "2026-11-26-h200-jax0.11.2.json"

# A loop of three rounds with an element-wise fusion of 8192 bytes in and out and a matmul, and a copy to the host.
MODULE = parse("""
%sine (p: f32[2048]) -> f32[2048] {
  %p = f32[2048]{0} parameter(0)
  ROOT %s = f32[2048]{0} sine(%p)
}
%body (x: f32[2048]) -> f32[2048] {
  %x = f32[2048]{0} parameter(0)
  %y = f32[2048]{0} fusion(%x), kind=kLoop, calls=%sine
  ROOT %product.1 = f32[2048]{0} custom-call(%y, %y), custom_call_target="__cublas$lt$matmul"
}
ENTRY %main (a: f32[2048]) -> f32[2048] {
  %a = f32[2048]{0} parameter(0)
  %out = f32[2048]{0:S(5)} copy(%a)
  ROOT %loop = f32[2048]{0} while(%a), body=%body, backend_config={"known_trip_count":{"n":"3"}}
}
""")
EVENTS = [
    *(Event("command_buffer", "y", "Stream #1", 1000.0 * at, 300.0) for at in range(3)),
    *(Event("command_buffer", "nvjet", "Stream #1", 1000.0 * at + 400, 500.0) for at in range(3)),
    Event("out", "MemcpyD2H", "Stream #2", 0.0, 3000.0),
]


def test_times_are_added_up_by_kind() -> None:
    rates = Rates({"float32": 1e12}, hbm_bytes_per_s=16384e6)  # the fusion takes a microsecond
    rows = {row.kind: row for row in kernels.by_kind(MODULE, EVENTS, rates)}
    assert rows["element-wise"] == ("element-wise", 3, pytest.approx(0.9e-6), pytest.approx(3e-6))
    assert rows[LIBRARY][:3] == (LIBRARY, 3, pytest.approx(1.5e-6)) and rows[LIBRARY].estimated > 0
    assert rows[COPY] == (COPY, 1, pytest.approx(3e-6), 0.0) and len(rows) == 3
    assert kernels.busy_seconds(EVENTS) == (pytest.approx(2.4e-6), pytest.approx(3e-6)), "copies are no kernels"


@pytest.mark.filterwarnings("ignore:builtin type event_stats has no __module__ attribute:DeprecationWarning")
def test_a_file_has_the_module_and_the_kernels_of_a_run(tmp_path: Path) -> None:
    """On a CPU, where each instruction has an event of its own. JAX 0.12 makes an event's type with this warning, in C++."""
    compiled = jax.jit(lambda x: jnp.sin(x @ x)).lower(x := jnp.ones((64, 64))).compile()
    events = kernels.record(lambda: compiled(x))
    kernels.write(tmp_path / "step.json.gz", compiled.as_text(), events)
    module, read = kernels.read(tmp_path / "step.json.gz")
    assert read == events and events[0].start == 0.0 and all(event.duration > 0 for event in events)
    names = {each.name for computation in module.computations.values() for each in computation}
    assert {event.instruction for event in events} <= names and len(events) >= 2


def test_the_tables_of_the_note_come_from_the_recorded_files(capsys: pytest.CaptureFixture[str]) -> None:
    of_kernels = [str(RESULTS / f"2026-11-26-h200-{name}-jax0.11.2.json") for name in ("kernels", "plans-kernels")]
    assert steps_command(["--show", str(STEPS)]) == steps_command(["--show", str(STEPS), "--errors"]) == 0
    assert kernels.main(["--show", *of_kernels]) == kernels.main(["--show", *of_kernels, "--kinds"]) == 0
    assert modes_command(["--show", str(RESULTS / "2026-11-26-h200-jax0.11.2-modes.json")]) == 0
    printed = capsys.readouterr().out
    for line in (
        "| scanned, full |  | 8.45 | 8.48 | 110.21 | 106.44 | 119.95 | 1.02 |",
        "| rank correlation of estimated and measured seconds | 0.99 | 0.99 |",
        "| scanned, plan for 11 GB, graphs without slice copies | 102.2 | 98.8 | 116.1 | 108.3 | 0.93 |",
        "| reduce, Triton | 219.0 | 147.0 |",
        "jax/unrolled/offload             -         3.99         4.05     0.27     56.9   1.30",
    ):
        assert line in printed
    with pytest.raises(SystemExit):
        kernels.main([])
