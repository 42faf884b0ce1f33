"""Device code of our Triton kernel, launched by `triton.py`.

Blocks of scores are [ROWS, COLUMNS], in `dkv` [COLUMNS, ROWS]. A program has a block of one side, its own. It
walks the blocks of the other side in two loops, by KIND: full blocks (WHOLE), and masked blocks (PART). The
blocks of a BAND follow by arithmetic, those of other patterns from lists (`BlockLists`). Exponents are to
base 2: exp(S - LSE) = exp2(S log2(e) - LSE log2(e)).

A non-finite row must not reach rows that do not see it, though 0 x NaN is NaN. So in parts of lists such a
row is read as zeros, and a note turns the scores of all its pairs into NaN. The note of a column is in
`unit_of`, the factors of scores; the note of a row is in its log-sum-exp, with a finite delta.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from burst_mcore.attention.kernels.blocks import LARGEST_BLOCK

UPCAST = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether to multiply in float32: the interpreter multiplies the bits of bfloat16 as integers."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
WHOLE, PART = tl.constexpr(0), tl.constexpr(1)
NOTED = tl.constexpr(LARGEST_BLOCK)
"""Rows of a block of notes."""
OF_ROWS = ("low", "high", "rows", "columns", "lse", "lse_batch", "lse_head")
OF_ROWS_AND_DELTA = (*OF_ROWS, "delta", "delta_batch", "delta_head")
"""Arguments that depend on a tile's rows: no kernel is specialized for multiples of 16."""


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
    """[ROWS, COLUMNS]: scores in units of `_unit`; under a softcap their tanh."""
    s = _dot(q, tl.trans(k), PRECISION)
    if SOFTCAP:
        s = _tanh(s * (scale / softcap))
    return s


@triton.jit
def _unit(scale, softcap, SOFTCAP: tl.constexpr):
    """The factor of scores, for exponents to base 2."""
    if SOFTCAP:
        scale = softcap
    return scale * LOG2E


