"""Stand-ins for kernels of packages that are not here: the arguments of their releases, our arithmetic.

`SIGNATURES` has what adapters rely on: names, order and defaults of arguments, without options that tune.
"""

import sys
from functools import partial
from importlib import metadata
from itertools import pairwise
from types import ModuleType

import torch

from burst_mcore import packages
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.kernels import wrappers
from burst_mcore.attention.kernels.kernel import BackwardInputs, Scores
from burst_mcore.attention.kernels.reference import KERNEL as REFERENCE
from burst_mcore.attention.numerics.rowwise import row_delta


def pattern_of(q, k, causal, left, right, unbounded=-1):
    """As FlashAttention counts: from the lower right corner."""
    rows, columns = q.shape[1], k.shape[1]
    apart = columns - rows
    if causal:
        return Pattern((rows, columns), high=apart)
    low, high = (None if bound == unbounded else bound for bound in (left, right))
    return Pattern(
        (rows, columns), None if low is None else apart - low, None if high is None else apart + high
    )


def forward(q, k, v, scale, softcap, pattern):
    return REFERENCE.forward(q, k, v, pattern, Scores(scale, softcap or None))


def backward(x, scale, softcap, pattern):
    return REFERENCE.backward(x, pattern, Scores(scale, softcap or None))


def fill(found, buffers):
    for to, share in zip(buffers, found, strict=True):
        to.copy_(share)


def of_out(dout, q, k, v, out, lse):
    return BackwardInputs(dout, q, k, v, None, lse, row_delta(dout, out))


def _each(ends, q, k):
    """(rows, columns) of each sequence of [total, H, D]."""
    of_q, of_k, longest_q, longest_k = ends
    assert of_q.dtype == of_k.dtype == torch.int32 and (of_q[-1], of_k[-1]) == (len(q), len(k))
    assert (of_q.diff().max(), of_k.diff().max()) == (longest_q, longest_k)
    assert q.is_contiguous() and k.is_contiguous()
    rows, columns = pairwise(of_q.tolist()), pairwise(of_k.tolist())
    return [(slice(*m), slice(*n)) for m, n in zip(rows, columns, strict=True)]


def packed_forward(q, k, v, ends, scale, softcap, causal, left, right, unbounded=-1):
    """By cu_seqlens: out [total, H, D], lse [H, total]."""
    outs, lses = [], []
    for m, n in _each(ends, q, k):
        one = q[None, m], k[None, n], v[None, n]
        out, lse = forward(*one, scale, softcap, pattern_of(*one[:2], causal, left, right, unbounded))
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def packed_backward(x, ends, scale, softcap, causal, left, right, unbounded=-1, dlse=None):
    dout, q, k, v, out, lse = x
    assert lse.shape == (q.shape[1], len(q)) and lse.is_contiguous()
    gradients = [torch.full_like(y, torch.nan) for y in (q, k, v)]
    for m, n in _each(ends, q, k):
        one = of_out(dout[None, m], q[None, m], k[None, n], v[None, n], out[None, m], lse[None, :, m])
        if dlse is not None:
            one = one._replace(delta=one.delta - dlse[None, :, m])
        found = backward(one, scale, softcap, pattern_of(one.q, one.k, causal, left, right, unbounded))
        for to, rows, share in zip(gradients, (m, n, n), found, strict=True):
            to[rows] = share[0]
    return gradients


def _ends(x):
    """(offsets of queries, of keys, the longest of each) of packed sequences, None of a batch."""
    if x.get("cu_seqlens_q") is None:
        return None
    return x["cu_seqlens_q"], x["cu_seqlens_k"], x["max_seqlen_q"], x["max_seqlen_k"]


def _options(x):
    """(scale, softcap, causal, left, right) of a call of a flash-attn."""
    assert not x.get("dropout_p") and not x.get("return_softmax") and x.get("num_splits", 1) == 1
    assert x.get("alibi_slopes") is None and x.get("qv") is None
    left, right = x["window_size"] if "window_size" in x else (x["window_size_left"], x["window_size_right"])
    return x["softmax_scale"], x["softcap"], x.get("causal", x.get("is_causal")), left, right


def _flash_forward(x, unbounded=-1):
    given, (scale, softcap, *bounds) = (x["q"], x["k"], x["v"]), _options(x)
    if (ends := _ends(x)) is not None:
        return packed_forward(*given, ends, scale, softcap, *bounds, unbounded)
    return forward(*given, scale, softcap, pattern_of(*given[:2], *bounds, unbounded))


def _flash_backward(x, unbounded=-1, dlse=None):
    given = [x[name] for name in ("dout", "q", "k", "v", "out")]
    given.append(x["softmax_lse"] if "softmax_lse" in x else x["lse"])
    scale, softcap, *bounds = _options(x)
    if (ends := _ends(x)) is not None:
        return packed_backward(given, ends, scale, softcap, *bounds, unbounded, dlse)
    inputs = of_out(*given)
    inputs = inputs if dlse is None else inputs._replace(delta=inputs.delta - dlse)
    return backward(inputs, scale, softcap, pattern_of(*given[1:3], *bounds, unbounded))


def _into_buffers(x):
    fill(_flash_backward(x), (x["dq"], x["dk"], x["dv"]))


def _eight_results(x):
    out, lse = _flash_forward(x)
    return out, x["q"], x["k"], x["v"], out, lse, None, None


