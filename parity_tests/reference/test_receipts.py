"""A receipt: the bytes that offloads offered, put on the host, freed and brought back."""

from __future__ import annotations

import torch

import torch_ref
from examples import pytorch
from parity_tests.reference.blocks import call
from torch_ref.faithful import gradient_checkpoint_forward as faithful


def test_an_offload_of_a_decoder_in_full():
    torch.manual_seed(0)
    model = pytorch.DecoderStack(3, 8, 2)
    x = torch.randn(2, 4, 8)
    with torch_ref.receipt() as r:
        y = model(x + 0, use_gradient_checkpointing_offload=True)
        assert (r.bytes_offered, r.bytes_on_host, r.tensors_packed, r.bytes_brought_back) == (768, 768, 3, 0)
        assert r.bytes_released == 768
        assert r.warnings == ()
    y.sum().backward()
    assert r.bytes_brought_back == 768
    entries = [(e.block, e.mode, e.form, e.bytes_offered, e.bytes_on_host, e.bytes_brought_back) for e in r.calls]
    assert entries == [("DecoderLayer", "offload", "right", 256, 256, 256)] * 3


def test_an_offload_that_moved_nothing_says_so():
    x = torch.ones(2, 3, requires_grad=True)
    with torch_ref.receipt() as r:
        faithful(pytorch.ToyModel(), True, True, x=x)
    assert len(r.warnings) == 1
    assert "1 offloaded call(s) moved 0 of the 24 offered bytes to the host (ToyModel)" in r.warnings[0]
    assert "the faithful form moves positional tensors only" in r.warnings[0]


def test_an_offload_that_freed_nothing_says_so():
    x = torch.ones(2, 3, requires_grad=True)
    with torch_ref.receipt() as r:
        _y = call("offload", pytorch.ToyModel(), x=x)
    assert r.warnings == ("24 bytes are on the host, but no device memory was freed: something else still holds the tensors.",)


def test_a_storage_gives_back_all_of_it_and_once():
    whole = torch.ones(100) * 1
    with torch_ref.receipt() as r:
        _y = call("offload", lambda a, b: a * b * torch.ones(1, requires_grad=True), whole[:10], whole[10:20])
        assert (r.bytes_on_host, r.bytes_released) == (80, 0)
        del whole
    assert r.bytes_released == 400


def test_calls_that_could_keep_nothing_say_so():
    with torch_ref.receipt() as empty:
        pass
    assert empty.warnings == ("no block was called through torch_ref inside this receipt.",)
    with torch_ref.receipt() as r, torch.no_grad():
        call("offload", pytorch.ToyModel(), torch.ones(2))
    assert r.warnings == ("ToyModel: called with gradients disabled, so mode 'offload' had nothing to keep.",)


def test_receipts_nest_and_end():
    x = torch.ones(2, requires_grad=True)
    with torch_ref.receipt() as outer:
        call("off", torch.exp, x)
        with torch_ref.receipt() as inner:
            call("checkpoint", torch.sin, x).sum().backward()
    call("off", torch.cos, x)
    assert [(e.block, e.mode) for e in outer.calls] == [("exp", "off"), ("sin", "checkpoint")]
    assert [e.block for e in inner.calls] == ["sin"]
    assert (outer.bytes_offered, outer.bytes_on_host, outer.bytes_brought_back, outer.warnings) == (0, 0, 0, ())
