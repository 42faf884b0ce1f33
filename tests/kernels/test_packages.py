"""Adapters of packages that are not here: stand-ins with the arguments of their releases, our arithmetic."""

import sys
from dataclasses import replace
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import released
import torch
from dense import error, pattern_of, problem

from burst_mcore import Mask, packages
from burst_mcore.attention.geometry.pattern import Packed, Pattern, Piece
from burst_mcore.attention.kernels.kernel import BackwardInputs, Problem, Scores
from burst_mcore.attention.kernels.reference import KERNEL as REFERENCE
from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.mask.bands import UNBOUNDED

STAND_INS = [
    ("flash2", "2.6", "flash-attn", "2.6.3"),
    ("flash2", "2.8", "flash-attn", "2.8.3"),
    ("flash3", "old", "flash_attn_3", "3.0.0"),
    ("flash3", "new", "flash_attn_3", "3.0.0"),
    ("flash4", "new", "flash-attn-4", "4.0.0b36"),
]


@pytest.fixture
def stand_in(request, monkeypatch):
    """A package of some release, and its kernel."""
    name, release, *_ = request.param
    released.install(monkeypatch, *request.param)
    yield SimpleNamespace(kernel=KERNELS[name], release=release)
    packages.loaded.cache_clear()


def of(stand_ins):
    """Each of some releases in turn."""
    return pytest.mark.parametrize(
        "stand_in", stand_ins, indirect=True, ids=lambda each: f"{each[0]}-{each[1]}"
    )


def as_reference(kernel, p, pattern, scores, same=None):
    """Hold a forward and a backward to the reference, of a pattern that it knows as `same`."""
    same = same or pattern
    want = REFERENCE.forward(p.q, p.k, p.v, same, scores)
    out, lse = kernel.forward(p.q.transpose(1, 2).contiguous().transpose(1, 2), p.k, p.v, pattern, scores)
    assert out.shape == want[0].shape and error(out, want[0]) < 1e-12 and error(lse, want[1]) < 1e-12
    x = BackwardInputs(p.dout, p.q, p.k, p.v, out, lse, row_delta(p.dout, out))
    for g, w in zip(kernel.backward(x, pattern, scores), REFERENCE.backward(x, same, scores), strict=True):
        assert g.shape == w.shape and error(g, w) < 1e-12


KINDS = {"causal": (None, 0), "full": (None, None), "window": (2, 13), "right": (None, 10), "left": (5, None)}


@of(STAND_INS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)])
def test_an_adapter_says_what_is_meant_in_the_words_of_its_version(stand_in, kind, dims):
    kernel, scores, rows = stand_in.kernel, Scores(0.3), 24 if kind in ("causal", "full") else 16
    p, pattern = (
        problem(0, 24, batch=2, kv_heads=2, head_dim=dims[0], value_dim=dims[1]),
        Pattern((rows, 24), *KINDS[kind]),
    )
    p = p._replace(q=p.q[:, :rows], dout=p.dout[:, :rows])
    as_reference(kernel, p, pattern, scores)
    found, want = (each.max_logit(p.q, p.k, p.v, pattern, scores) for each in (kernel, REFERENCE))
    assert error(found, want) < 1e-11


@of(STAND_INS)
@pytest.mark.parametrize("bounds", [(-1, 0), (-1, -1), (3, 0), (3, -1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)], ids=str)
def test_an_adapter_takes_packed_sequences_in_one_call(stand_in, bounds, dims):
    kernel, lengths_q, lengths_k = stand_in.kernel, (5, 1, 8), (7, 1, 8)
    parts, m, n = [], 0, 0
    for rows, columns in zip(lengths_q, lengths_k, strict=True):
        low = -UNBOUNDED if bounds[0] < 0 else columns - rows - bounds[0]
        high = UNBOUNDED if bounds[1] < 0 else columns - rows + bounds[1]
        parts.append(Piece(m, m + rows, n, n + columns, low, high))
        m, n = m + rows, n + columns
    pattern = Pattern((m, n), parts=tuple(parts), packed=Packed(lengths_q, lengths_k, *bounds))
    p = problem(0, n, batch=2, kv_heads=2, head_dim=dims[0], value_dim=dims[1])
    p = p._replace(q=p.q[:, :m], dout=p.dout[:, :m])
    as_reference(kernel, p, pattern, Scores(0.3), Pattern((m, n), parts=tuple(parts)))


@of(STAND_INS)
def test_a_softcap_arrives(stand_in):
    as_reference(stand_in.kernel, problem(0, 16), pattern_of(Mask.causal(), 16), Scores(0.25, softcap=1.5))


UNUSABLE = [
    *((name, {}, f"{name}.*not usable here") for name in released.MODULES),
    ("te", {}, "unknown kernel 'te'; legal: 'auto', .*'cudnn'"),
    ("flash3", {"value_dim": 64}, "may differ as 192 and 128 do"),
    ("flash3", {"head_dim": 256, "value_dim": 256, "deterministic": True}, "up to head dim 192"),
    ("flash4", {"head_dim": 192, "kv_heads": 2}, "without GQA"),
    ("flash2", {"dtype": torch.float32}, "float32"),
    ("flash2", {"device": "cpu"}, "not on cuda"),
]
ON_CUDA = Problem("cuda", torch.bfloat16, 8, 8, 128, 128)


@pytest.mark.parametrize(("name", "ask", "words"), UNUSABLE)
def test_an_adapter_refuses_what_its_package_cannot_and_says_where_that_is_not_here(name, ask, words):
    with pytest.raises(ValueError, match=words):
        choose(name, replace(ON_CUDA, **ask))


def test_a_version_out_of_range_says_which_are_legal(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", ModuleType("x"))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setattr(metadata, "version", lambda asked: "2.4.1")
    packages.loaded.cache_clear()
    with pytest.raises(ValueError, match="flash-attn 2.4.1 is not from 2.6 on and below 2.9"):
        choose("flash2", ON_CUDA)
    packages.loaded.cache_clear()
