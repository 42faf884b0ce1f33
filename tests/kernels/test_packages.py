"""Adapters of packages that are not here: stand-ins with the signatures of their versions, our arithmetic."""

import functools
import inspect
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from dense import dense, error, pattern_of, problem

from burst_mcore import Mask, packages
from burst_mcore.attention.geometry.pattern import Packed, Pattern, Piece
from burst_mcore.attention.geometry.tiles import Launches
from burst_mcore.attention.kernels import te as te_module
from burst_mcore.attention.kernels import wrappers as shapes
from burst_mcore.attention.kernels.kernel import BackwardInputs, Problem, Scores
from burst_mcore.attention.kernels.reference import KERNEL as REFERENCE
from burst_mcore.attention.kernels.table import KERNELS, PREFERENCE, by_rank, choose
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.mask.bands import UNBOUNDED

PACKAGES = ("flash2", "flash3", "flash4", "te")


def _pattern(q, k, causal, left, right, unbounded):
    """As FlashAttention counts: from the lower right corner."""
    rows, columns = q.shape[1], k.shape[1]
    apart = columns - rows
    if causal:
        return Pattern((rows, columns), high=apart)
    low, high = (None if bound == unbounded else bound for bound in (left, right))
    return Pattern(
        (rows, columns), None if low is None else apart - low, None if high is None else apart + high
    )


def _forward(q, k, v, scale, softcap, pattern):
    return REFERENCE.forward(q, k, v, pattern, Scores(scale, softcap or None))


def _backward(x, scale, softcap, pattern):
    return REFERENCE.backward(x, pattern, Scores(scale, softcap or None))


def _fill(found, buffers):
    for to, share in zip(buffers, found, strict=True):
        to.copy_(share)


def _of_out(dout, q, k, v, out, lse):
    return BackwardInputs(dout, q, k, v, None, lse, row_delta(dout, out))


def _each(ends, q, k):
    """(rows, columns) of each sequence of [total, H, D]."""
    of_q, of_k, longest_q, longest_k = ends
    assert of_q.dtype == of_k.dtype == torch.int32 and (of_q[-1], of_k[-1]) == (len(q), len(k))
    assert (of_q.diff().max(), of_k.diff().max()) == (longest_q, longest_k)
    assert q.is_contiguous() and k.is_contiguous()
    return [
        (slice(*m), slice(*n)) for m, n in zip(pairwise(of_q.tolist()), pairwise(of_k.tolist()), strict=True)
    ]


def _packed_forward(q, k, v, ends, scale, softcap, causal, left, right, unbounded):
    """By cu_seqlens: out [total, H, D], lse [H, total]."""
    outs, lses = [], []
    for m, n in _each(ends, q, k):
        one = q[None, m], k[None, n], v[None, n]
        out, lse = _forward(*one, scale, softcap, _pattern(*one[:2], causal, left, right, unbounded))
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def _packed_backward(x, ends, scale, softcap, causal, left, right, unbounded, dlse=None):
    dout, q, k, v, out, lse = x
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    gradients = [torch.full_like(y, torch.nan) for y in (q, k, v)]
    for m, n in _each(ends, q, k):
        one = _of_out(dout[None, m], q[None, m], k[None, n], v[None, n], out[None, m], lse[None, :, m])
        if dlse is not None:
            one = one._replace(delta=one.delta - dlse[None, :, m])
        found = _backward(one, scale, softcap, _pattern(one.q, one.k, causal, left, right, unbounded))
        for to, rows, share in zip(gradients, (m, n, n), found, strict=True):
            to[rows] = share[0]
    return gradients


