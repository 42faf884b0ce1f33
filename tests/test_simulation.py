"""Every rank's schedule, executed by the real passes in one process over mailboxes, in float64."""

import itertools

import pytest
import torch
from dense import dense, error, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Mailboxes, MailboxTransport, threads

from burst_mcore import Layout, Mask, shard, unshard
from burst_mcore.attention.cost import Shard, backward_bytes, forward_bytes
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.passes import Call, Keys, Queries, backward, forward, row_delta
from burst_mcore.layout import KINDS


def simulate(p, mask, layout, size, direction, kernel="reference", dtype=torch.float64):
    """(out, lse, dq, dk, dv) of the whole sequence, bytes each rank sent in forward, and in backward."""
    mail, n = Mailboxes(), p.q.shape[1]

    def rank(r):
        transport = MailboxTransport(mail, r)
        call = Call(
            rank=r,
            size=size,
            layout=Layout(layout),
            mask=mask,
            n=n,
            scale=p.q.shape[-1] ** -0.5,
            kernel=KERNELS[kernel],
            direction=direction,
            grad_dtype=dtype,
            transport=transport,
        )
        q, k, v, dout = (shard(x, 1, rank=r, size=size, layout=layout) for x in p)
        inputs = [x.clone() for x in (q, k, v, dout)]
        out, lse = forward(call, q, k, v)
        sent = transport.bytes_sent
        gradients = backward(call, Queries(q, dout, row_delta(dout, out), lse), Keys(k, v), out)
        assert all(torch.equal(x, y) for x, y in zip((q, k, v, dout), inputs, strict=True))  # never written
        return (out, lse.transpose(1, 2), *gradients), sent, transport.bytes_sent - sent

    results, forward_sent, backward_sent = zip(*threads(size, rank), strict=True)
    whole = [unshard(parts, 1, layout=layout) for parts in zip(*results, strict=True)]
    return whole, forward_sent, backward_sent


@pytest.mark.parametrize(
    ("size", "layout", "kind", "direction"),
    list(itertools.product(range(1, 9), KINDS, ("causal", "full"), ("query", "kv"))),
)
def test_all_ranks_together_equal_dense_attention(size, layout, kind, direction):
    p = problem(size, 4 * Layout(layout).divisor(size), heads=2, kv_heads=1, head_dim=8)
    got, _, _ = simulate(p, Mask(kind), layout, size, direction)
    for g, w in zip(got, dense(p, Mask(kind)), strict=True):
        assert error(g, w) <= 1e-12


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 6),
    multiple=st.integers(1, 4),
    layout=st.sampled_from(KINDS),
    kind=st.sampled_from(["causal", "full"]),
    direction=st.sampled_from(["query", "kv"]),
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (4, 12), (16, 8)]),
)
def test_any_shape(seed, size, multiple, layout, kind, direction, batch, kv_heads, group, dims):
    p = problem(
        seed,
        multiple * Layout(layout).divisor(size),
        batch=batch,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=dims[0],
        value_dim=dims[1],
    )
    got, forward_sent, backward_sent = simulate(p, Mask(kind), layout, size, direction)
    for g, w in zip(got, dense(p, Mask(kind)), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)
    tokens = p.q.shape[1] // size
    costed = Shard(batch, tokens, kv_heads * group, kv_heads, *dims, itemsize=8, grad_itemsize=8)
    assert set(forward_sent) == {forward_bytes(costed, size)}
    assert set(backward_sent) == {backward_bytes(costed, size, direction)}
