"""The doctor: each trap is planted and found by its name, a figure shows its harm, and its remedy removes it."""

from __future__ import annotations

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import remat_jax as rj
from remat_jax import compat, doctor
from remat_jax.core.rewrite import count_regions
from remat_jax.cost.count import matmuls
from remat_jax.diagnosis import Diagnosis
from remat_jax.errors import PolicyError
from tests.small_models import Mlp, Stack, make_loss, to_host
from tests.workloads import Perceptron, mean_square, struct

POLICIES = jax.checkpoint_policies
WIDTH, ROWS = 8, 4


def traps(diagnosis: Diagnosis) -> list[str]:
    return [finding.trap for finding in diagnosis.findings]


def job(model: Any, blocks: Any, **options: Any) -> rj.Workload:
    return mean_square(model, struct(ROWS, WIDTH), blocks, **options)


def executed(workload: rj.Workload, policy: Any = "off") -> int:
    """Matrix multiplications of one gradient under the policy."""
    return matmuls(jax.value_and_grad(workload.with_policy(workload.loss, policy)), workload.params, *workload.batch)


def small(*, scanned: bool = False) -> rj.Workload:
    loss, params, x = make_loss(scanned=scanned)
    return rj.Workload(loss, params, (x,), Mlp)


def test_a_selector_that_matches_nothing_is_named_with_all_others_of_its_kind():
    diagnosis = doctor(small(), "save: atention_out, @dots; offload: *Linear_2*")
    assert traps(diagnosis) == ["unmatched_name"] * 2
    assert ["'atention_out'" in diagnosis.findings[0].problem, "'*Linear_2*'" in diagnosis.findings[1].problem] == [True, True]
    assert diagnosis.findings[0].block == "layer_0, layer_1"
    assert "Did you mean 'layer_0:tanh#0'" in doctor(small(), "save: *layer_9:tanh*").findings[0].remedy
    assert doctor(small(), "save: @dots").ok


class Named(nn.Module):
    policy: Any = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def mlp(module: Any, x: Any) -> Any:
            hidden = checkpoint_name(nn.Dense(WIDTH, name="up")(x), "hidden")
            return nn.Dense(WIDTH, name="down")(jnp.tanh(hidden))

        return nn.remat(mlp, policy=self.policy)(self, x) if self.policy is not None else mlp(self, x)


def test_a_misspelt_name_in_a_policy_of_jaxs_recomputes_everything():
    wrong = job(Named(POLICIES.save_only_these_names("hiden")), Named)
    right = job(Named(POLICIES.save_only_these_names("hidden")), Named)
    assert traps(doctor(wrong, "off")) == ["unmatched_name"]
    assert "Did you mean 'hidden'" in doctor(wrong, "off").findings[0].remedy
    assert doctor(right, "off").ok
    assert executed(wrong) - executed(right) == 1


def test_a_name_that_only_another_region_gives_is_no_trap():
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            policy = POLICIES.save_only_these_names("hidden", "kept")

            def kept_dense(module: Any, x: Any) -> Any:
                return jnp.sin(checkpoint_name(nn.Dense(WIDTH)(x), "kept"))

            return nn.remat(kept_dense, policy=policy)(self, Named(policy)(x))

    assert doctor(job(Two(), Named), "off").ok


def test_policy_none_is_told_and_what_is_meant():
    diagnosis = doctor(small(), None)
    assert traps(diagnosis) == ["policy_none"] and diagnosis.policy == "None"
    assert '"full"' in diagnosis.findings[0].remedy
    assert traps(doctor(small(), {Mlp: None})) == ["policy_none"]
    # The trap: in JAX this policy recomputes everything.
    loss, params, x = make_loss()
    recomputing = jax.value_and_grad(jax.checkpoint(loss, policy=None))
    assert matmuls(recomputing, params, x) - matmuls(jax.value_and_grad(loss), params, x) == 4
    assert doctor(small(), "full").ok


