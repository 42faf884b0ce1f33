"""Device code of our Triton kernel; see `triton.py`, which launches it.

Blocks of scores are [ROWS, COLUMNS], in `dkv` [COLUMNS, ROWS]. A program has a block of one side. It walks
the blocks of the other side in three loops, by KIND: those that are seen WHOLE, those within two diagonals
(ONE part), and those with SEVERAL parts, or a part with a step. Of a BAND the blocks follow by arithmetic; of
other patterns lists name them (`Blocks`). Exponents are of base 2.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

UPCAST = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter multiplies the bits of bfloat16 as if they were integers."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
WHOLE, ONE, SEVERAL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
OF_ROWS = ("low", "high", "rows", "columns", "lse", "lse_batch", "lse_head")
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
def _several(m, n, entry, firsts, parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return which pairs of rows m and columns n the parts of an entry allow, [ROWS, COLUMNS]."""
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
def _within(own, others, own0, own1, others0, others1, low, high):
    """Return which of `others` lie between two diagonals of `own`, and both within their ranges.

    Without a loop, so that the loop around is pipelined.
    """
    apart = others0 - own0
    first = tl.where((own >= own0) & (own < own1), tl.maximum(own + apart + low, others0), 2147483647)
    last = tl.minimum(own + apart + high, others1 - 1)
    return (others[None, :] >= first[:, None]) & (others[None, :] <= last[:, None])


