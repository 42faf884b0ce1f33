"""Recompute policies over gloo: exactness for random problems, and what is computed, sent and kept."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from dense import Result, assert_as_exact_as, dense, problem, single_kernel
from ranks import on_ranks, processes
from sharded import whole
from test_masks_on_rings import DTYPES, random_call

from burst_mcore import BurstConfig, Mask, Topology, burst_attention, shard
from burst_mcore.attention.geometry.cuts import cut_for
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.checkpointing import Full, KeepAttention, Segment, checkpoint

SHARES = (0, 0.25, 0.5, 0.75, 1)


def _local(p, mask, rank, size, config, topology, policy, reentrant):
    """This rank's out, lse and gradients of a checkpointed call, each as `Result`."""
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout) for x in p)
    inputs, found = [x.detach().requires_grad_() for x in (q, k, v)], []
    options = {"topology": topology, "mask": mask, "config": config, "return_lse": True}

    def layer(*qkv):
        out, lse, largest = burst_attention(*(x * 1 for x in qkv), **options, return_max_logit=True)
        found.append(largest)
        return out * 1, lse

    if policy is None:
        out, lse = layer(*inputs)
    else:
        out, lse = checkpoint(layer, *inputs, policy=policy, use_reentrant=reentrant)
    out.backward(dout)
    assert policy is None or len(found) == 2 or not reentrant  # which stops once it has what it needs
    assert all(torch.equal(largest, found[0]) for largest in found)
    return Result(out.detach(), lse.detach(), *(x.grad for x in inputs))


def _samples(rank, size, intra, seeds):
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    for seed in seeds:
        draw = random.Random(seed)
        p, mask, config = random_call(draw, Ranks(size, intra), draw.choice(DTYPES))
        policy = draw.choice((Full(), KeepAttention(), *(Segment(draw.random()) for _ in range(4))))
        given = p, mask, rank, size, config, topology
        try:
            reentrant = draw.random() < 0.5
            plain = _local(*given, None, False)
            got = _local(*given, policy, reentrant)
            assert torch.equal(got.out, plain.out)
            # Nothing is tiled differently. Reentrant, torch gives lse a gradient of zeros.
            if not (isinstance(policy, Segment) or reentrant):
                assert all(map(torch.equal, got, plain))
            gathered = Result(*(whole(x, size, config.layout) for x in got))
            # With a gradient of lse, backward forms scores of 8 more columns than forward its lse: where a
            # row sees one key, exp(score - lse) is not 1 but rounded.
            bar, roundings = single_kernel(p, KERNELS["aten-cpu"], mask), 2 if reentrant else 1
            assert_as_exact_as(gathered, bar, dense(p, mask), roundings=roundings)
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: n={p.q.shape[1]} {mask} {config} {policy}: {error}"
            ) from error


@pytest.mark.parametrize(
    ("size", "intra", "first", "last"),
    [
        *((2, 2, 0, 16), (4, 2, 0, 8)),
        pytest.param(4, 2, 8, 16, marks=pytest.mark.slow),
        *(pytest.param(*s, 0, 16, marks=pytest.mark.slow) for s in ((3, 1), (6, 3), (8, 4))),
    ],
)
def test_random_problems_are_as_exact_as_without(size, intra, first, last):
    processes(size, _samples, intra, range(first, last))


class Weighing(Segment):
    """Weighs what is kept."""

    def hold(self, kept):
        object.__setattr__(self, "weight", sum(x.untyped_storage().nbytes() for x in kept.tensors))
        return super().hold(kept)


