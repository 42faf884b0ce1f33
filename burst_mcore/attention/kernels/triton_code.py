"""Device code of our Triton kernel; see `triton.py`, which launches it.

Blocks of scores are [ROWS, COLUMNS]. For a block of one side the lists (`Blocks`) give the blocks of the
other: first those that are seen wholly, then those with parts. Exponents are of base 2.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

UPCAST = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter multiplies the bits of bfloat16 as if they were integers."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
OF_ROWS = ("rows", "columns", "lse", "lse_batch", "lse_head")
OF_ROWS_AND_DELTA = (*OF_ROWS, "delta", "delta_batch", "delta_head")
"""Arguments that change with a tile's rows: a kernel is not compiled anew for those that 16 divides."""


@triton.jit
def _tanh(x):
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _scores(q, k, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """[ROWS, COLUMNS], of which one is `_unit`; under a softcap their tanh."""
    s = _dot(q, tl.trans(k), PRECISION)
    if SOFTCAP:
        s = _tanh(s * (scale / softcap))
    return s


@triton.jit
def _unit(scale, softcap, SOFTCAP: tl.constexpr):
    """The factor of scores, for exponents of base 2."""
    if SOFTCAP:
        scale = softcap
    return scale * LOG2E


@triton.jit
def _allowed(m, n, entry, firsts, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which pairs of rows m and columns n the parts of an entry allow."""
    seen = tl.zeros((ROWS, COLUMNS), dtype=tl.int1)
    for at in range(tl.load(firsts + entry), tl.load(firsts + entry + 1)):
        part = parts + 8 * at
        m0, m1, n0, n1 = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
        low, high, step, shift = tl.load(part + 4), tl.load(part + 5), tl.load(part + 6), tl.load(part + 7)
        ahead = (n[None, :] - n0) - (m[:, None] - m0)
        inside = (m >= m0)[:, None] & (m < m1)[:, None] & (n >= n0)[None, :] & (n < n1)[None, :]
        inside = inside & (ahead >= low) & (ahead <= high) & ((ahead - shift) % step == 0)
        seen = seen | inside
    return seen


@triton.jit
def _rows(base, at, stride, limit, CHECKED: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr):
    """Rows `at` of a matrix, [rows, DIM] of which DIM `USED` are there; zeros beyond, below `limit` too.

    A mask along the head dim, where one is needed, keeps loads from being wide: none where it is not.
    """
    d = tl.arange(0, DIM)
    where = base + at.to(tl.int64)[:, None] * stride + d[None, :]
    if USED != DIM:
        return tl.load(where, mask=(at < limit)[:, None] & (d < USED)[None, :], other=0.0)
    if CHECKED:
        return tl.load(where, mask=(at < limit)[:, None], other=0.0)
    return tl.load(where)


@triton.jit
def _spoil(x):
    """[rows]: 0, or NaN where a row of a matrix is not finite."""
    return tl.sum(x.to(tl.float32) * 0.0, 1)


@triton.jit
def _cleaned(x, spoil):
    """Return the matrix with zeros for its spoilt rows: 0 x NaN is NaN, and P is 0 where nothing is seen."""
    return tl.where((spoil == 0.0)[:, None], x, 0.0)


@triton.jit
def _attend(
    q, k_base, v_base, k_stride, v_stride, most, total, out, m, block, entry, columns, firsts, parts, scale,
    softcap, USED: tl.constexpr, VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of columns more: the new (most, total, out)."""
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    k = _rows(k_base, n, k_stride, columns, MASKED, USED, DIM)
    s = _scores(q, k, scale, softcap, SOFTCAP, PRECISION) * _unit(scale, softcap, SOFTCAP)
    if MASKED:
        allowed = _allowed(m, n, entry, firsts, parts, ROWS, COLUMNS)
        s = tl.where(allowed, s, -float("inf"))
    greatest = tl.maximum(most, tl.max(s, 1))
    finite = tl.where(greatest == -float("inf"), 0.0, greatest)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(most - finite)
    v = _rows(v_base, n, v_stride, columns, MASKED, VALUE_USED, VALUE_DIM)
    out = out * shrink[:, None]
    if MASKED:  # a value that is not finite reaches the rows that see it, and no other
        spoil = _spoil(v)
        out += tl.sum(tl.where(allowed, spoil[None, :], 0.0), 1)[:, None]
        v = _cleaned(v, spoil)
    out += _dot(p.to(v.dtype), v, PRECISION)
    return greatest, total * shrink + tl.sum(p, 1), out


@triton.jit(do_not_specialize=OF_ROWS)
def forward(
    q, k, v, out, lse, starts, full, others, firsts, parts, scale, softcap, rows, columns, heads, group,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, out_batch, out_row, out_head,
    lse_batch, lse_head, lse_row, USED: tl.constexpr, VALUE_USED: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    FRESH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head: (out, lse) with all that it sees merged into them."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the last see most: first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)  # offsets may be beyond 32 bits
    kv_head = head // group
    m = block * ROWS + tl.arange(0, ROWS)
    there = m < rows
    k_base, v_base = k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head
    d = tl.arange(0, VALUE_DIM)
    to_out = out + batch * out_batch + head * out_head + m.to(tl.int64)[:, None] * out_row + d[None, :]
    in_out = there[:, None] & (d < VALUE_USED)[None, :]
    to_lse = lse + batch * lse_batch + head * lse_head + m.to(tl.int64) * lse_row

    start, middle, stop = tl.load(starts + block), tl.load(full + block), tl.load(starts + block + 1)
    if FRESH:
        most = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        sums = tl.zeros((ROWS, VALUE_DIM), dtype=tl.float32)
    else:  # the keys seen so far count as one key more, of this score and this value
        most = tl.load(to_lse, mask=there, other=-float("inf")) * LOG2E
        total = tl.where(most == -float("inf"), 0.0, 1.0)
        sums = tl.load(to_out, mask=in_out, other=0.0).to(tl.float32)
    q_rows = _rows(q + batch * q_batch + head * q_head, m, q_row, rows, True, USED, DIM)
    for MASKED in tl.static_range(2):
        for entry in range(middle if MASKED else start, stop if MASKED else middle):
            most, total, sums = _attend(
                q_rows, k_base, v_base, k_row, v_row, most, total, sums, m, tl.load(others + entry), entry,
                columns, firsts, parts, scale, softcap, USED, VALUE_USED, DIM, VALUE_DIM, ROWS, COLUMNS,
                SOFTCAP, MASKED, PRECISION,
            )  # fmt: skip
    if FRESH or start < stop:
        blind = total == 0.0
        sums = sums / tl.where(blind, 1.0, total)[:, None]
        merged = tl.where(blind, -float("inf"), most * LN2 + tl.log(tl.where(blind, 1.0, total)))
        tl.store(to_out, sums.to(out.dtype.element_ty), mask=in_out)
        tl.store(to_lse, merged.to(lse.dtype.element_ty), mask=there)


@triton.jit
def _weights(
    q, k, v, dout, lse, delta, m, n, entry, firsts, parts, scale, softcap, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(P, dS without the scale) of a block, NaN where a pair that is seen is not finite."""
    s = _scores(q, k, scale, softcap, SOFTCAP, PRECISION)
    p = tl.exp2(s * _unit(scale, softcap, SOFTCAP) - lse[:, None])
    dp = _dot(dout, tl.trans(v), PRECISION)
    ds = p * (dp - delta[:, None])
    if SOFTCAP:
        ds = ds * (1.0 - s * s)
    if MASKED:
        allowed = _allowed(m, n, entry, firsts, parts, ROWS, COLUMNS)
        spoil = _spoil(q)[:, None] + _spoil(k)[None, :]
        p = tl.where(allowed, p + spoil + _spoil(dout)[:, None], 0.0)
        ds = tl.where(allowed, ds + spoil, 0.0)
    return p, ds


@triton.jit
def _statistics(lse, delta, m, lse_row, delta_row, rows):
    """Return (lse of base 2, delta) of rows m; lse is infinite, so P is 0, where no row is or it is blind."""
    there = m < rows
    lse_of_base_2 = tl.load(lse + m.to(tl.int64) * lse_row, mask=there, other=float("inf")).to(tl.float32)
    lse_of_base_2 = tl.where(lse_of_base_2 == -float("inf"), float("inf"), lse_of_base_2 * LOG2E)
    return lse_of_base_2, tl.load(delta + m.to(tl.int64) * delta_row, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _put(to, values, inside, FRESH: tl.constexpr):
    if not FRESH:
        values = values + tl.load(to, mask=inside, other=0.0)  # in float32, or in float64 if the sum is
    tl.store(to, values.to(to.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=OF_ROWS_AND_DELTA)
def dq(
    q, k, v, dout, lse, delta, dq, unused, starts, full, others, firsts, parts, scale, softcap, rows,
    columns, heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    dout_batch, dout_row, dout_head, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    dq_batch, dq_row, dq_head, unused_batch, unused_row, unused_head, USED: tl.constexpr,
    VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # under a causal mask the last see most: first
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)  # offsets may be beyond 32 bits
    kv_head = head // group
    m = block * ROWS + tl.arange(0, ROWS)
    k_base, v_base = k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head
    q_rows = _rows(q + batch * q_batch + head * q_head, m, q_row, rows, True, USED, DIM)
    dout_base = dout + batch * dout_batch + head * dout_head
    dout_rows = _rows(dout_base, m, dout_row, rows, True, VALUE_USED, VALUE_DIM)
    lse_rows, delta_rows = _statistics(
        lse + batch * lse_batch + head * lse_head, delta + batch * delta_batch + head * delta_head, m,
        lse_row, delta_row, rows,
    )  # fmt: skip
    start, middle, stop = tl.load(starts + block), tl.load(full + block), tl.load(starts + block + 1)
    sums = tl.zeros((ROWS, DIM), dtype=tl.float32)
    for MASKED in tl.static_range(2):
        for entry in range(middle if MASKED else start, stop if MASKED else middle):
            n = tl.load(others + entry) * COLUMNS + tl.arange(0, COLUMNS)
            k_rows = _rows(k_base, n, k_row, columns, MASKED, USED, DIM)
            v_rows = _rows(v_base, n, v_row, columns, MASKED, VALUE_USED, VALUE_DIM)
            _, ds = _weights(
                q_rows, k_rows, v_rows, dout_rows, lse_rows, delta_rows, m, n, entry, firsts, parts, scale,
                softcap, ROWS, COLUMNS, SOFTCAP, MASKED, PRECISION,
            )  # fmt: skip
            if MASKED:
                k_rows = _cleaned(k_rows, _spoil(k_rows))
            sums += _dot(ds.to(k_rows.dtype), k_rows, PRECISION)
    if FRESH or start < stop:
        d = tl.arange(0, DIM)
        to = dq + batch * dq_batch + head * dq_head + m.to(tl.int64)[:, None] * dq_row + d[None, :]
        _put(to, sums * scale, (m < rows)[:, None] & (d < USED)[None, :], FRESH)


@triton.jit(do_not_specialize=OF_ROWS_AND_DELTA)
def dkv(
    q, k, v, dout, lse, delta, dk, dv, starts, full, others, firsts, parts, scale, softcap, rows, columns,
    heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch,
    dout_row, dout_head, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dk_batch, dk_row,
    dk_head, dv_batch, dv_row, dv_head, USED: tl.constexpr, VALUE_USED: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    FRESH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of one K/V head, over all query heads that share it."""
    kv_heads = heads // group
    block, batch, kv_head = tl.program_id(0), tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    batch, kv_head = batch.to(tl.int64), kv_head.to(tl.int64)
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    k_rows = _rows(k + batch * k_batch + kv_head * k_head, n, k_row, columns, True, USED, DIM)
    v_rows = _rows(v + batch * v_batch + kv_head * v_head, n, v_row, columns, True, VALUE_USED, VALUE_DIM)
    start, middle, stop = tl.load(starts + block), tl.load(full + block), tl.load(starts + block + 1)
    k_sums = tl.zeros((COLUMNS, DIM), dtype=tl.float32)
    v_sums = tl.zeros((COLUMNS, VALUE_DIM), dtype=tl.float32)
    for of_group in range(group):
        head = kv_head * group + of_group
        q_base = q + batch * q_batch + head * q_head
        dout_base = dout + batch * dout_batch + head * dout_head
        lse_base = lse + batch * lse_batch + head * lse_head
        delta_base = delta + batch * delta_batch + head * delta_head
        for MASKED in tl.static_range(2):
            for entry in range(middle if MASKED else start, stop if MASKED else middle):
                m = tl.load(others + entry) * ROWS + tl.arange(0, ROWS)
                q_rows = _rows(q_base, m, q_row, rows, True, USED, DIM)
                dout_rows = _rows(dout_base, m, dout_row, rows, True, VALUE_USED, VALUE_DIM)
                lse_rows, delta_rows = _statistics(lse_base, delta_base, m, lse_row, delta_row, rows)
                p, ds = _weights(
                    q_rows, k_rows, v_rows, dout_rows, lse_rows, delta_rows, m, n, entry, firsts, parts,
                    scale, softcap, ROWS, COLUMNS, SOFTCAP, MASKED, PRECISION,
                )  # fmt: skip
                if MASKED:
                    q_rows = _cleaned(q_rows, _spoil(q_rows))
                    dout_rows = _cleaned(dout_rows, _spoil(dout_rows))
                v_sums += _dot(tl.trans(p.to(dout_rows.dtype)), dout_rows, PRECISION)
                k_sums += _dot(tl.trans(ds.to(q_rows.dtype)), q_rows, PRECISION)
    if FRESH or start < stop:
        d, e = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
        there, at = (n < columns)[:, None], n.to(tl.int64)[:, None]
        to_k = dk + batch * dk_batch + kv_head * dk_head + at * dk_row + d[None, :]
        to_v = dv + batch * dv_batch + kv_head * dv_head + at * dv_row + e[None, :]
        _put(to_k, k_sums * scale, there & (d < USED)[None, :], FRESH)
        _put(to_v, v_sums, there & (e < VALUE_USED)[None, :], FRESH)
