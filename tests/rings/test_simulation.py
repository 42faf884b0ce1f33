"""Every rank's schedule, executed by the real passes in one process over mailboxes, in float64."""

import gc
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from cells import crossed
from dense import dense, error, problem
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from masks import MASKS, layouts, random_layout, random_mask, randoms
from ranks import Mailboxes, MailboxTransport, threads
from sharded import shape_of
from torch.nn.functional import pad

from burst_mcore import Layout, Mask, shard, unshard
from burst_mcore.attention.backward import _Backward, backward
from burst_mcore.attention.call import Call, Keys, Queries
from burst_mcore.attention.forward import Inputs, _Forward, forward
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.kernels.kernel import Problem, Scores
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.numerics import merge
from burst_mcore.attention.numerics.latent import Expansion, LatentBlocks
from burst_mcore.attention.numerics.merge import KeyBlocks
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.schedule.heads import legal_degrees, share_of_heads
from burst_mcore.attention.schedule.route import Route, program, route_for, schedule
from burst_plan.explain.verify import verify
from burst_plan.simulate.cost import link_bytes, link_class, message_bytes


def simulate(
    p,
    mask,
    layout,
    route,
    direction,
    kernel="reference",
    dtype=torch.float64,
    transport=MailboxTransport,
    deterministic=False,
    up=None,
):
    """(out, lse, dq, dk, dv) of the whole sequence; bytes each rank sent by peer, forward and backward.

    up: the weights of a latent, if p.k and p.v are it and its rope key; their gradient comes last.
    """
    mail, n, size, (heads, head_dim) = Mailboxes(), p.q.shape[1], route.size, p.q.shape[2:]
    kv_heads, value_dim = p.k.shape[2], p.v.shape[3]
    if up is not None:
        kv_heads, value_dim = heads, up.shape[2] - (head_dim - value_dim)
    plan = plan_of(Layout.of(layout), mask, n, route.placement)
    for pass_ in ("forward", direction):
        verify(schedule(route, pass_, plan))

    def rank(r):
        carrier = transport(mail, r)
        call = Call(
            rank=r,
            route=route,
            plan=plan,
            scores=Scores(p.q.shape[-1] ** -0.5, deterministic=deterministic),
            problem=Problem(
                "cpu", p.q.dtype, heads, kv_heads, head_dim, value_dim, deterministic=deterministic
            ),
            kernel=KERNELS[kernel],
            direction=direction,
            grad_dtype=dtype,
            kv_heads=p.k.shape[2],
            latent_rotates=up is not None,
            lse_at_home=True,
        )
        of_member = share_of_heads(heads, call.member, route.heads)
        expansion = None if up is None else Expansion(up, of_member, value_dim)
        own = [shard(x, 1, rank=r, size=size, layout=layout) for x in p]
        rows = own[0].shape[1]
        q, k, v, dout = (pad(x, (0, 0, 0, 0, 0, call.rows - rows)) for x in own)
        inputs = [x.clone() for x in (q, k, v, dout)]
        blocks = KeyBlocks if expansion is None else partial(LatentBlocks, expansion)
        done = forward(call, carrier, Inputs(q, Keys(k, v, blocks)))
        kept = [x for x in done if x is not None]
        saved = [x.clone() for x in kept]
        sent, carrier.sent = carrier.sent, type(carrier.sent)()
        queries = Queries(done.q, dout, row_delta(dout, done.out), done.ring_lse)
        gradients = backward(call, carrier, queries, Keys(done.k, done.v, blocks), done.out)
        for now, before in zip((q, k, v, dout, *kept), (*inputs, *saved), strict=True):
            assert torch.equal(now, before)  # neither the caller's nor the saved are ever written
        results = (done.out, done.lse.transpose(1, 2), *gradients)
        of_weights = [expansion.weight_gradient()] if expansion else []
        return [x[:, :rows] for x in results], of_weights, sent, carrier.sent

    results, of_weights, forward_sent, backward_sent = zip(*threads(size, rank), strict=True)
    whole = [unshard(parts, 1, layout=layout) for parts in zip(*results, strict=True)]
    whole += [sum(parts) for parts in zip(*of_weights, strict=True)]
    return whole, forward_sent, backward_sent


