"""Recurrences by heads equal those of each whole document, on any layout, in values and all gradients."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import layouts, random_layout
from players import alone, error, played, sharded
from ranks import processes
from rules import EXACT, RULES, K, N, V, learned
from torch.utils.checkpoint import checkpoint
from transformers.models.rwkv.modeling_rwkv import rwkv_linear_attention
from transformers.models.xlstm.configuration_xlstm import xLSTMConfig
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend
from verified import brought

from burst_mcore import Layout, Topology, shard
from burst_mcore.layout import positions
from burst_mcore.recurrent import Heads, Shards, exchange, recurrence
from burst_mcore.recurrent import heads as module
from burst_mcore.recurrent.halo import turned
from burst_mcore.recurrent.heads import heads

HEADS = 12
PACKED = (0, 5, 6, 29, N)


def nonlinear():
    """(A kernel whose states have no affine map, tensors, parameters): h_t = tanh(r h_(t-1) + x_t) + w_t."""
    torch.manual_seed(0)
    x, w = torch.randn(2, N, HEADS).double(), torch.randn(2, N, 3).double()
    rate = torch.randn(HEADS).double().requires_grad_()

    def run(tensors, own):
        (x, w), (rate,) = tensors, own
        state, outs = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(rate * state + x[:, t]) + w[:, t].sum(-1, keepdim=True)
            outs.append(state)
        return torch.stack(outs, 1)

    return Heads("a nonlinear recurrence", run, (2, None), like=0, parameters=(rate,)), (x, w), (rate,)


def both(name, layout, size, ends=(), groups=1, dtype=torch.float64, n=N, intra=0):
    """(outputs and all gradients by heads, the same of one process)."""
    rule, x, own = learned(name, HEADS, groups, dtype, n)
    gradient = torch.randn_like(x[rule.like])
    by_heads = partial(recurrence, rule, way="heads")
    everyone = played(layout, n, size, ends, intra)
    found = sharded(lambda x, shards: by_heads(x, shards), x, gradient, everyone, rule.dim, own)
    return found, alone(lambda x: rule.run(x, None)[0], x, gradient, ends or (0, n), rule.dim, own)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "block-striped:12"])
@pytest.mark.parametrize(("size", "ends"), [(3, ()), (4, PACKED)])
@pytest.mark.parametrize("dtype", EXACT)
def test_every_recurrence(name, layout, size, ends, dtype):
    assert error(*both(name, layout, size, ends, dtype=dtype)) < EXACT[dtype]


@pytest.mark.parametrize("name", ["delta rule", "Mamba 1", "Mamba 2"])
def test_an_error_in_bfloat16_is_at_most_twice_that_of_one_process(name):
    """Also of tensors that all heads read, whose gradients are sums of the ranks'."""
    found, here = both(name, "zigzag", 4, PACKED, dtype=torch.bfloat16)
    rule, x, own = learned(name, HEADS, dtype=torch.bfloat16)
    gradient = torch.randn_like(x[rule.like]).double()
    exact, wide = (
        [each.detach().double() for each in x],
        [each.detach().double().requires_grad_() for each in own],
    )
    rule, *_ = learned(name, HEADS, parameters=wide)
    want = alone(lambda x: rule.run(x, None)[0], exact, gradient, PACKED, rule.dim, wide)
    for ours, one, exactly in zip(found, here, want, strict=True):
        assert error((ours.double(),), (exactly,)) < 2 * error((one.double(),), (exactly,)) + 1e-12


@pytest.mark.parametrize("name", ["Mamba 2", "a delta rule whose heads share keys"])
@pytest.mark.parametrize(("groups", "size"), [(1, 4), (2, 4), (2, 6), (4, 2), (12, 3), (3, 6)])
def test_groups_of_heads_are_cut_or_shared(name, groups, size):
    assert error(*both(name, "zigzag", size, PACKED, groups)) < 1e-11