@triton.jit
def _allowed(
    m, n, entry, firsts, parts, low, high, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BAND: tl.constexpr, KIND: tl.constexpr, BY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return which pairs of a block are seen: [ROWS, COLUMNS], or [COLUMNS, ROWS] if BY_COLUMNS."""
    m0, m1, n0, n1 = 0, rows, 0, columns
    if KIND == ONE and not BAND:
        part = parts + 8 * tl.load(firsts + entry)
        m0, m1, n0, n1 = tl.load(part), tl.load(part + 1), tl.load(part + 2), tl.load(part + 3)
        low, high = tl.load(part + 4), tl.load(part + 5)
    if KIND == ONE and BY_COLUMNS:
        seen = _within(n, m, n0, n1, m0, m1, -high, -low)
    elif KIND == ONE:
        seen = _within(m, n, m0, m1, n0, n1, low, high)
    else:
        seen = _several(m, n, entry, firsts, parts, ROWS, COLUMNS)
        if BY_COLUMNS:
            seen = tl.trans(seen)
    return seen


@triton.jit
def _walk(
    starts, full, lone, block, low, high, own, others, OWN: tl.constexpr, OTHERS: tl.constexpr,
    BAND: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Return four numbers that say which blocks of the other side a block meets; see `_range` and `_other`.

    Of a BAND: the first and the last block that are seen wholly, how many others are met, and the first block
    of all. Else: where the entries of the block begin in the lists, and where each kind of entries ends.

    OPEN: a block that the end of the other side cuts may be whole, too.
    """
    if BAND:
        first, last = block * OWN, tl.minimum(block * OWN + OWN, own) - 1
        begin, end = tl.maximum(first + low, 0), tl.minimum(last + high + 1, others)
        head, tail = begin // OTHERS, tl.cdiv(tl.maximum(end, 0), OTHERS)
        inner, outer = tl.maximum(last + low, 0), tl.minimum(first + high + 1, others)
        if OPEN:
            outer = tl.where(outer == others, tl.cdiv(others, OTHERS), tl.maximum(outer, 0) // OTHERS)
        else:
            outer = tl.maximum(outer, 0) // OTHERS
        a = tl.minimum(tl.maximum(tl.cdiv(inner, OTHERS), head), tl.maximum(tail, head))
        b = tl.maximum(tl.minimum(outer, tail), a)
        c, d = tl.where(end > begin, tail - head - (b - a), 0), head
    else:
        a, b = tl.load(starts + block), tl.load(full + block)
        c, d = tl.load(lone + block), tl.load(starts + block + 1)
    return a, b, c, d


@triton.jit
def _range(a, b, c, d, BAND: tl.constexpr, KIND: tl.constexpr):
    """Return the first and last entry of a kind, from the numbers of `_walk`."""
    if KIND == WHOLE:
        first, last = a, b
    elif KIND == SEVERAL:
        first, last = c, d
    elif BAND:
        first, last = 0, c
    else:
        first, last = b, c
    return first, last


@triton.jit
def _any(a, b, c, d, BAND: tl.constexpr):
    """Return whether a block meets any other, from the numbers of `_walk`."""
    return (b > a) | (c > 0) if BAND else d > a


@triton.jit
def _other(others, entry, a, b, d, BAND: tl.constexpr, KIND: tl.constexpr):
    """Return the block of the other side that an entry stands for."""
    if not BAND:
        block = tl.load(others + entry)
    elif KIND == WHOLE:
        block = entry
    else:  # the blocks before the whole ones, and those behind
        block = d + entry + tl.where(d + entry >= a, b - a, 0)
    return block


@triton.jit
def _place(count, heads, SIZE: tl.constexpr):
    """Return the (block, batch, head) of this program; of `count` rows, the last blocks come first."""
    blocks = tl.cdiv(count, SIZE)
    of_head, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = of_head // heads, of_head % heads
    return block, batch.to(tl.int64), head.to(tl.int64)  # offsets may be beyond 32 bits


@triton.jit
def _rows(base, at, stride, limit, CHECKED: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr):
    """Rows `at` of a matrix, [rows, DIM] of which DIM `USED` are there; zeros beyond, below `limit` too.

    A mask along the head dim, where one is needed, keeps loads from being wide: none where it is not.
    """
    return _rows_if(base, at, stride, at < limit, CHECKED, USED, DIM)


@triton.jit
def _rows_if(base, at, stride, there, CHECKED: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr):
    d = tl.arange(0, DIM)
    where = base + at.to(tl.int64)[:, None] * stride + d[None, :]
    if USED != DIM:
        return tl.load(where, mask=there[:, None] & (d < USED)[None, :], other=0.0)
    if CHECKED:
        return tl.load(where, mask=there[:, None], other=0.0)
    return tl.load(where)


@triton.jit
def _spoil(spoilt, at, limit):
    """Return NaN for the rows `at` that are not finite, by the notes of `spoilt_rows`, and 0 for others.

    0 x NaN is NaN, and P is 0 where nothing is seen: so rows that are not finite are read as zeros, and the
    pairs that see them become NaN.
    """
    return tl.load(spoilt + at.to(tl.int64), mask=at < limit, other=0.0)


@triton.jit
def spoilt_rows(
    x, spoilt, rows, heads, x_batch, x_row, x_head, USED: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Note NaN for each row of x that is not finite, else 0; spoilt: [B, H, S], contiguous."""
    block, batch, head = _place(rows, heads, ROWS)
    m = block * ROWS + tl.arange(0, ROWS)
    values = _rows(x + batch * x_batch + head * x_head, m, x_row, rows, True, USED, DIM)
    notes = tl.sum(values.to(tl.float32) * 0.0, 1)
    tl.store(spoilt + (batch * heads + head) * rows + m.to(tl.int64), notes, mask=m < rows)


@triton.jit
def _attend(
    q, k_base, v_base, v_spoilt, k_stride, v_stride, most, total, out, m, block, entry, rows, columns,
    firsts, parts, low, high, scale, softcap, USED: tl.constexpr, VALUE_USED: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SOFTCAP: tl.constexpr, BAND: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of columns more: the new (most, total, out)."""
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    k = _rows(k_base, n, k_stride, columns, KIND != WHOLE, USED, DIM)
    s = _scores(q, k, scale, softcap, SOFTCAP, PRECISION) * _unit(scale, softcap, SOFTCAP)
    if KIND == WHOLE:
        v = _rows(v_base, n, v_stride, columns, False, VALUE_USED, VALUE_DIM)
    else:
        there = n < columns
        if not BAND:
            spoil = _spoil(v_spoilt, n, columns)
            there, s = there & (spoil == 0.0), s + spoil[None, :]
        v = _rows_if(v_base, n, v_stride, there, True, VALUE_USED, VALUE_DIM)
        allowed = _allowed(
            m, n, entry, firsts, parts, low, high, rows, columns, ROWS, COLUMNS, BAND, KIND, False
        )
        s = tl.where(allowed, s, -float("inf"))
    greatest = tl.maximum(most, tl.max(s, 1))
    finite = tl.where(greatest == -float("inf"), 0.0, greatest)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(most - finite)
    out = out * shrink[:, None]
    out += _dot(p.to(v.dtype), v, PRECISION)
    return greatest, total * shrink + tl.sum(p, 1), out


@triton.jit(do_not_specialize=OF_ROWS)
def forward(
    q, k, v, v_spoilt, out, lse, starts, full, lone, others, firsts, parts, low, high, scale, softcap, rows,
    columns, heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head, lse_batch, lse_head, lse_row, USED: tl.constexpr,
    VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head: (out, lse) with all that it sees merged into them."""
    block, batch, head = _place(rows, heads, ROWS)
    kv_head = head // group
    m = block * ROWS + tl.arange(0, ROWS)
    there = m < rows
    k_base, v_base = k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head
    if not BAND:
        v_spoilt += (batch * (heads // group) + kv_head) * columns
    e = tl.arange(0, VALUE_DIM)
    to_out = out + batch * out_batch + head * out_head + m.to(tl.int64)[:, None] * out_row + e[None, :]
    in_out = there[:, None] & (e < VALUE_USED)[None, :]
    to_lse = lse + batch * lse_batch + head * lse_head + m.to(tl.int64) * lse_row

    a, b, c, d = _walk(starts, full, lone, block, low, high, rows, columns, ROWS, COLUMNS, BAND, False)
    if FRESH:
        most = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        sums = tl.zeros((ROWS, VALUE_DIM), dtype=tl.float32)
    else:  # the keys seen so far count as one key more, of this score and this value
        most = tl.load(to_lse, mask=there, other=-float("inf")) * LOG2E
        total = tl.where(most == -float("inf"), 0.0, 1.0)
        sums = tl.load(to_out, mask=in_out, other=0.0).to(tl.float32)
    q_rows = _rows(q + batch * q_batch + head * q_head, m, q_row, rows, True, USED, DIM)
    for KIND in tl.static_range(2 if BAND else 3):
        first, last = _range(a, b, c, d, BAND, KIND)
        for entry in range(first, last):
            most, total, sums = _attend(
                q_rows, k_base, v_base, v_spoilt, k_row, v_row, most, total, sums, m,
                _other(others, entry, a, b, d, BAND, KIND), entry, rows, columns, firsts, parts, low, high,
                scale, softcap, USED, VALUE_USED, DIM, VALUE_DIM, ROWS, COLUMNS, SOFTCAP, BAND, KIND,
                PRECISION,
            )  # fmt: skip
    if FRESH or _any(a, b, c, d, BAND):
        blind = total == 0.0
        sums = sums / tl.where(blind, 1.0, total)[:, None]
        merged = tl.where(blind, -float("inf"), most * LN2 + tl.log(tl.where(blind, 1.0, total)))
        tl.store(to_out, sums.to(out.dtype.element_ty), mask=in_out)
        tl.store(to_lse, merged.to(lse.dtype.element_ty), mask=there)


@triton.jit
def _weights(
    q, k, v, dout, lse, delta, allowed, spoil, scale, softcap, MASKED: tl.constexpr,
    BAND: tl.constexpr, TRANSPOSED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(P, dS without the scale) of a block; TRANSPOSED: [COLUMNS, ROWS], as dk and dv read them.

    Where MASKED, P is 0 of pairs that are not allowed, and NaN of those with a row of the other side that
    `spoil` says is not finite.
    """
    if TRANSPOSED:
        s, dp = _scores(k, q, scale, softcap, SOFTCAP, PRECISION), _dot(v, tl.trans(dout), PRECISION)
        lse, delta = lse[None, :], delta[None, :]
    else:
        s, dp = _scores(q, k, scale, softcap, SOFTCAP, PRECISION), _dot(dout, tl.trans(v), PRECISION)
        lse, delta = lse[:, None], delta[:, None]
    p = tl.exp2(s * _unit(scale, softcap, SOFTCAP) - lse)
    if MASKED:
        p = tl.where(allowed, p if BAND else p + spoil, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - s * s)
    return p, ds


@triton.jit
def _statistics(lse, delta, m, lse_row, delta_row, rows):
    """Return (lse of base 2, delta) of rows m; lse is infinite, so P is 0, where no row is or it is blind."""
    there = m < rows
    lse_of_base_2 = tl.load(lse + m.to(tl.int64) * lse_row, mask=there, other=float("inf")).to(tl.float32)
    lse_of_base_2 = tl.where(lse_of_base_2 == -float("inf"), float("inf"), lse_of_base_2 * LOG2E)
    return lse_of_base_2, tl.load(delta + m.to(tl.int64) * delta_row, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _put_rows(
    base, values, at, stride, limit, FRESH: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """Set rows `at` of a matrix, below `limit`, or add to them, in at least float32."""
    e = tl.arange(0, DIM)
    to = base + at.to(tl.int64)[:, None] * stride + e[None, :]
    inside = (at < limit)[:, None] & (e < USED)[None, :]
    if not FRESH:
        values = values + tl.load(to, mask=inside, other=0.0)
    tl.store(to, values.to(to.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=OF_ROWS_AND_DELTA)
def dq(
    q, k, v, dout, k_spoilt, v_spoilt, lse, delta, dq, unused, starts, full, lone, others, firsts, parts,
    low, high, scale, softcap, rows, columns, heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, lse_row, delta_batch,
    delta_head, delta_row, dq_batch, dq_row, dq_head, unused_batch, unused_row, unused_head,
    USED: tl.constexpr, VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head."""
    block, batch, head = _place(rows, heads, ROWS)
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
    if not BAND:
        k_spoilt += (batch * (heads // group) + kv_head) * columns
        v_spoilt += (batch * (heads // group) + kv_head) * columns
    a, b, c, d = _walk(starts, full, lone, block, low, high, rows, columns, ROWS, COLUMNS, BAND, False)
    sums = tl.zeros((ROWS, DIM), dtype=tl.float32)
    for KIND in tl.static_range(2 if BAND else 3):
        first, last = _range(a, b, c, d, BAND, KIND)
        for entry in range(first, last):
            n = _other(others, entry, a, b, d, BAND, KIND) * COLUMNS + tl.arange(0, COLUMNS)
            there, allowed, spoil = n < columns, True, 0.0
            if KIND != WHOLE:
                allowed = _allowed(
                    m, n, entry, firsts, parts, low, high, rows, columns, ROWS, COLUMNS, BAND, KIND, False
                )
            if KIND != WHOLE and not BAND:
                notes = _spoil(k_spoilt, n, columns) + _spoil(v_spoilt, n, columns)
                there, spoil = there & (notes == 0.0), notes[None, :]
            k_rows = _rows_if(k_base, n, k_row, there, KIND != WHOLE, USED, DIM)
            v_rows = _rows_if(v_base, n, v_row, there, KIND != WHOLE, VALUE_USED, VALUE_DIM)
            _, ds = _weights(
                q_rows, k_rows, v_rows, dout_rows, lse_rows, delta_rows, allowed, spoil, scale, softcap,
                KIND != WHOLE, BAND, False, SOFTCAP, PRECISION,
            )  # fmt: skip
            sums += _dot(ds.to(k_rows.dtype), k_rows, PRECISION)
    if FRESH or _any(a, b, c, d, BAND):
        to = dq + batch * dq_batch + head * dq_head
        _put_rows(to, sums * scale, m, dq_row, rows, FRESH, USED, DIM)


@triton.jit(do_not_specialize=OF_ROWS_AND_DELTA)
def dkv(  # noqa: C901
    q, k, v, dout, q_spoilt, dout_spoilt, lse, delta, dk, dv, starts, full, lone, others, firsts, parts,
    low, high, scale, softcap, rows, columns, heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, dout_batch, dout_row, dout_head, lse_batch, lse_head, lse_row, delta_batch,
    delta_head, delta_row, dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head, USED: tl.constexpr,
    VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr, BAND: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of columns of one K/V head, over all query heads that share it: dk if KEYS, dv if VALUES."""
    block, batch, kv_head = _place(columns, heads // group, COLUMNS)
    block = tl.cdiv(columns, COLUMNS) - 1 - block  # under a causal mask the first are seen most: first
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    k_rows = _rows(k + batch * k_batch + kv_head * k_head, n, k_row, columns, True, USED, DIM)
    v_rows = _rows(v + batch * v_batch + kv_head * v_head, n, v_row, columns, True, VALUE_USED, VALUE_DIM)
    a, b, c, d = _walk(starts, full, lone, block, -high, -low, columns, rows, COLUMNS, ROWS, BAND, True)
    k_sums = tl.zeros((COLUMNS, DIM), dtype=tl.float32)
    v_sums = tl.zeros((COLUMNS, VALUE_DIM), dtype=tl.float32)
    for of_group in range(group):
        head = kv_head * group + of_group
        q_base = q + batch * q_batch + head * q_head
        dout_base = dout + batch * dout_batch + head * dout_head
        lse_base = lse + batch * lse_batch + head * lse_head
        delta_base = delta + batch * delta_batch + head * delta_head
        q_notes, dout_notes = q_spoilt, dout_spoilt
        if not BAND:
            q_notes += (batch * heads + head) * rows
            dout_notes += (batch * heads + head) * rows
        for KIND in tl.static_range(2 if BAND else 3):
            first, last = _range(a, b, c, d, BAND, KIND)
            for entry in range(first, last):
                m = _other(others, entry, a, b, d, BAND, KIND) * ROWS + tl.arange(0, ROWS)
                lse_rows, delta_rows = _statistics(lse_base, delta_base, m, lse_row, delta_row, rows)
                there, allowed, spoil = m < rows, True, 0.0
                if KIND != WHOLE:
                    allowed = _allowed(
                        m, n, entry, firsts, parts, low, high, rows, columns, ROWS, COLUMNS, BAND, KIND, True
                    )
                if KIND != WHOLE and not BAND:
                    notes = _spoil(q_notes, m, rows) + _spoil(dout_notes, m, rows) + delta_rows * 0.0
                    there, spoil = there & (notes == 0.0), notes[None, :]
                    delta_rows = tl.where(notes == 0.0, delta_rows, 0.0)
                q_rows = _rows_if(q_base, m, q_row, there, True, USED, DIM)
                dout_rows = _rows_if(dout_base, m, dout_row, there, True, VALUE_USED, VALUE_DIM)
                p, ds = _weights(
                    q_rows, k_rows, v_rows, dout_rows, lse_rows, delta_rows, allowed, spoil, scale, softcap,
                    KIND != WHOLE, BAND, True, SOFTCAP, PRECISION,
                )  # fmt: skip
                if VALUES:
                    v_sums += _dot(p.to(dout_rows.dtype), dout_rows, PRECISION)
                if KEYS:
                    k_sums += _dot(ds.to(q_rows.dtype), q_rows, PRECISION)
    if FRESH or _any(a, b, c, d, BAND):
        if KEYS:
            to_k = dk + batch * dk_batch + kv_head * dk_head
            _put_rows(to_k, k_sums * scale, n, dk_row, columns, FRESH, USED, DIM)
        if VALUES:
            to_v = dv + batch * dv_batch + kv_head * dv_head
            _put_rows(to_v, v_sums, n, dv_row, columns, FRESH, VALUE_USED, VALUE_DIM)