ROUTES = [
    *(Route(1, size) for size in range(1, 6)),
    *(Route(m, intra) for m, intra in [(2, 2), (2, 3), (3, 2), (4, 1), (2, 1)]),
    *(Route(1, 4 // h, h) for h in (2, 4)),
    *(Route(1, 2, 2, outer=True), Route(1, 3, 2, outer=True), Route(2, 2, 2, outer=True)),
    *(Route(2, 2, 2), Route(2, 1, 4), Route(3, 1, 2), Route(1, 3, 2)),
    *(Route(2, 3, overlap=False), Route(2, 2, 2, overlap=False), Route(1, 1, 4, overlap=False)),
]


def _quick(route, kind, direction):
    """Whether a cell is one of `make test`: a route goes in one direction by each mask, and in both."""
    return (kind == "causal") == ((ROUTES.index(route) % 2 == 0) == (direction == "kv"))


@pytest.mark.parametrize(
    ("route", "kind", "direction"),
    crossed(ROUTES, ("causal", "full"), ("query", "kv"), quick=_quick),
    ids=str,
)
def test_all_ranks_together_equal_dense_attention(route, kind, direction):
    for layout in layouts(route.size)[: 6 if kind == "causal" else 2]:
        parts = 2 if layout.kind == "block-striped" else 4  # whose blocks have many tokens
        p, want = _whole(route.size, parts * layout.divisor(route.size), kind)
        got, _, _ = simulate(p, MASKS[kind], layout, route, direction)
        for g, w in zip(got, want, strict=True):
            assert error(g, w) <= 1e-12, layout


@cache
def _whole(size, n, kind):
    """A problem, and its results on one device: the same for all routes over so many ranks."""
    p = problem(size, n, heads=4, kv_heads=2, head_dim=8)
    return p, dense(p, MASKS[kind])


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("route", [Route(1, 2), Route(1, 1, 2)], ids=str)
@pytest.mark.parametrize("direction", ["query", "kv"])
def test_passes_leave_no_tensors_to_the_garbage_collector(route, direction):
    p = problem(0, 16, heads=4, kv_heads=2, head_dim=8)
    gc.collect()
    gc.disable()
    try:
        simulate(p, Mask.causal(), "zigzag", route, direction)
        left = [x for x in gc.get_objects() if type(x) in (_Forward, _Backward)]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("route", [Route(1, 4), Route(2, 2)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_large_tiles_by_halves_of_their_heads_give_the_same_bits(route, kv_heads, monkeypatch):
    """All tiles but those of the own queries, and only where no K/V head is in both halves."""
    p, heads, kernel = problem(0, 64, heads=4, kv_heads=kv_heads, head_dim=8), [], KERNELS["aten-cpu"]

    def noted(inputs, *others):
        heads.append(inputs.q.shape[2])
        return kernel.backward(inputs, *others)

    monkeypatch.setitem(KERNELS, "aten-cpu", replace(kernel, backward=noted))
    whole, *_ = simulate(p, Mask.causal(), "zigzag", route, "query", "aten-cpu")
    tiles, own = len(heads), route.size
    assert tiles > own and set(heads) == {4}
    heads.clear()
    monkeypatch.setattr(merge.GradientSum, "waiting_bytes", 0)
    halves, *_ = simulate(p, Mask.causal(), "zigzag", route, "query", "aten-cpu")
    assert Counter(heads) == ({4: tiles} if kv_heads == 1 else {4: own, 2: 2 * (tiles - own)})
    assert all(torch.equal(x, y) for x, y in zip(halves, whole, strict=True))


ANYTHING = given(
    draw=randoms,
    ranks=st.builds(lambda nodes, intra: Ranks(nodes * intra, intra), st.integers(1, 3), st.integers(1, 4)),
    ring=st.sampled_from(["double", "flat", "direct"]),
    way=st.fixed_dictionaries({"overlap": st.booleans(), "outer": st.booleans()}),
    degree=st.integers(1, 6),
    mirrored=st.booleans(),
    n=st.integers(1, 120) | st.integers(1, 4).map(lambda i: 48 * i),
    direction=st.sampled_from(["query", "kv"]),
    batch=st.integers(1, 3),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    dims=st.sampled_from([(8, 8), (4, 12), (16, 8)]),
    kernel=st.sampled_from(["reference", "aten-cpu"]),
)


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_any_mask_layout_shape_and_route(examples):
    settings(max_examples=examples, deadline=None)(ANYTHING(_equals_dense_attention))()


def _equals_dense_attention(
    draw, ranks, ring, way, degree, mirrored, n, direction, batch, heads, dims, kernel
):
    """heads: K/V heads, and the query heads of each."""
    kv_heads, heads = heads[0], heads[0] * heads[1]
    assume(degree in legal_degrees(ranks, heads, kv_heads))
    route = route_for(degree, ranks, ring=ring, **way)
    route = replace(route, mirrored=mirrored and not route.direct)
    head_dim, value_dim = dims if kernel == "reference" else (8, 8)
    layout, mask = random_layout(draw, ranks.size, n), random_mask(draw, n)
    p = problem(n, n, batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim)
    got, forward_sent, backward_sent = simulate(p, mask, layout, route, direction, kernel)
    for g, w in zip(got, dense(p, mask), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-11, atol=1e-11)
    plan = plan_of(layout, mask, n, route.placement)
    tokens = layout.padded(n, ranks.size) // ranks.size
    costed = shape_of(p, tokens, grad_dtype=torch.float64)
    hold_bytes((forward_sent, backward_sent), costed, route, direction, plan, ranks.intra)


def hold_bytes(sent, costed, route, direction, plan, intra):
    """Hold the bytes that each rank sent, by peer, in forward and in backward, to those of its programs."""
    for pass_, of_ranks in zip(("forward", direction), sent, strict=True):
        sizes = message_bytes(costed, route, pass_, return_lse=True)
        for rank, by_peer in enumerate(of_ranks):
            by_link = {"intra": 0, "inter": 0}
            for peer, size in by_peer.items():
                by_link[link_class(rank, peer, intra)] += size
            assert by_link == link_bytes(program(rank, route, pass_, plan), rank, sizes, intra)