def _flash2(version):
    def forward_26(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax
    ):
        assert dropout_p == 0.0 and alibi_slopes is None and return_softmax is False
        out, lse = _forward(q, k, v, softmax_scale, softcap, _pattern(q, k, causal, *window_size, -1))
        return out, q, k, v, out, lse, None, None

    def backward_26(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert dropout_p == 0.0 and deterministic is False
        x, pattern = _of_out(dout, q, k, v, out, softmax_lse), _pattern(q, k, causal, *window_size, -1)
        _fill(_backward(x, softmax_scale, softcap, pattern), (dq, dk, dv))

    def varlen_forward_26(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    ):  # fmt: skip
        ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        out, lse = _packed_forward(q, k, v, ends, softmax_scale, softcap, causal, *window_size, -1)
        return out, q, k, v, out, lse, None, None

    def varlen_backward_26(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        ends, x = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (dout, q, k, v, out, softmax_lse)
        _fill(_packed_backward(x, ends, softmax_scale, softcap, causal, *window_size, -1), (dq, dk, dv))

    def varlen_forward_28(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        ends, window = (
            (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            (window_size_left, window_size_right),
        )
        return *_packed_forward(q, k, v, ends, softmax_scale, softcap, causal, *window, -1), None, None

    def varlen_backward_28(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        ends, x = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), (dout, q, k, v, out, softmax_lse)
        window = window_size_left, window_size_right
        _fill(_packed_backward(x, ends, softmax_scale, softcap, causal, *window, -1), (dq, dk, dv))

    def forward_28(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, return_softmax,
    ):  # fmt: skip
        pattern = _pattern(q, k, causal, window_size_left, window_size_right, -1)
        return *_forward(q, k, v, softmax_scale, softcap, pattern), None, None

    def backward_28(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        pattern = _pattern(q, k, causal, window_size_left, window_size_right, -1)
        _fill(
            _backward(_of_out(dout, q, k, v, out, softmax_lse), softmax_scale, softcap, pattern), (dq, dk, dv)
        )

    old = version < "2.7"
    forward, backward = (forward_26, backward_26) if old else (forward_28, backward_28)
    varlen = (varlen_forward_26, varlen_backward_26) if old else (varlen_forward_28, varlen_backward_28)
    return {
        "flash_attn.flash_attn_interface": {
            "_flash_attn_forward": forward,
            "_flash_attn_backward": backward,
            "_flash_attn_varlen_forward": varlen[0],
            "_flash_attn_varlen_backward": varlen[1],
        }
    }


def _flash3(version):
    def forward_old(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, num_splits=1,
    ):  # fmt: skip
        assert qv is None and num_splits == 1
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            return *_packed_forward(q, k, v, ends, softmax_scale, softcap, causal, *window_size, -1), None
        return *_forward(q, k, v, softmax_scale, softcap, _pattern(q, k, causal, *window_size, -1)), None

    def backward_old(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # fmt: skip
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            x = dout, q, k, v, out, softmax_lse
            found = _packed_backward(x, ends, softmax_scale, softcap, causal, *window_size, -1)
            _fill(found, (dq, dk, dv))
            return
        pattern = _pattern(q, k, causal, *window_size, -1)
        _fill(
            _backward(_of_out(dout, q, k, v, out, softmax_lse), softmax_scale, softcap, pattern), (dq, dk, dv)
        )

    def forward_new(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False, window_size_left=-1,
        window_size_right=-1, attention_chunk=0, softcap=0.0, num_splits=1,
    ):  # fmt: skip
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            window = window_size_left, window_size_right
            return *_packed_forward(q, k, v, ends, softmax_scale, softcap, causal, *window, -1), None, None
        pattern = _pattern(q, k, causal, window_size_left, window_size_right, -1)
        return *_forward(q, k, v, softmax_scale, softcap, pattern), None, None

    def backward_new(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        if cu_seqlens_q is not None:
            ends, window = (
                (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
                (window_size_left, window_size_right),
            )
            x = dout, q, k, v, out, softmax_lse
            found = _packed_backward(x, ends, softmax_scale, softcap, is_causal, *window, -1)
            _fill(found, (dq, dk, dv))
            return
        pattern = _pattern(q, k, is_causal, window_size_left, window_size_right, -1)
        _fill(
            _backward(_of_out(dout, q, k, v, out, softmax_lse), softmax_scale, softcap, pattern), (dq, dk, dv)
        )

    old = version == "old"
    forward, backward = (forward_old, backward_old) if old else (forward_new, backward_new)
    return {"flash_attn_interface": {"_flash_attn_forward": forward, "_flash_attn_backward": backward}}


def _flash4(version):
    def forward(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        return_lse=False,
    ):  # fmt: skip
        assert return_lse
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            window = window_size_left, window_size_right
            found = _packed_forward(q, k, v, ends, softmax_scale, softcap, causal, *window, None)
            return *found, None, None, None
        pattern = _pattern(q, k, causal, window_size_left, window_size_right, None)
        return *_forward(q, k, v, softmax_scale, softcap, pattern), None, None, None

    def backward(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False,
        num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False,
        AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None,
        cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        deterministic=False, dq=None, dk=None, dv=None, score_mod=None, score_mod_bwd=None, mask_mod=None,
        aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, learnable_sink=None,
    ):  # fmt: skip
        assert out.shape == dout.shape and out.stride(-1) == 1  # its check lets strides of 0 pass
        room = [by for many, by in zip(out.shape[:-1], out.stride(), strict=False) if many > 1]
        assert not any(room), "a row of zeros takes the memory of a row"
        if cu_seqlens_q is not None:
            ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
            x, window = (dout, q, k, v, out, lse), (window_size_left, window_size_right)
            return _packed_backward(x, ends, softmax_scale, softcap, causal, *window, None, dlse)
        pattern = _pattern(q, k, causal, window_size_left, window_size_right, None)
        x = BackwardInputs(dout, q, k, v, None, lse, row_delta(dout, out) - dlse)
        return _backward(x, softmax_scale, softcap, pattern)

    return {"flash_attn.cute.interface": {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}}


def _checked_by_te(
    qkv_layout, cu_seqlens_q, cu_seqlens_q_padded, cu_seqlens_kv, cu_seqlens_kv_padded, tensors
):
    assert all(x.is_contiguous() for x in tensors)
    if qkv_layout == "bshd_bshd_bshd":
        q = tensors[0]
        assert cu_seqlens_q.tolist() == [i * q.shape[1] for i in range(q.shape[0] + 1)]
        return
    assert qkv_layout == "thd_thd_thd"
    assert cu_seqlens_q_padded is cu_seqlens_q and cu_seqlens_kv_padded is cu_seqlens_kv


def _causal_in_te(attn_mask_type, packed, ends):
    """Whether, from the lower right corner: the upper left one is the same where lengths are equal."""
    if not packed:
        return {"causal": True, "no_mask": False}[attn_mask_type]
    if attn_mask_type == "padding_causal":
        assert torch.equal(ends[0], ends[1])
    elif attn_mask_type == "padding_causal_bottom_right":
        assert ends[2] <= ends[3]
    return {"padding": False, "padding_causal": True, "padding_causal_bottom_right": True}[attn_mask_type]


def _te(version):
    new = version == "2.15"
    tokens_of_plan = 1024  # statistics of packed calls have as many rows as their plan

    def forward(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype,
        fused_attention_backend, attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        page_table_k=None, page_table_v=None, attn_scale=None, dropout=0.0, qkv_layout="sbh3d",
        attn_bias_type="no_bias", attn_mask_type="padding", window_size=(-1, -1),
    ):  # fmt: skip
        assert is_training and fused_attention_backend == 1 and window_size == (-1, -1)
        _checked_by_te(
            qkv_layout, cu_seqlens_q, cu_seqlens_q_padded, cu_seqlens_kv, cu_seqlens_kv_padded, (q, k, v)
        )
        ends = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
        causal = _causal_in_te(attn_mask_type, q.dim() == 3, ends)
        if q.dim() == 3:
            out, lse = _packed_forward(q, k, v, ends, attn_scale, None, causal, -1, -1, -1)
            statistics = torch.full((tokens_of_plan, q.shape[1], 1), torch.nan, dtype=lse.dtype)
            statistics[: len(q)] = lse.T[..., None]
            return out, [statistics, torch.zeros(2)], None
        out, lse = _forward(q, k, v, attn_scale, None, _pattern(q, k, causal, -1, -1, -1))
        return out, [lse.unsqueeze(-1), torch.zeros(2)], None

    def forward_29(*args, return_max_logit=False, **given):
        out, aux, _ = forward(*args, **given)
        q, k, v = (inspect.signature(forward).bind(*args, **given).arguments[name] for name in "qkv")
        if not return_max_logit:
            return out, aux
        assert q.dim() == 4  # of packed sequences it would be that of padding, too, before 2.17
        pattern = _pattern(q, k, given["attn_mask_type"] == "causal", -1, -1, -1)
        return out, aux, REFERENCE.forward(q, k, v, pattern, Scores(given["attn_scale"], max_logit=True))[2]

    places = inspect.signature(forward).parameters.values()
    asked = inspect.Parameter("return_max_logit", inspect.Parameter.KEYWORD_ONLY, default=False)
    forward_29.__signature__ = inspect.Signature([*places, asked])

    def gradients(q, k, v, o, d_o, aux, ends, attn_scale, attn_mask_type):
        causal = _causal_in_te(attn_mask_type, q.dim() == 3, ends)
        assert aux[1].shape == (2,) and aux[0].is_contiguous()
        if q.dim() == 3:
            assert aux[0].shape == (len(q), q.shape[1], 1)
            x = d_o, q, k, v, o, aux[0].squeeze(-1).T.contiguous()
            return *_packed_backward(x, ends, attn_scale, None, causal, -1, -1, -1), None
        assert aux[0].shape == (q.shape[0], q.shape[2], q.shape[1], 1)
        x = _of_out(d_o, q, k, v, o, aux[0].squeeze(-1))
        return *_backward(x, attn_scale, None, _pattern(q, k, causal, -1, -1, -1)), None

    def backward_20(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype,
        aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        attn_scale=None, dropout=0.0, qkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding",
        window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert dqkv_dtype == "the type" and fused_attention_backend == 1
        tensors, of_kv = (q, k, v, o, d_o), (cu_seqlens_kv, cu_seqlens_kv_padded)
        _checked_by_te(qkv_layout, cu_seqlens_q, cu_seqlens_q_padded, *of_kv, tensors)
        ends = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
        return gradients(*tensors, aux_ctx_tensors, ends, attn_scale, attn_mask_type)

    def backward_215(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype,
        aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
        attn_scale=None, dropout=0.0, qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd",
        dqkv_layout="sbh3d", attn_bias_type="no_bias", attn_mask_type="padding", window_size=(-1, -1),
        deterministic=False,
    ):  # fmt: skip
        assert qkv_layout == dqkv_layout and o_format == do_format == qkv_layout[: len(o_format)]
        tensors, of_kv = (q, k, v, o, d_o), (cu_seqlens_kv, cu_seqlens_kv_padded)
        _checked_by_te(qkv_layout, cu_seqlens_q, cu_seqlens_q_padded, *of_kv, tensors)
        ends = cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv
        return gradients(*tensors, aux_ctx_tensors, ends, attn_scale, attn_mask_type)

    dtypes = {dtype: "the type" for dtype in (torch.float64, torch.float32)}
    return {
        "transformer_engine.pytorch.cpp_extensions.fused_attn": {
            "fused_attn_fwd": forward_29 if new else forward,
            "fused_attn_bwd": backward_215 if new else backward_20,
            "FusedAttnBackend": {"F16_arbitrary_seqlen": 1},
        },
        "transformer_engine.pytorch.constants": {"TE_DType": dtypes},
        "transformer_engine.pytorch.utils": {"get_cudnn_version": lambda: (9, 8, 0)},
    }


STAND_INS = [
    ("flash2", "flash-attn", "2.6.3", _flash2),
    ("flash2", "flash-attn", "2.8.3", _flash2),
    ("flash3", "flash_attn_3", "old", _flash3),
    ("flash3", "flash_attn_3", "3.0.0", _flash3),
    ("flash4", "flash-attn-4", "4.0.0b36", _flash4),
    ("te", "transformer_engine", "2.0.0", _te),
    ("te", "transformer_engine", "2.15.0", _te),
]


@pytest.fixture
def stand_in(request, monkeypatch):
    """A package of some version, and its kernel."""
    name, package, version, make = request.param
    for path, members in make("2.15" if version == "2.15.0" else version).items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        sys.modules[path].__dict__.update(members)
    real = metadata.version
    told = "3.0.0" if version == "old" else version
    monkeypatch.setattr(metadata, "version", lambda asked: told if asked == package else real(asked))
    monkeypatch.setattr(shapes, "LEAST", 1)  # what is tested here is small
    packages.loaded.cache_clear()
    yield SimpleNamespace(kernel=KERNELS[name], version=version)
    packages.loaded.cache_clear()


@pytest.mark.parametrize("stand_in", STAND_INS, indirect=True, ids=lambda each: f"{each[0]}-{each[2]}")
@pytest.mark.parametrize("kind", ["causal", "full", "window", "to the right", "to the left"])
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)])
def test_an_adapter_says_what_is_meant_in_the_words_of_its_version(stand_in, kind, dims):
    kernel, n = stand_in.kernel, 24
    p = problem(0, n, batch=2, kv_heads=2, head_dim=dims[0], value_dim=dims[1])
    rows, pattern = n, Pattern((n, n), high=0 if kind == "causal" else None)
    if kind not in ("causal", "full"):
        if not kernel.abilities.windows:
            pytest.skip("it takes no windows")
        rows, (low, high) = (
            16,
            {"window": (2, 13), "to the right": (None, 10), "to the left": (5, None)}[kind],
        )
        pattern = Pattern((rows, n), low, high)
    p = p._replace(q=p.q[:, :rows], dout=p.dout[:, :rows])
    scores = Scores(0.3)
    want_out, want_lse = REFERENCE.forward(p.q, p.k, p.v, pattern, scores)
    out, lse = kernel.forward(p.q.transpose(1, 2).contiguous().transpose(1, 2), p.k, p.v, pattern, scores)
    assert error(out, want_out) < 1e-12 and error(lse, want_lse) < 1e-12
    x = BackwardInputs(p.dout, p.q, p.k, p.v, out, lse, row_delta(p.dout, out))
    for g, w in zip(kernel.backward(x, pattern, scores), REFERENCE.backward(x, pattern, scores), strict=True):
        assert error(g, w) < 1e-12
    scores = Scores(0.3, max_logit=True)
    *_, want_largest = REFERENCE.forward(p.q, p.k, p.v, pattern, scores)
    *_, found = kernel.forward(p.q, p.k, p.v, pattern, scores)
    if stand_in.version != "2.15.0":
        found = kernel.max_logit(p.q, p.k, p.v, pattern, scores)
    assert error(found, want_largest) < 1e-11


@pytest.mark.parametrize("stand_in", STAND_INS, indirect=True, ids=lambda each: f"{each[0]}-{each[2]}")
@pytest.mark.parametrize("bounds", [(-1, 0), (-1, -1), (3, 0), (3, -1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)], ids=str)
def test_an_adapter_takes_packed_sequences_in_one_call(stand_in, bounds, dims):
    kernel, lengths_q, lengths_k = stand_in.kernel.of_documents or stand_in.kernel, (5, 1, 8), (7, 1, 8)
    if kernel.name == "te" and bounds[0] >= 0:
        pytest.skip("it leaves windows to a kernel of torch's, which is on CUDA alone")
    parts, m, n = [], 0, 0
    for rows, columns in zip(lengths_q, lengths_k, strict=True):
        low = -UNBOUNDED if bounds[0] < 0 else columns - rows - bounds[0]
        high = UNBOUNDED if bounds[1] < 0 else columns - rows + bounds[1]
        parts.append(Piece(m, m + rows, n, n + columns, low, high))
        m, n = m + rows, n + columns
    pattern = Pattern((m, n), parts=tuple(parts), packed=Packed(lengths_q, lengths_k, *bounds))
    p = problem(0, n, batch=2, kv_heads=2, head_dim=dims[0], value_dim=dims[1])
    p = p._replace(q=p.q[:, :m], dout=p.dout[:, :m])
    scores, same = Scores(0.3), Pattern((m, n), parts=tuple(parts))
    want = REFERENCE.forward(p.q, p.k, p.v, same, scores)
    out, lse = kernel.forward(p.q, p.k, p.v, pattern, scores)
    assert out.shape == want[0].shape and error(out, want[0]) < 1e-12 and error(lse, want[1]) < 1e-12
    x = BackwardInputs(p.dout, p.q, p.k, p.v, out, lse, row_delta(p.dout, out))
    for g, w in zip(kernel.backward(x, pattern, scores), REFERENCE.backward(x, same, scores), strict=True):
        assert g.shape == w.shape and error(g, w) < 1e-12


TES = [s for s in STAND_INS if s[0] == "te"]


@pytest.mark.parametrize("stand_in", TES, indirect=True, ids=lambda each: each[2])
@pytest.mark.parametrize("tile", [Pattern((9, 9), high=0), Pattern((5, 11)), Pattern((11, 5))], ids=str)
def test_te_calls_every_tile_of_documents_as_packed_sequences(stand_in, tile, monkeypatch):
    """So that no tile is planned by its shape; `_checked_by_te` counts on it."""
    kernel, (rows, columns) = stand_in.kernel.of_documents, tile.shape
    p = problem(0, 11, batch=2, kv_heads=2)
    q, dout, k, v = p.q[:, :rows], p.dout[:, :rows], p.k[:, :columns], p.v[:, :columns]
    te = sys.modules["transformer_engine.pytorch.cpp_extensions.fused_attn"]
    layouts = []
    for name in ("fused_attn_fwd", "fused_attn_bwd"):
        monkeypatch.setattr(te, name, _noting_layouts(getattr(te, name), layouts))
    scores = Scores(0.3)
    want = REFERENCE.forward(q, k, v, tile, scores)
    out, lse = kernel.forward(q, k, v, tile, scores)
    assert error(out, want[0]) < 1e-12 and error(lse, want[1]) < 1e-12
    x = BackwardInputs(dout, q, k, v, out, lse, row_delta(dout, out))
    for g, w in zip(kernel.backward(x, tile, scores), REFERENCE.backward(x, tile, scores), strict=True):
        assert g.shape == w.shape and error(g, w) < 1e-12
    assert layouts == ["thd_thd_thd"] * 2


def _noting_layouts(function, layouts):
    @functools.wraps(function)  # its signature stays
    def noting(*args, **kwargs):
        layouts.append(kwargs["qkv_layout"])
        return function(*args, **kwargs)

    return noting


WINDOWS = [
    Pattern((16, 24), 2, 13),
    Pattern((2, 2), parts=(Piece(0, 2, 0, 2, -1, 0),), packed=Packed((2,), (2,), 1, 0)),
]


@pytest.mark.parametrize("stand_in", TES, indirect=True, ids=lambda each: each[2])
@pytest.mark.parametrize("tile", WINDOWS, ids=["alone", "packed"])
def test_te_leaves_windows_within_documents_to_torch_and_says_so(stand_in, tile, monkeypatch, caplog):
    asked, kernel = [], stand_in.kernel.of_documents
    flash = SimpleNamespace(forward=lambda *x: asked.append(x[3:]), backward=lambda *x: asked.append(x[1:]))
    monkeypatch.setattr(te_module.aten, "FLASH", flash)
    te_module._tell_of_windows.cache_clear()
    with caplog.at_level("INFO", logger="burst_mcore"):
        te_module._forward_of_documents(None, None, None, tile, Scores(0.3))
        te_module._backward_of_documents(None, tile, Scores(0.3))
    assert kernel.abilities.packed and asked == [(tile, Scores(0.3))] * 2
    assert [record.message for record in caplog.records] == [
        "kernel te: windows within documents are left to aten-flash"
    ]


@pytest.mark.parametrize("stand_in", TES[-1:], indirect=True, ids=lambda each: each[2])
@pytest.mark.parametrize(
    ("cudnn", "capability", "deterministic", "words"),
    [
        ((9, 8, 0), (9, 0), False, None),
        ((9, 6, 0), (9, 0), False, "documents need cuDNN 9.7.*this is .9, 6, 0."),
        ((9, 10, 1), (9, 0), False, "without the faults of 9.10"),
        ((9, 8, 0), (8, 0), False, "compute capability 9"),
        ((9, 8, 0), (9, 0), True, "not deterministic"),
    ],
)
def test_te_says_where_it_does_not_take_documents(
    stand_in, cudnn, capability, deterministic, words, monkeypatch
):
    utils = sys.modules["transformer_engine.pytorch.utils"]
    monkeypatch.setattr(utils, "get_cudnn_version", lambda: cudnn)
    monkeypatch.setattr(packages, "capability", lambda: capability)
    ask = Problem("cuda", torch.bfloat16, 8, 8, 128, 128, deterministic=deterministic)
    choose.cache_clear()
    assert choose("te", ask) is KERNELS["te"]  # without documents
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        assert choose("te", replace(ask, documents=True)) is KERNELS["te"].of_documents
    choose.cache_clear()


@pytest.mark.parametrize(
    "stand_in", [s for s in STAND_INS if s[0] != "te"], indirect=True, ids=lambda each: f"{each[0]}-{each[2]}"
)
def test_a_softcap_arrives(stand_in):
    p, scores = problem(0, 16), Scores(0.25, softcap=1.5)
    pattern = pattern_of(Mask.causal(), 16)
    out, lse = stand_in.kernel.forward(*p[:3], pattern, scores)
    want = dense(p, Mask.causal(), softcap=1.5)
    x = BackwardInputs(p.dout, *p[:3], out, lse, row_delta(p.dout, out))
    for g, w in zip((out, *stand_in.kernel.backward(x, pattern, scores)), (want.out, *want[2:]), strict=True):
        assert error(g, w) < 1e-12


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_not_installed_says_so(name):
    ask = Problem("cuda", torch.bfloat16, 8, 8, 128, 128)
    with pytest.raises(ValueError, match=f"{name}.*not usable here"):
        choose(name, ask)


def test_a_version_out_of_range_says_which_are_legal(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", ModuleType("x"))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setattr(metadata, "version", lambda asked: "2.4.1")
    packages.loaded.cache_clear()
    with pytest.raises(ValueError, match="flash-attn 2.4.1 is not from 2.6 on and below 2.9"):
        choose("flash2", Problem("cuda", torch.bfloat16, 8, 8, 128, 128))
    packages.loaded.cache_clear()


@pytest.mark.parametrize(
    ("name", "ask", "words"),
    [
        ("flash3", {"head_dim": 128, "value_dim": 64}, "may differ as 192 and 128 do"),
        ("flash3", {"head_dim": 256, "value_dim": 256, "deterministic": True}, "up to head dim 192"),
        ("flash4", {"head_dim": 192, "kv_heads": 2}, "without GQA"),
        ("te", {"softcap": True}, "softcap"),
        ("te", {"head_dim": 136, "value_dim": 136}, "up to 128"),
        ("flash2", {"dtype": torch.float32}, "float32"),
        ("flash2", {"device": "cpu"}, "not on cuda"),
    ],
)
def test_an_adapter_refuses_what_its_package_cannot(name, ask, words):
    base = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 128,
        "value_dim": 128,
    }
    with pytest.raises(ValueError, match=words):
        choose(name, Problem(**{**base, **ask}))


def test_every_rank_names_kernels_of_the_table_once():
    for names in PREFERENCE.values():
        assert len(set(names)) == len(names) and set(names) <= set(KERNELS)
    assert by_rank("cpu") == ["aten-cpu", "reference"]
    assert by_rank("cuda")[-1] == "reference"
    small = Launches(alone=12, windows=20, packed=30, whole=30)
    assert by_rank("cpu", small) == by_rank("cpu")
    assert {*by_rank("cuda")} == {*by_rank("cuda", small)}
