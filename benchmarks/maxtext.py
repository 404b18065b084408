"""The bytes of MaxText's own ahead-of-time compilation for a TPU slice, and those of `measure` for the same step.

    git clone https://github.com/AI-Hypercomputer/maxtext && git -C maxtext checkout e591f30
    pip install absl-py omegaconf ml_collections chex aqtp qwix etils psutil drjax pydantic transformers
    PYTHONPATH=.:maxtext/src python -m benchmarks.maxtext
    PYTHONPATH=.:maxtext/src python -m benchmarks.maxtext minimal_offloaded max_target_length=2048
    PYTHONPATH=.:maxtext/src python -m benchmarks.maxtext full --policy "save: query_proj, key_proj, value_proj"

MaxText's `train_compile` compiles its training step and prints its memory analysis. The same function, arguments and shardings
then go to `Workload.from_step`, and `measure` compiles them again, under `off`, which keeps MaxText's own checkpoints, or under
`--policy`, which replaces them. Without arguments there is a row for each remat policy of `POLICIES`. Words such as
`model_name=llama2-7b` are settings of MaxText. A compilation takes minutes; a small model takes less:

    … full model_name=default base_emb_dim=128 base_num_query_heads=1 base_num_kv_heads=1 vocab_size=512 max_target_length=256
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from examples.others.shared import without

# Readers of data, services of clusters, and TPU kernels that a Llama does not use.
without("grain", "tensorflow", "tensorflow_datasets", "datasets", "tiktoken", "sentencepiece", "tokamax", "maxtext.kernels.mhc")
without("pathwaysutils", "google.cloud", "google.genai", "google_cloud_mldiagnostics", "ml_goodput_measurement")
without("cloud_tpu_diagnostics", "cloud_accelerator_diagnostics", "tensorboardX")
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # this process and the compile process of `measure` both load libtpu

import jax  # noqa: E402
import maxtext  # noqa: E402
from flax.linen.partitioning import axis_rules  # noqa: E402
from maxtext.models.llama2 import LlamaDecoderLayer  # noqa: E402
from maxtext.trainers.pre_train import train_compile  # noqa: E402

import remat_jax as rj  # noqa: E402

POLICIES = ("full", "minimal_with_context", "qkv_proj_offloaded", "minimal_offloaded")
SETTINGS = {"compile_topology": "v5p-8", "model_name": "llama2-7b", "per_device_batch_size": "1", "max_target_length": "4096"}
SETTINGS |= {"compile_topology_num_slices": "1", "dataset_type": "synthetic", "enable_checkpointing": "false"}
SETTINGS |= {"override_model_config": "true"}
TIMEOUT = 3600.0

ALLOCATION = re.compile(r"^allocation \d+: size (\d+)((?:, color \d+)?)(.*)$", re.MULTILINE)
PLACES = {"": "", ", color 5": "host_"}
COLUMNS = ("temp, printed", "allocated", "ours", "arguments, printed", "ours", "host, printed", "allocated", "ours")


def allocated(folder: Path) -> dict[str, int]:
    """The bytes that XLA:TPU allocated besides arguments and results, in device and host memory."""
    (path,) = folder.glob("*after_optimizations-buffer-assignment.txt")
    sizes = {"temp": 0, "host_temp": 0}
    for size, space, kind in ALLOCATION.findall(path.read_text(encoding="utf-8")):
        if space in PLACES and ", parameter " not in kind and ", maybe-live-out" not in kind:
            sizes[f"{PLACES[space]}temp"] += int(size)
    return sizes


def compiled_twice(
    remat_policy: str, settings: dict[str, str], policy: str
) -> tuple[dict[str, int], dict[str, int], rj.MemoryReport]:
    """What MaxText prints of its compilation, what XLA:TPU allocated in it, and our report of the same step."""
    reports: list[rj.MemoryReport] = []
    compile_own = train_compile.jit_and_compile

    def compile_both(function: Any, arguments: Any, keywords: Any, mesh: Any, *options: Any) -> Any:
        compiled = compile_own(function, arguments, keywords, mesh, *options)
        inputs, results, _, donated, config, _ = options
        step = jax.jit(function, in_shardings=inputs, out_shardings=results)
        with jax.set_mesh(mesh), mesh, axis_rules(config.logical_axis_rules):
            job = rj.Workload.from_step(step, *arguments, blocks=LlamaDecoderLayer, donate_argnums=donated, name="MaxText")
            reports.append(rj.measure(job, policy, settings["compile_topology"], TIMEOUT))
        return compiled

    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text=True --xla_dump_hlo_module_re=.*"
        given = settings | {"remat_policy": remat_policy, "compile_xla_flags": dump}
        files = ["", f"{maxtext.__path__[0]}/configs/base.yml"]
        train_compile.jit_and_compile = compile_both
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                train_compile.main([*files, *(f"{name}={value}" for name, value in given.items())])
        finally:
            train_compile.jit_and_compile = compile_own
        sizes = allocated(Path(folder))
    analysis = re.findall(r"(\w+)_size_in_bytes=(\d+)", printed.getvalue().rpartition("Memory analysis: ")[2])
    return {name: int(size) for name, size in analysis}, sizes, reports[0]


def row(remat_policy: str, settings: dict[str, str], policy: str) -> str:
    """A row of the table, in bytes of one device."""
    printed, sizes, report = compiled_twice(remat_policy, settings, policy)
    figures = [printed["temp"], sizes["temp"], report.temp_bytes, printed["argument"], report.argument_bytes]
    figures += [printed["host_temp"], sizes["host_temp"], report.host_bytes]
    return " | ".join([f"| `{remat_policy}`", *(f"{figure:,}" for figure in figures)]) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="MaxText's remat policies, and its settings as name=value")
    parser.add_argument("--policy", default="off", help="our policy for the decoder's layers, in place of MaxText's")
    given = parser.parse_args()
    settings = SETTINGS | dict(word.split("=", 1) for word in given.words if "=" in word)
    print(f"| remat_policy | {' | '.join(COLUMNS)} |\n| --- |{' ---: |' * len(COLUMNS)}", flush=True)
    for remat_policy in [word for word in given.words if "=" not in word] or POLICIES:
        print(row(remat_policy, settings, given.policy), flush=True)


if __name__ == "__main__":
    main()