@triton.jit
def _multiply_add(a, b, c):
    """a x b + c of 32 bits, in one instruction.

    Named, since LLVM makes vectors of plain ones. It then keeps the comparisons behind them as bits of a
    word, and takes each out again.
    """
    if UPCAST:
        return a * b + c
    return tl.inline_asm_elementwise(
        "mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _allowed(
    entries, entry, block, other_block, low, high, own_rows, other_rows, OWN: tl.constexpr,
    OTHERS: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """Return the mask [OWN, OTHERS] of a block of the own side and a block of the other side.

    A row of the own side attends to rows of the other side from `first` to `last`. In lists these count from
    the corner of the block and are `step` apart, from `start` on. One comparison of 32 bits decides: times
    2^32 / step, rounded up, plus 256, multiples of the step wrap to 256 times themselves and a little, other
    numbers to far more. No inner loop, so that the caller's loop is pipelined.
    """
    at, along = tl.arange(0, OWN), tl.arange(0, OTHERS)
    if BAND:
        at, along = block * OWN + at, other_block * OTHERS + along
        first = tl.where(at < own_rows, tl.maximum(at + low, 0), 2147483647)
        last = tl.minimum(at + high, other_rows - 1)
        allowed = (along[None, :] >= first[:, None]) & (along[None, :] <= last[:, None])
    else:
        spans, diagonals = tl.load(entries + 4 * entry + 1), tl.load(entries + 4 * entry + 2)
        factor = tl.load(entries + 4 * entry + 3)
        inside = (at >= (spans & 255)) & (at < (spans >> 8 & 255))
        start = at + (diagonals << 24 >> 24)
        first = tl.maximum(start, spans >> 16 & 255)
        last = tl.minimum(at + (diagonals << 16 >> 24), (spans >> 24 & 255) - 1)
        limit = tl.where(inside, tl.maximum(last + 1 - first, 0) * 256, 0)
        behind = -(start * factor + (first - start) * 256)
        ahead = _multiply_add(along[None, :], factor, behind[:, None])
        allowed = ahead.to(tl.uint32) < limit.to(tl.uint32)[:, None]
    return allowed


@triton.jit
def _walk(
    starts, full, block, low, high, own_rows, other_rows, OWN: tl.constexpr, OTHERS: tl.constexpr,
    BAND: tl.constexpr, OPEN: tl.constexpr,
):  # fmt: skip
    """Return the blocks of the other side for a block, as four numbers for `_range` and `_other_block`.

    Of a BAND: the first and the last full block, the number of masked blocks, and the first block. Else: the
    start of the block's entries in the lists, the end of full entries, and the end of all entries.

    OPEN: a block that the end of the other side cuts may be full, too.
    """
    if BAND:
        first, last = block * OWN, tl.minimum(block * OWN + OWN, own_rows) - 1
        begin, end = tl.maximum(first + low, 0), tl.minimum(last + high + 1, other_rows)
        head, tail = begin // OTHERS, tl.cdiv(tl.maximum(end, 0), OTHERS)
        inner, outer = tl.maximum(last + low, 0), tl.minimum(first + high + 1, other_rows)
        if OPEN:
            outer = tl.where(outer == other_rows, tl.cdiv(other_rows, OTHERS), tl.maximum(outer, 0) // OTHERS)
        else:
            outer = tl.maximum(outer, 0) // OTHERS
        a = tl.minimum(tl.maximum(tl.cdiv(inner, OTHERS), head), tl.maximum(tail, head))
        b = tl.maximum(tl.minimum(outer, tail), a)
        c, d = tl.where(end > begin, tail - head - (b - a), 0), head
    else:
        a, b, c, d = tl.load(starts + block), tl.load(full + block), tl.load(starts + block + 1), 0
    return a, b, c, d


@triton.jit
def _range(a, b, c, d, BAND: tl.constexpr, KIND: tl.constexpr):
    """Return the first and last entry of a kind, from the numbers of `_walk`."""
    if KIND == WHOLE:
        first, last = a, b
    elif BAND:
        first, last = 0, c
    else:
        first, last = b, c
    return first, last


@triton.jit
def _any(a, b, c, d, BAND: tl.constexpr):
    """Return whether a block has any pairs, from the numbers of `_walk`."""
    return (b > a) | (c > 0) if BAND else c > a


@triton.jit
def _other_block(entries, entry, a, b, d, BAND: tl.constexpr, KIND: tl.constexpr):
    """Return the block of the other side of an entry."""
    if not BAND:
        block = tl.load(entries + 4 * entry)
    elif KIND == WHOLE:
        block = entry
    else:  # the masked blocks before and after the full blocks
        block = d + entry + tl.where(d + entry >= a, b - a, 0)
    return block


@triton.jit
def _place(count, heads, SIZE: tl.constexpr):
    """Return the (block, batch, head) of this program; the last blocks of `count` rows come first."""
    blocks = tl.cdiv(count, SIZE)
    of_head, block = tl.program_id(0) // blocks, blocks - 1 - tl.program_id(0) % blocks
    batch, head = of_head // heads, of_head % heads
    return block, batch.to(tl.int64), head.to(tl.int64)  # offsets may be beyond 32 bits


@triton.jit
def _rows(base, at, stride, limit, CHECKED: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr):
    """Rows `at` of a matrix [rows, USED], padded to DIM; zeros from `limit` on and in the padding.

    A mask along the head dim prevents wide loads, so there is none if USED = DIM.
    """
    return _rows_if(base, at, stride, at < limit, CHECKED, USED, DIM)


@triton.jit
def _rows_if(base, at, stride, valid, CHECKED: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr):
    d = tl.arange(0, DIM)
    where = base + at.to(tl.int64)[:, None] * stride + d[None, :]
    if USED != DIM:
        return tl.load(where, mask=valid[:, None] & (d < USED)[None, :], other=0.0)
    if CHECKED:
        return tl.load(where, mask=valid[:, None], other=0.0)
    return tl.load(where)


@triton.jit
def spoilt_rows(x, notes, rows, heads, x_batch, x_row, x_head, USED: tl.constexpr, DIM: tl.constexpr):
    """Set notes of non-finite rows to NaN; notes: [B, H, whole blocks of NOTED rows]."""
    block, batch, head = _place(rows, heads, NOTED)
    m = block * NOTED + tl.arange(0, NOTED)
    values = _rows(x + batch * x_batch + head * x_head, m, x_row, rows, True, USED, DIM)
    to = notes + (batch * heads + head) * (tl.cdiv(rows, NOTED) * NOTED) + m.to(tl.int64)
    tl.store(to, tl.where(m < rows, tl.load(to) + tl.sum(values.to(tl.float32) * 0.0, 1), float("nan")))


@triton.jit
def _attend(
    q, k_base, v_base, unit_of, k_stride, v_stride, maximum, total, out, block, other_block, entries, entry,
    rows, columns, low, high, scale, softcap, USED: tl.constexpr, VALUE_USED: tl.constexpr, DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr,
    BAND: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge one block of columns by the online softmax: return the new (maximum, total, out).

    With m' = max(m, max_j s_j): out' = e^(m - m') out + sum_j e^(s_j - m') v_j, and total likewise.
    """
    n = other_block * COLUMNS + tl.arange(0, COLUMNS)
    valid, unit = n < columns, _unit(scale, softcap, SOFTCAP)
    if KIND != WHOLE and not BAND:
        units = tl.load(unit_of + n.to(tl.int64))
        valid, unit = units == units, units[None, :]
    k = _rows_if(k_base, n, k_stride, valid, KIND != WHOLE, USED, DIM)
    s = _scores(q, k, scale, softcap, SOFTCAP, PRECISION) * unit
    v = _rows_if(v_base, n, v_stride, valid, KIND != WHOLE, VALUE_USED, VALUE_DIM)
    if KIND != WHOLE:
        allowed = _allowed(entries, entry, block, other_block, low, high, rows, columns, ROWS, COLUMNS, BAND)
        s = tl.where(allowed, s, -float("inf"))
    greatest = tl.maximum(maximum, tl.max(s, 1))
    finite = tl.where(greatest == -float("inf"), 0.0, greatest)
    p = tl.exp2(s - finite[:, None])
    shrink = tl.exp2(maximum - finite)
    out = out * shrink[:, None]
    out += _dot(p.to(v.dtype), v, PRECISION)
    return greatest, total * shrink + tl.sum(p, 1), out


@triton.jit(do_not_specialize=OF_ROWS)
def forward(
    q, k, v, unit_of, out, lse, starts, full, entries, low, high, scale, softcap, rows,
    columns, heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head, lse_batch, lse_head, lse_row, USED: tl.constexpr,
    VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr, BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Merge attention of a block of rows of one head into (out, lse)."""
    block, batch, head = _place(rows, heads, ROWS)
    kv_head = head // group
    m = block * ROWS + tl.arange(0, ROWS)
    valid = m < rows
    k_base, v_base = k + batch * k_batch + kv_head * k_head, v + batch * v_batch + kv_head * v_head
    if not BAND:
        unit_of += (batch * (heads // group) + kv_head) * (tl.cdiv(columns, NOTED) * NOTED)
    e = tl.arange(0, VALUE_DIM)
    to_out = out + batch * out_batch + head * out_head + m.to(tl.int64)[:, None] * out_row + e[None, :]
    in_out = valid[:, None] & (e < VALUE_USED)[None, :]
    to_lse = lse + batch * lse_batch + head * lse_head + m.to(tl.int64) * lse_row
    of_lse: tl.constexpr = lse.dtype.element_ty

    a, b, c, d = _walk(starts, full, block, low, high, rows, columns, ROWS, COLUMNS, BAND, False)
    if FRESH:
        maximum = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        sums = tl.zeros((ROWS, VALUE_DIM), dtype=tl.float32)
    else:  # the running result counts as one more key, with score lse and value out
        lse_before = tl.load(to_lse, mask=valid, other=-float("inf")) * tl.full((1,), LOG2E, of_lse)
        maximum = lse_before.to(tl.float32)
        blind = maximum == -float("inf")
        total = tl.where(blind, 0.0, 1.0)
        sums = tl.load(to_out, mask=in_out, other=0.0).to(tl.float32)
        if of_lse != tl.float32:  # the rounding error of the score goes into the weight
            total *= tl.exp2(tl.where(blind, 0.0, lse_before - maximum.to(of_lse)).to(tl.float32))
            sums *= total[:, None]
    q_rows = _rows(q + batch * q_batch + head * q_head, m, q_row, rows, True, USED, DIM)
    for KIND in tl.static_range(2):
        first, last = _range(a, b, c, d, BAND, KIND)
        for entry in range(first, last):
            other_block = _other_block(entries, entry, a, b, d, BAND, KIND)
            maximum, total, sums = _attend(
                q_rows, k_base, v_base, unit_of, k_row, v_row, maximum, total, sums, block, other_block,
                entries, entry, rows, columns, low, high, scale, softcap, USED, VALUE_USED, DIM, VALUE_DIM,
                ROWS, COLUMNS, SOFTCAP, BAND, KIND, PRECISION,
            )  # fmt: skip
    if FRESH or _any(a, b, c, d, BAND):
        blind = total == 0.0
        sums = sums / tl.where(blind, 1.0, total)[:, None]
        of_total = tl.log(tl.where(blind, 1.0, total).to(of_lse))
        merged = tl.where(blind, -float("inf"), maximum.to(of_lse) * tl.full((1,), LN2, of_lse) + of_total)
        tl.store(to_out, sums.to(out.dtype.element_ty), mask=in_out)
        tl.store(to_lse, merged.to(lse.dtype.element_ty), mask=valid)


@triton.jit
def _weights(
    q, k, v, dout, lse, delta, allowed, unit, scale, softcap, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(P, dS / scale) of a block: P = exp(S - LSE), dS = P * (dO V^T - D); TRANSPOSED: [COLUMNS, ROWS].

    If MASKED, both are 0 for pairs that are not allowed.
    """
    if TRANSPOSED:
        s, dp = _scores(k, q, scale, softcap, SOFTCAP, PRECISION), _dot(v, tl.trans(dout), PRECISION)
        lse, delta = lse[None, :], delta[None, :]
    else:
        s, dp = _scores(q, k, scale, softcap, SOFTCAP, PRECISION), _dot(dout, tl.trans(v), PRECISION)
        lse, delta = lse[:, None], delta[:, None]
    p = tl.exp2(s * unit - lse)
    if MASKED:
        p = tl.where(allowed, p, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds = ds * (1.0 - s * s)
    return p, ds


@triton.jit
def _statistics(lse, delta, m, lse_row, delta_row, rows):
    """Return (lse to base 2, delta) of rows m; lse = inf, so P = 0, beyond the end and without a key."""
    valid = m < rows
    lse_of_base_2 = tl.load(lse + m.to(tl.int64) * lse_row, mask=valid, other=float("inf")).to(tl.float32)
    lse_of_base_2 = tl.where(lse_of_base_2 == -float("inf"), float("inf"), lse_of_base_2 * LOG2E)
    return lse_of_base_2, tl.load(delta + m.to(tl.int64) * delta_row, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _put_rows(base, values, at, stride, limit, FRESH: tl.constexpr, USED: tl.constexpr, DIM: tl.constexpr):
    """Set (FRESH) rows `at` of a matrix, below `limit`, or add to them, in at least float32."""
    e = tl.arange(0, DIM)
    to = base + at.to(tl.int64)[:, None] * stride + e[None, :]
    inside = (at < limit)[:, None] & (e < USED)[None, :]
    if not FRESH:
        values = values + tl.load(to, mask=inside, other=0.0)
    tl.store(to, values.to(to.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=OF_ROWS_AND_DELTA)
def dq(
    q, k, v, dout, unit_of, lse, delta, dq, starts, full, entries, low, high, scale, softcap, rows, columns,
    heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch,
    dout_row, dout_head, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dq_batch, dq_row,
    dq_head, USED: tl.constexpr, VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr,
    BAND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of a block of rows of one head: dQ = scale dS K."""
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
        unit_of += (batch * (heads // group) + kv_head) * (tl.cdiv(columns, NOTED) * NOTED)
    a, b, c, d = _walk(starts, full, block, low, high, rows, columns, ROWS, COLUMNS, BAND, False)
    sums = tl.zeros((ROWS, DIM), dtype=tl.float32)
    for KIND in tl.static_range(2):
        first, last = _range(a, b, c, d, BAND, KIND)
        for entry in range(first, last):
            other_block = _other_block(entries, entry, a, b, d, BAND, KIND)
            n = other_block * COLUMNS + tl.arange(0, COLUMNS)
            there, allowed, unit = n < columns, True, _unit(scale, softcap, SOFTCAP)
            if KIND != WHOLE:
                allowed = _allowed(
                    entries, entry, block, other_block, low, high, rows, columns, ROWS, COLUMNS, BAND
                )  # fmt: skip
            if KIND != WHOLE and not BAND:
                units = tl.load(unit_of + n.to(tl.int64))
                there, unit = units == units, units[None, :]
            k_rows = _rows_if(k_base, n, k_row, there, KIND != WHOLE, USED, DIM)
            v_rows = _rows_if(v_base, n, v_row, there, KIND != WHOLE, VALUE_USED, VALUE_DIM)
            _, ds = _weights(
                q_rows, k_rows, v_rows, dout_rows, lse_rows, delta_rows, allowed, unit, scale, softcap,
                KIND != WHOLE, False, SOFTCAP, PRECISION,
            )  # fmt: skip
            sums += _dot(ds.to(k_rows.dtype), k_rows, PRECISION)
    if FRESH or _any(a, b, c, d, BAND):
        to = dq + batch * dq_batch + head * dq_head
        _put_rows(to, sums * scale, m, dq_row, rows, FRESH, USED, DIM)


@triton.jit(do_not_specialize=OF_ROWS_AND_DELTA)
def dkv(  # noqa: C901
    q, k, v, dout, lse, delta, dk, dv, dq, starts, full, entries, low, high, scale, softcap, rows, columns,
    heads, group, q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch,
    dout_row, dout_head, lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dk_batch, dk_row,
    dk_head, dv_batch, dv_row, dv_head, dq_batch, dq_row, dq_head, USED: tl.constexpr,
    VALUE_USED: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr, BAND: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, QUERIES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk (KEYS) and dv (VALUES) of a block of columns of one K/V head, over its query heads.

    dK = scale dS^T Q and dV = P^T dO. If QUERIES, all programs add to the existing sums of dq in any order.
    """
    block, batch, kv_head = _place(columns, heads // group, COLUMNS)
    block = tl.cdiv(columns, COLUMNS) - 1 - block  # first blocks first: a causal mask gives them most pairs
    n = block * COLUMNS + tl.arange(0, COLUMNS)
    k_rows = _rows(k + batch * k_batch + kv_head * k_head, n, k_row, columns, True, USED, DIM)
    v_rows = _rows(v + batch * v_batch + kv_head * v_head, n, v_row, columns, True, VALUE_USED, VALUE_DIM)
    a, b, c, d = _walk(starts, full, block, -high, -low, columns, rows, COLUMNS, ROWS, BAND, True)
    unit = _unit(scale, softcap, SOFTCAP)
    if QUERIES and BAND:  # dq must not see columns beyond the end: mask their block
        cut = block * COLUMNS + COLUMNS > columns
        c, b = tl.where(cut, c + b - a, c), tl.where(cut, a, b)
    if QUERIES and not BAND:  # nor non-finite columns outside its mask
        note = tl.sum(k_rows.to(tl.float32) * 0.0, 1) + tl.sum(v_rows.to(tl.float32) * 0.0, 1)
        k_rows = tl.where((note == 0.0)[:, None], k_rows, 0.0).to(k_rows.dtype)
        v_rows = tl.where((note == 0.0)[:, None], v_rows, 0.0).to(v_rows.dtype)
        unit = (unit + note)[:, None]
    e = tl.arange(0, DIM)
    k_sums = tl.zeros((COLUMNS, DIM), dtype=tl.float32)
    v_sums = tl.zeros((COLUMNS, VALUE_DIM), dtype=tl.float32)
    for of_group in range(group):
        head = kv_head * group + of_group
        q_base = q + batch * q_batch + head * q_head
        dout_base = dout + batch * dout_batch + head * dout_head
        lse_base = lse + batch * lse_batch + head * lse_head
        delta_base = delta + batch * delta_batch + head * delta_head
        for KIND in tl.static_range(2):
            first, last = _range(a, b, c, d, BAND, KIND)
            for entry in range(first, last):
                other_block = _other_block(entries, entry, a, b, d, BAND, KIND)
                m = other_block * ROWS + tl.arange(0, ROWS)
                lse_rows, delta_rows = _statistics(lse_base, delta_base, m, lse_row, delta_row, rows)
                valid, allowed = m < rows, True
                if KIND != WHOLE:
                    allowed = _allowed(
                        entries, entry, block, other_block, -high, -low, columns, rows, COLUMNS, ROWS, BAND
                    )  # fmt: skip
                if KIND != WHOLE and not BAND:
                    valid = valid & (lse_rows == lse_rows)
                q_rows = _rows_if(q_base, m, q_row, valid, True, USED, DIM)
                dout_rows = _rows_if(dout_base, m, dout_row, valid, True, VALUE_USED, VALUE_DIM)
                p, ds = _weights(
                    q_rows, k_rows, v_rows, dout_rows, lse_rows, delta_rows, allowed, unit, scale, softcap,
                    KIND != WHOLE, True, SOFTCAP, PRECISION,
                )  # fmt: skip
                if VALUES:
                    v_sums += _dot(p.to(dout_rows.dtype), dout_rows, PRECISION)
                if KEYS:
                    k_sums += _dot(ds.to(q_rows.dtype), q_rows, PRECISION)
                if QUERIES:
                    share = _dot(tl.trans(k_rows), ds.to(k_rows.dtype), PRECISION) * scale
                    to = (
                        dq + batch * dq_batch + head * dq_head + m.to(tl.int64)[None, :] * dq_row + e[:, None]
                    )
                    inside = (m < rows)[None, :] & (e < USED)[:, None]
                    tl.atomic_add(to, share.to(to.dtype.element_ty), mask=inside, sem="relaxed")
    if FRESH or _any(a, b, c, d, BAND):
        if KEYS:
            to_k = dk + batch * dk_batch + kv_head * dk_head
            _put_rows(to_k, k_sums * scale, n, dk_row, columns, FRESH, USED, DIM)
        if VALUES:
            to_v = dv + batch * dv_batch + kv_head * dv_head
            _put_rows(to_v, v_sums, n, dv_row, columns, FRESH, VALUE_USED, VALUE_DIM)