@pytest.mark.parametrize("dtype", EXACT)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_any_layout_and_any_documents(dtype, seed):
    """Of prime lengths, of one token, and with ranks that hold none."""
    draw = random.Random(seed)
    size, n = draw.choice([1, 2, 3, 4, 6]), draw.choice([1, 2, 3, 5, 13, 29, 31, 48])
    ends = (0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 4))), n)
    intra = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    name = draw.choice([*RULES])
    found, want = both(name, random_layout(draw, size, n), size, ends, dtype=dtype, n=n, intra=intra)
    assert error(found, want) < EXACT[dtype]


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_a_kernel_without_a_state(layout):
    kernel, x, own = nonlinear()
    gradient = torch.randn_like(x[0])
    found = sharded(partial(recurrence, kernel), x, gradient, played(layout, N, 4, PACKED), parameters=own)
    assert error(found, alone(lambda x: kernel.run(x, own), x, gradient, PACKED, parameters=own)) < 1e-11


def test_kernels_of_transformers_whose_states_have_running_maxima():
    """RWKV's by channels; xLSTM's by heads, its tokens along dimension 2. In float32, as they compute."""
    torch.manual_seed(0)
    decay, first = (torch.randn(HEADS).requires_grad_() for _ in range(2))
    rwkv = Heads(
        "RWKV", lambda x, own: rwkv_linear_attention(*own, *x)[0], (2, 2), like=1, parameters=(decay, first)
    )
    backend = xLSTMBackend(xLSTMConfig(chunk_size=4, autocast_kernel_dtype="float32"))
    xlstm = Heads("xLSTM", lambda x, _: backend(*x)[0], (1,) * 5, like=2, dim=2)
    of_rwkv = tuple(torch.randn(2, N, HEADS) for _ in range(2))
    of_xlstm = tuple(torch.randn(2, HEADS, N, *width) for width in ((K,), (K,), (V,), (), ()))
    for kernel, x in ((rwkv, of_rwkv), (xlstm, of_xlstm)):
        gradient, dim, own = torch.randn_like(x[kernel.like]), kernel.dim, kernel.parameters
        everyone = played("zigzag", N, 4, PACKED)
        found = sharded(partial(recurrence, kernel), x, gradient, everyone, dim, own)
        want = alone(lambda x, run=kernel.run, own=own: run(x, own), x, gradient, PACKED, dim, own)
        assert error(found, want) < 2e-6, kernel.name


def test_two_runs_are_equal_bit_for_bit():
    (one, _), (other, _) = (both("Mamba 2", "zigzag", 4, PACKED, dtype=torch.float32) for _ in range(2))
    assert all(map(torch.equal, one, other))


def test_autocast_changes_nothing():
    def under(enabled):
        def here(x, shards):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return recurrence(rule, x, shards, "heads")

        return sharded(here, x, gradient, played("zigzag", N, 3))

    rule, x, _ = learned("delta rule", HEADS, dtype=torch.float32)
    gradient = torch.randn_like(x[rule.like])
    assert all(map(torch.equal, under(enabled=True), under(enabled=False)))


def test_tokens_in_the_order_of_ranks_are_wrong(monkeypatch):
    monkeypatch.setattr(module, "heads", lambda layout, *where: heads(Layout("contiguous"), *where))
    assert error(*both("delta rule", "zigzag", 4)) > 1e-3


def test_gradients_that_are_not_summed_are_wrong(monkeypatch):
    """Mamba 2's B and C: those of the last rank alone come back."""

    def last_alone(moves, tensors, pass_, back):
        if pass_ == "backward" and back and moves.shards.topology.rank != 3:
            tensors = tuple(x * (not s) for x, s in zip(tensors, moves.summed, strict=True))
        return carried(moves, tensors, pass_, back)

    carried = exchange.RowMoves.carried
    assert error(*both("Mamba 2", "zigzag", 4)) < 1e-11
    monkeypatch.setattr(exchange.RowMoves, "carried", last_alone)
    assert error(*both("Mamba 2", "zigzag", 4)) > 1e-3