def _counted(rank, size, intra, layout, mask, heads, n):
    """By share: (pairs, bytes sent, bytes kept, the cut) of this rank's recomputation."""
    sent, pairs, batch, kernel = [], [], dist.batch_isend_irecv, KERNELS["aten-cpu"]

    def counting(operations):
        sent.extend(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return batch(operations)

    def watched(q, k, v, pattern, scores):
        pairs.append(int(pattern.table.sum()) * q.shape[2])
        return kernel.forward(q, k, v, pattern, scores)

    dist.batch_isend_irecv, KERNELS["aten-cpu"] = counting, replace(kernel, forward=watched)
    topology = Topology.from_group(dist.group.WORLD, intra_size=intra)
    config = BurstConfig(
        layout=layout, kernel="aten-cpu", ring="double", head_parallel=heads, backward="query"
    )
    p = problem(0, n, heads=2, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    found = {}
    for share in SHARES:
        policy = Weighing(share) if share else Full()
        q, k, v = (shard(x, 1, rank=rank, size=size, layout=layout).detach().requires_grad_() for x in p[:3])
        seen = []

        def layer(*qkv, seen=seen):
            pairs.clear()
            sent.clear()
            out = burst_attention(*qkv, topology=topology, mask=mask, config=config)
            seen.append((sum(pairs), sum(sent)))
            return out

        out = checkpoint(layer, q, k, v, policy=policy, early_stop=False)
        out.sum().backward()
        cut = cut_for(share, config.layout, mask, n, size)
        found[share] = (*seen, getattr(policy, "weight", 0), cut)
    return found


def _totals(size, intra, layout, mask, heads=1, n=4096):
    """By share: recomputed pairs and bytes as shares of the forward's, the slowest rank over the mean, and
    bytes kept by each rank.
    """
    ranks = processes(size, _counted, intra, layout, mask, heads, n)
    found = {}
    for share in SHARES:
        first, again, kept, cuts = zip(*(rank[share] for rank in ranks), strict=True)
        assert len(set(cuts)) == 1
        whole_pairs, whole_bytes = (sum(each) for each in zip(*first, strict=True))
        pairs, sent = zip(*again, strict=True)
        uneven = max(pairs) * size / max(sum(pairs), 1)
        found[share] = (sum(pairs) / whole_pairs, sum(sent) / whole_bytes, uneven, kept, cuts[0])
    return found


@pytest.mark.parametrize(
    ("size", "intra", "layout"),
    [pytest.param(4, 4, "striped", marks=pytest.mark.slow), (4, 2, "striped"), (2, 2, "stacked-zigzag:4")],
)
def test_causal_recompute_costs_the_square_of_the_front(size, intra, layout):
    n, heads, dim = 4096, 2, 8
    for share, (pairs, sent, uneven, kept, cut) in _totals(size, intra, layout, Mask.causal()).items():
        assert cut.keep == pytest.approx(share, abs=size / n)
        assert pairs == pytest.approx((1 - share) ** 2, rel=0.03, abs=1e-9)
        if layout == "striped":
            assert sent == pytest.approx(1 - share, rel=0.01, abs=1e-9)
        else:  # the last rows are read by nobody else, and are not sent in the forward either
            assert (1 - share) * 0.75 <= sent <= 1 - share
        assert uneven <= 1.05
        assert sum(kept) == round(share * n) * (2 * heads * dim + 4 * heads)


def test_windows_and_documents_recompute_the_front_alone():
    n = 1024
    for mask in (Mask.window(100, 0), Mask.causal() & Mask.documents([0, 300, 310, 700, n])):
        at = torch.arange(n)
        seen = mask.allows(at, at).sum(1)
        for pairs, _, _, _, cut in _totals(2, 1, "striped", mask, n=n).values():
            assert pairs == pytest.approx(int(seen[: cut.position].sum()) / int(seen.sum()))


def _auto(rank, size, n):
    topology = Topology.from_group(dist.group.WORLD)
    policy, found, held = Segment("auto", memory_gb=3e-6), [], []
    p = problem(0, n, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    for step in range(4):
        given = p, Mask.causal(), rank, size, BurstConfig(layout="striped"), topology
        plain, got = _local(*given, None, False), _local(*given, policy, step % 2 == 0)
        for a, b in zip(got, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        if rank == 0 and step == 1:  # one rank holds on to a graph
            held.append(got)
        found.append(policy._live.most_calls)
    return found


@pytest.mark.parametrize(("size", "n"), [(2, 33), (3, 2), (2, 64)])
def test_auto_on_ranks_that_hold_different_numbers_of_tokens(size, n):
    assert processes(size, _auto, n) == [[1] * 4] * size


@on_ranks(2)
def test_ranks_that_keep_different_shares_are_told(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    x = torch.randn(1, 8, 2, 8, requires_grad=True)

    def layer(x):
        return burst_attention(x, x, x, topology=topology, mask=Mask.causal())

    with pytest.raises(ValueError, match=r"keeps: 0.75 on ranks \[0\], 0.5 on ranks \[1\]"):
        checkpoint(layer, x, policy=Segment(0.5 if rank else 0.75))
    for policy, keeps in ((Segment(0.5), "0.5"), (Full(), "0.0")):
        with pytest.raises(ValueError, match=rf"keeps: {keeps} on ranks \[0\], 1.0 on ranks \[1\]"):
            checkpoint(layer, x, policy=KeepAttention() if rank else policy)
    checkpoint(layer, x, policy=KeepAttention()).sum().backward()  # and the ring goes on


def _one_changes_its_mind(rank, size):
    topology = Topology.from_group(dist.group.WORLD)
    x, runs = torch.randn(1, 8, 2, 8, requires_grad=True), itertools.count()

    def layer(x):
        y = burst_attention(x, x, x, topology=topology, mask=Mask.causal())
        if next(runs) and rank == 0:
            y = burst_attention(y, y, y, topology=topology, mask=Mask.causal())
        return burst_attention(y, y, y, topology=topology, mask=Mask.causal())

    out = checkpoint(layer, x, policy=Segment(0.5), early_stop=False)
    with pytest.raises((RuntimeError, ValueError)) as error:
        out.sum().backward()
    return str(error.value)


def test_a_rank_that_does_other_calls_in_its_recomputation_is_an_error_of_all():
    first, second = processes(2, _one_changes_its_mind)
    assert "call 3 of burst_attention in the recomputation of" in first
    assert "rank 0" in second