def test_a_block_that_is_never_called():
    class Elsewhere(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return x

    diagnosis = doctor(small(), {Mlp: "full", Elsewhere: "full", "layers_*": "full"})
    assert traps(diagnosis) == ["unreached_block"] * 2
    assert [finding.block for finding in diagnosis.findings] == ["Elsewhere", "layers_*"]
    assert doctor(small(), {"layer_*": "full"}).ok


class Output(nn.Module):
    """Two matmuls; its output has a name."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return checkpoint_name(x + nn.Dense(WIDTH)(jnp.tanh(nn.Dense(WIDTH)(x))), "block_out")


def by_names(name: str) -> Any:
    return POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=[name], offload_src="device", offload_dst="pinned_host"
    )


@pytest.mark.parametrize("scan", [True, False])
def test_offloading_the_output_of_a_block_by_name_leaves_the_next_ones_input_on_the_device(scan):
    workload = job(Stack(Output, 3, scan), Output)
    policy = "offload: block_out, @dots_with_no_batch_dims"
    assert traps(doctor(workload, policy)) == ["named_output"]
    assert traps(doctor(workload, "offload: block_out")) == ["named_output"]
    kept = rj.residuals(workload, policy)
    carried = 3 * ROWS * WIDTH * 4
    assert kept.host_bytes == carried  # the first product of each block, and nothing of its output
    cured = "offload: @inputs, @dots_with_no_batch_dims"
    assert doctor(workload, cured).ok
    after = rj.residuals(workload, cured)
    assert after.host_bytes - kept.host_bytes == carried
    assert kept.device_bytes - after.device_bytes >= 2 * ROWS * WIDTH * 4


@pytest.mark.versions
@pytest.mark.parametrize("flags", [(), ("remat3",)])
def test_the_same_in_a_scan_of_the_users_own(flags, with_flags):
    with_flags(f"jax_{flag}" for flag in flags)

    def workload(name: str) -> rj.Workload:
        def block(x: Any, w: Any) -> Any:
            x = checkpoint_name(x, "block_in")
            return checkpoint_name(jnp.sin(x @ w), "block_out"), None

        def loss(w: Any, x: Any) -> Any:
            return (jax.lax.scan(jax.checkpoint(block, policy=by_names(name)), x, w)[0] ** 2).mean()

        return rj.Workload(loss, struct(3, WIDTH, WIDTH), (struct(ROWS, WIDTH),), "scans")

    diagnosis = doctor(workload("block_out"), "off")
    assert traps(diagnosis) == ["named_output"] and "scan" in diagnosis.findings[0].problem
    assert doctor(workload("block_in"), "off").ok
    bytes_of = [rj.residuals(workload(name), "off").host_bytes for name in ("block_out", "block_in")]
    ignored = compat.remat3() and compat.JAX_VERSION < (0, 11, 2)
    assert bytes_of == [0, 0 if ignored else 3 * ROWS * WIDTH * 4]


def test_an_offload_of_what_the_backward_pass_does_not_read():
    # Flax numbers modules in the order of their creation: Linear_1 comes first in a block.
    diagnosis = doctor(small(), "offload: */Linear_0:dot_general*")
    assert traps(diagnosis) == ["offload_without_effect"]
    assert doctor(small(), "offload: */Linear_1:dot_general*").ok
    loss, params, x = make_loss()
    with pytest.raises(PolicyError, match="offloads nothing"):
        rj.checkpoint_blocks(loss, {Mlp: "offload: */Linear_0:dot_general*"})(params, x)
    assert (
        to_host(jax.grad(rj.checkpoint_blocks(loss, {Mlp: "offload: */Linear_1:dot_general*"})), params, x) == [(2, 3, 3)] * 2
    )


def test_the_pinned_pool(monkeypatch):
    workload = mean_square(Stack(Output, 3), struct(2**27, WIDTH), Output)  # 4 GiB for each array of this shape
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "11")
    diagnosis = doctor(workload, "offload_inputs")
    assert traps(diagnosis) == ["pinned_pool"] and "12.0 GiB" in diagnosis.findings[0].problem
    assert rj.residuals(workload, "offload_inputs").host_bytes == 12 * 2**30
    assert "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=13" in diagnosis.findings[0].remedy
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "13")
    assert doctor(workload, "offload_inputs").ok
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    assert doctor(workload, "offload_inputs").ok
    larger = mean_square(Stack(Output, 3), struct(6 * 2**27, WIDTH), Output)
    assert "64.0 GiB" in doctor(larger, "offload_inputs").findings[0].problem


class Checkpointed(nn.Module):
    """Blocks that are checkpointed one by one, and all together once more."""

    around: bool
    policy: Any = None
    block: Any = Perceptron

    @nn.compact
    def __call__(self, x: Any) -> Any:
        def run(module: Any, x: Any) -> Any:
            for index in range(3):
                x = nn.remat(self.block)(name=f"layer_{index}")(x)
            return x

        return nn.remat(run, policy=self.policy)(self, x) if self.around else run(self, x)


def test_one_checkpoint_around_all_others_runs_everything_three_times():
    nested, single = job(Checkpointed(True), Checkpointed), job(Checkpointed(False), Checkpointed)
    diagnosis = doctor(nested, "off")
    assert traps(diagnosis) == ["nested_checkpoint"]
    assert doctor(single, "off").ok
    assert executed(nested) - executed(single) == 4  # both products of the first two blocks once more
    # A policy of the workload is such a checkpoint too.
    assert traps(doctor(single, "full")) == ["nested_checkpoint"]


def test_nested_checkpoints_that_trade_time_for_memory_are_left_alone():
    class Groups(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for index in range(2):
                x = Checkpointed(True, name=f"group_{index}")(x)
            return x

    class Head(nn.Module):
        """The head needs more than a block: without the outer checkpoint the blocks' inputs are alive during it."""

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return jnp.sin(nn.Dense(100 * WIDTH)(Checkpointed(True)(x)))

    assert doctor(job(Groups(), Groups), "off").ok
    assert doctor(job(nn.remat_scan(Mlp, lengths=(2, 2))(), Mlp), "off").ok
    assert doctor(job(Head(), Head), "off").ok


def test_a_checkpoint_of_the_models_own_throws_away_what_the_policy_keeps_inside():
    class Model(nn.Module):
        own: bool

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return (nn.remat(Stack) if self.own else Stack)(Mlp, 3)(x)

    replaced, free = job(Model(True), Mlp), job(Model(False), Mlp)
    overruled = rj.Workload(replaced.loss, replaced.params, replaced.batch, Mlp, own_checkpoints="keep")
    diagnosis = doctor(overruled, "dots")
    assert "overruled_policy" in traps(diagnosis) and "policy=None" in diagnosis.findings[0].problem
    assert doctor(free, "dots").ok and doctor(replaced, "dots").ok
    products = 3 * ROWS * 3 * 4  # of width 3, one for each of three blocks
    kept = [rj.residuals(workload, "dots").device_bytes for workload in (overruled, free)]
    assert kept[1] - kept[0] >= products


def test_remat_scan_of_one_length_applies_no_checkpoint():
    one_length, two_lengths = (nn.remat_scan(Mlp, lengths=lengths)() for lengths in ((4,), (2, 2)))
    diagnosis = doctor(job(one_length, Mlp), "off")
    assert traps(diagnosis) == ["remat_scan_of_one_length"]
    losses = [job(model, Mlp) for model in (one_length, two_lengths)]
    assert [count_regions(jax.make_jaxpr(made.loss)(made.params, *made.batch)) for made in losses] == [0, 1]
    assert doctor(job(two_lengths, Mlp), "off").ok
    assert doctor(job(one_length, Mlp), "full").ok
    assert executed(job(one_length, Mlp), "full") > executed(job(one_length, Mlp))


class Flagged(nn.Module):
    """A block with a flag, as in OpenPI; nn.remat counts self as argument 0."""

    @nn.compact
    def __call__(self, x: Any, scale: float, deterministic: bool) -> Any:
        wide = nn.Dense(WIDTH, name="wide")(x) * scale
        return jnp.where(deterministic, x, wide) if isinstance(deterministic, jax.Array) else (x if deterministic else wide)


def with_flag(index: int) -> rj.Workload:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            block = nn.remat(Flagged, static_argnums=(index,))
            return nn.Dense(WIDTH)(block(name="block")(x, 2.0, True))

    dense = {"kernel": struct(WIDTH, WIDTH), "bias": struct(WIDTH)}
    params = {"params": {"Dense_0": dense, "block": {"wide": dense}}}
    return rj.Workload(lambda p, x: Model().apply(p, x).sum(), params, (struct(ROWS, WIDTH),), Model)


def test_a_flag_that_is_traced_because_its_index_is_wrong():
    wrong, right = with_flag(2), with_flag(3)
    diagnosis = doctor(wrong, "off")
    assert traps(diagnosis) == ["traced_flag"] and "self as argument 0" in diagnosis.findings[0].remedy
    assert doctor(right, "off").ok
    assert executed(wrong) > executed(right)


def test_the_diagnosis_is_plain_data_and_prints():
    diagnosis = doctor(small(), "save: atention_out")
    plain = json.loads(json.dumps(diagnosis.to_dict()))
    assert plain["ok"] is False and plain["target"] is None and plain["policy"] == "save: atention_out"
    assert plain["findings"][0]["trap"] == "unmatched_name" and plain["regions"] == 1
    assert not diagnosis and "unmatched_name" in str(diagnosis) and "layer_0" in str(diagnosis)
    well = doctor(small(), "full")
    assert well and "no traps; one checkpointed region.\nName a GPU or TPU as the target" in str(well)
    assert "no traps; nothing is checkpointed." in str(doctor(small(), "off"))
    assert "(traced, not compiled): 1 trap\n" in str(diagnosis)