@pytest.mark.parametrize("layout", layouts(4), ids=str)
def test_a_program_brings_each_rank_all_tokens_in_their_order(layout):
    held = [positions(61, rank=rank, size=4, layout=layout).tolist() for rank in range(4)]
    for rank in range(4):
        assert brought(heads(layout, 61, 4, 2), rank, 61, held) == [*range(61)]


def test_a_program_is_as_it_was_read():
    title, *lines = str(heads(Layout("zigzag"), 8, 2, 2)).splitlines()
    assert title == "heads: the whole sequence of each rank's heads; 1 x 2 ranks"
    assert [[cell.strip() for cell in line.split("|")] for line in lines] == [
        ["step", "rank 0", "rank 1"],
        [
            "0",
            "whole<1(4)  rows>1(4)  wait direct data  copy(2)  copy(2)",
            "whole<0(4)  rows>0(4)  wait direct data  copy(4)",
        ],
    ]


def test_bytes_sent_are_those_counted():
    """Of Mamba 2 with 2 groups on 4 ranks: a rank gets 3 heads of x and of dt, one group of B and of C."""
    rule, x, _ = learned("Mamba 2", HEADS, 2)
    everyone = played("zigzag", N, 4)
    sharded(partial(recurrence, rule, way="heads"), x, torch.randn_like(x[0]), everyone)
    forth = heads(Layout("zigzag"), N, 4, 4)
    back = replace(forth, programs=tuple(map(turned, forth.programs)))
    (values, _), (keys, _) = (x[0].shape[-1], x[1]), (x[2].shape[-1], x[3])
    into, out = 2 * 8 * (3 * values + 3 + 2 * keys), 2 * 8 * 3 * values
    sent = sum(sum(shards.carrier.sent.values()) for shards in everyone)
    counted = sum(p.received(rank, row=into + out) for p in (forth, back) for rank in range(4))
    assert sent == counted == 2 * (into + out) * N * 3


def test_what_does_not_go_by_heads_is_refused_before_any_message():
    rule, x, _ = learned("delta rule", HEADS)
    kernel, (y, w), _ = nonlinear()
    for shards in played("contiguous", 5, 5):
        own = partial(shard, rank=shards.topology.rank, size=5, layout="contiguous")
        with pytest.raises(ValueError, match="delta rule: 5 ranks cannot share 12 heads evenly. Choose a"):
            recurrence(rule, tuple(own(each[:, :5], 1) for each in x), shards, "heads")
        with pytest.raises(ValueError, match="a nonlinear recurrence: 5 ranks cannot share 12 heads"):
            recurrence(kernel, tuple(own(each[:, :5], 1) for each in (y, w)), shards)
        assert not shards.agreed
    (shards, *_) = played("striped", N, 4)
    own = tuple(shard(each, 1, rank=0, size=4, layout="striped") for each in x)
    with pytest.raises(ValueError, match="striped deals neighbouring tokens to different ranks"):
        recurrence(rule, own, shards)
    with pytest.raises(ValueError, match=r"delta rule does not go by heads: set heads=Heads\(...\)"):
        recurrence(replace(rule, heads=None), own, shards, "heads")
    with pytest.raises(ValueError, match="way must be 'states' or 'heads', got 'bytes'"):
        recurrence(rule, own, shards, "bytes")
    with pytest.raises(ValueError, match="documents must ascend from 0 to the 48 tokens"):
        recurrence(rule, own, replace(shards, ends=(0, 20)), "heads")


def test_groups_that_ranks_cannot_share_are_refused():
    rule, x, _ = learned("Mamba 2", HEADS, 4)
    (shards, *_) = played("contiguous", N, 6)
    with pytest.raises(ValueError, match="Mamba 2: 6 ranks cannot share 4 heads evenly"):
        recurrence(rule, tuple(each[:, :8] for each in x), shards, "heads")