def _four_results(x):
    return *_flash_forward(x), None, None


def _forward_of_4(x):
    assert x["return_lse"]
    return *_flash_forward(x, None), None, None, None


def _backward_of_4(x):
    out = x["out"]
    assert out.shape == x["dout"].shape and out.stride(-1) == 1  # its check lets strides of 0 pass
    room = [by for many, by in zip(out.shape[:-1], out.stride(), strict=False) if many > 1]
    assert not any(room), "a row of zeros takes the memory of a row"
    return _flash_backward(x, None, x["dlse"])


GIVEN = "dout, q, k, v, out, softmax_lse"
ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
NO_ENDS = "cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None"
OPTIONS = "dropout_p, softmax_scale, causal"
LEFT_RIGHT = "window_size_left, window_size_right"
UNBOUNDED = "window_size_left=-1, window_size_right=-1"
SLOPES = "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None"
LAST = "softcap, alibi_slopes, deterministic, rng_state=None"
SIGNATURES = {
    "flash2 2.6": {
        "_flash_attn_forward": f"q, k, v, {OPTIONS}, window_size, softcap, alibi_slopes, return_softmax",
        "_flash_attn_backward": f"{GIVEN}, dq, dk, dv, {OPTIONS}, window_size, {LAST}",
        "_flash_attn_varlen_forward": f"q, k, v, {ENDS}, {OPTIONS}, window_size=(-1, -1), {SLOPES}",
        "_flash_attn_varlen_backward": f"{GIVEN}, dq, dk, dv, {ENDS}, {OPTIONS}, window_size, {LAST}",
    },
    "flash2 2.8": {
        "_flash_attn_forward": f"q, k, v, {OPTIONS}, {LEFT_RIGHT}, softcap, alibi_slopes, return_softmax",
        "_flash_attn_backward": f"{GIVEN}, dq, dk, dv, {OPTIONS}, {LEFT_RIGHT}, {LAST}",
        "_flash_attn_varlen_forward": f"q, k, v, {ENDS}, {OPTIONS}, {UNBOUNDED}, {SLOPES}, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False",
        "_flash_attn_varlen_backward": f"{GIVEN}, dq, dk, dv, {ENDS}, {OPTIONS}, {LEFT_RIGHT}, {LAST}, "
        "zero_tensors=False",
    },
    "flash3 old": {
        "_flash_attn_forward": "q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, "
        "cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, "
        "window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1",
        "_flash_attn_backward": f"{GIVEN}, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, "
        "max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, "
        "deterministic=False, sm_margin=0",
    },
    "flash3 new": {
        "_flash_attn_forward": f"q, k, v, k_new=None, v_new=None, qv=None, out_=None, {NO_ENDS}, "
        f"softmax_scale=None, causal=False, {UNBOUNDED}, attention_chunk=0, softcap=0.0, num_splits=1",
        "_flash_attn_backward": f"{GIVEN}, {NO_ENDS}, dq=None, dk=None, dv=None, softmax_scale=None, "
        f"is_causal=False, {UNBOUNDED}, softcap=0.0, deterministic=False, sm_margin=0",
    },
    "flash4 new": {
        "_flash_attn_fwd": f"q, k, v, qv=None, {NO_ENDS}, softmax_scale=None, causal=False, softcap=None, "
        "window_size_left=None, window_size_right=None, return_lse=False",
        "_flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
        "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, pack_gqa=False, "
        f"{NO_ENDS}, deterministic=False, dq=None, dk=None, dv=None, dlse=None, learnable_sink=None",
    },
}
"""By package and release, and function."""
MODULES = {
    "flash2": "flash_attn.flash_attn_interface",
    "flash3": "flash_attn_interface",
    "flash4": "flash_attn.cute.interface",
}
RUNS = {
    "flash2 2.6": (_eight_results, _into_buffers),
    "flash4 new": (_forward_of_4, _backward_of_4),
}
"""What stands for forwards and backwards where these are not (`_four_results`, `_into_buffers`)."""


def _function(signature, run):
    """A function of these arguments."""
    names = {"run": run}
    exec(f"def function({signature}): return run(locals())", names)
    return names["function"]


def members(name, release):
    """{module: {member: stand-in}} of a release, one of `SIGNATURES`."""
    key = f"{name} {release}"
    functions = {
        member: _function(
            signature, RUNS.get(key, (_four_results, _into_buffers))["bwd" in member or "backward" in member]
        )
        for member, signature in SIGNATURES[key].items()
    }
    return {MODULES[name]: functions}


NEWEST = {
    "flash-attn": ("2.8.3", partial(members, "flash2", "2.8")),
    "flash_attn_3": ("3.0.0", partial(members, "flash3", "new")),
    "flash-attn-4": ("4.0.0b36", partial(members, "flash4", "new")),
}
"""Distributions, their newest versions, and who makes their modules."""


def install(patch, name, release, package, version):
    """Put a release in the place of what is not here, until `patch` is undone."""
    for path, found in members(name, release).items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            patch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        sys.modules[path].__dict__.update(found)
    real = metadata.version
    patch.setattr(metadata, "version", lambda asked: version if asked == package else real(asked))
    patch.setattr(wrappers, "LEAST", 1)  # what is tested is small
    packages.loaded.cache_clear()