def test_a_scalar_that_is_trained_is_of_all_heads():
    torch.manual_seed(0)
    x, scale = torch.randn(2, N, HEADS).double(), torch.tensor(0.3).double().requires_grad_()
    gradient = torch.randn_like(x)
    kernel = Heads("scaled", lambda x, own: own[0] * x[0].cumsum(1), (2,), like=0, parameters=(scale,))
    run = lambda x, shards: recurrence(kernel, x, shards)  # noqa: E731
    found = sharded(run, (x,), gradient, played("striped", N, 4, ()), 1, (scale,))
    want = alone(lambda x: scale * x[0].cumsum(1), (x,), gradient, (0, N), 1, (scale,))
    assert error(found, want) < 1e-11


def test_a_kernel_that_is_described_wrongly_is_refused():
    (shards, *_) = played("zigzag", N, 1)
    x = torch.randn(2, N, HEADS)
    for heads_, outs, words in (
        ((2, 2), slice(None), r"1 tensors need as many heads=, got \(2, 2\)"),
        ((2,), slice(1), r"gave outputs \(2, 48, 1\), its like has \(2, 48, 12\)"),
    ):
        kernel = Heads("first", lambda x, _, outs=outs: x[0][..., outs], heads_, like=0)
        with pytest.raises(ValueError, match=words):
            recurrence(kernel, (x,), shards)


def on_ranks(rank, size, intra):
    """The largest error over gloo, recomputed and not, with documents that change from step to step."""
    topology, errors = Topology.from_group(torch.distributed.group.WORLD, intra_size=intra), []
    for step, (layout, ends) in enumerate([("striped", (0, N)), ("zigzag", (0, 13, N)), ("zigzag", PACKED)]):
        rule, x, own = learned("Mamba 2", HEADS, groups=3 if size == 3 else 2)
        gradient = torch.randn_like(x[0])
        how = {"rank": rank, "size": size, "layout": layout}
        shards = Shards(topology, Layout.of(layout), N, ends)
        here = [shard(each, 1, **how).detach().requires_grad_() for each in x]
        run = lambda *x, shards=shards, rule=rule: recurrence(rule, x, shards, "heads")  # noqa: E731
        out = checkpoint(run, *here, use_reentrant=False) if step else run(*here)
        found = [out, *torch.autograd.grad(out, [*here, *own], shard(gradient, 1, **how))]
        for each in found[5:]:
            torch.distributed.all_reduce(each)
        want = alone(lambda x, rule=rule: rule.run(x, None)[0], x, gradient, ends, parameters=own)
        errors.append(error(found, [*(shard(each, 1, **how) for each in want[:5]), *want[5:]]))
    return max(errors)


@pytest.mark.parametrize(
    ("size", "intra"), [(4, 2), *(pytest.param(size, size, marks=pytest.mark.slow) for size in (2, 3))]
)
def test_over_gloo(size, intra):
    assert max(processes(size, on_ranks, intra)) < 1e-11


def differing(rank, size):
    topology = Topology.from_group(torch.distributed.group.WORLD, intra_size=size)
    rule, x, _ = learned("delta rule", HEADS)
    own = tuple(shard(each, 1, rank=rank, size=size) for each in x)
    words = r"forward of states on ranks \[0\], forward of heads, delta rule on ranks \[1\]"
    with pytest.raises(ValueError, match=words):
        recurrence(rule, own, Shards(topology, Layout("zigzag"), N), "heads" if rank else "states")
    with pytest.raises(ValueError, match="documents"):
        recurrence(rule, own, Shards(topology, Layout("zigzag"), N, (0, 20 + rank, N)), "heads")
    frozen = tuple(each.detach() for each in own) if rank else own
    with pytest.raises(ValueError, match=r"needs gradients: True on ranks \[0\], False on ranks \[1\]"):
        recurrence(rule, frozen, Shards(topology, Layout("zigzag"), N), "heads")
    return True


def test_ranks_that_call_otherwise_are_refused_on_all():
    assert processes(2, differing) == [True, True]
