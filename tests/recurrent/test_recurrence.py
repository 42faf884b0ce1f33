"""Recurrences and convolutions over shards equal those of each whole document, in values and gradients."""

import random
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import random_layout
from plain import delta_rule as plain_delta_rule
from plain import gated_linear_attention, selective_scan
from players import alone, error, played, sharded
from ranks import processes
from torch.nn.functional import conv1d, normalize, pad, softplus

from burst_mcore import Layout, Topology, shard
from burst_mcore.recurrent import Shards, convolution, recurrence
from burst_mcore.recurrent.kernels import delta_rule, elementwise, gated, linear_attention, mamba1, mamba2

N, H, K, V = 48, 2, 3, 5


def tensors(name, n=N, dtype=torch.float64, seed=0):
    """(tensors of a recurrence, a gradient of its outputs)."""
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, n, H, K), normalize(torch.randn(2, n, H, K), dim=-1), torch.randn(2, n, H, V)
    gate = -torch.rand(2, n, H)
    rows = -torch.rand(2, n, H, K)
    beta = torch.rand(2, n, H)
    given = {
        "delta rule": (q, k, v, gate, beta),
        "Kimi's delta rule": (q, k, v, rows, beta),
        "a gate of a head": (q, k, v, gate),
        "a gate of each row": (q, k, v, rows),
        "Mamba 2": (v, torch.randn(2, n, H), torch.randn(2, n, 1, K), torch.randn(2, n, 1, K)),
        "linear attention in chunks": (q, k, v, gate),
        "a linear unit": (v.flatten(2), torch.rand(2, n, H * V)),
        "Mamba 1": tuple(torch.randn(2, rows, n) for rows in (V, V, K, K)),
    }[name]
    found = tuple(x.to(dtype) for x in given)
    return found, torch.randn_like(found[RULES[name].like])


A, D, BIAS = -torch.rand(H) - 0.1, torch.randn(H), torch.randn(H)


def chunk_scan(x, dt, A, B, C, *, D, dt_bias, dt_softplus, dt_limit, initial_states, return_final_states):
    """A stand-in of mamba-ssm's mamba_chunk_scan_combined, by its signature, from our reference."""
    assert dt_softplus and return_final_states
    dt = softplus(dt + dt_bias.to(dt)).clamp(*dt_limit)
    k, q = (y.expand(-1, -1, x.shape[2], -1) * 1 for y in (B, C))
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    out, final = gated_linear_attention(q, k, x * dt[..., None], dt * A.to(dt), initial_state=state)
    return out + D.to(x)[:, None] * x, final.transpose(-1, -2)


RULES = {
    "delta rule": delta_rule(plain_delta_rule),
    "Kimi's delta rule": delta_rule(plain_delta_rule),
    "a gate of a head": gated(gated_linear_attention),
    "a gate of each row": gated(gated_linear_attention),
    "Mamba 2": mamba2(chunk_scan, A, D=D, dt_bias=BIAS, dt_softplus=True, dt_limit=(0.01, 2.0)),
    "linear attention in chunks": gated(linear_attention, chunk=5),
    "a linear unit": elementwise(),
    "Mamba 1": mamba1(
        selective_scan,
        -torch.arange(1.0, K + 1).expand(V, K),
        D=torch.arange(V) - 1.0,
        delta_bias=torch.arange(V) / V,
        delta_softplus=True,
    ),
}


def whole(rule, x, shards):
    return recurrence(rule, x, shards)


def compared(name, layout, n, size, ends=(), intra=0, dtype=torch.float64):
    rule, (x, gradient) = RULES[name], tensors(name, n, dtype)
    found = sharded(partial(whole, rule), x, gradient, played(layout, n, size, ends, intra), rule.dim)
    return error(found, alone(lambda own: rule.run(own, None)[0], x, gradient, ends or (0, n), rule.dim))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ends", [(), (0, 5, 6, 29, N)])
def test_every_recurrence_in_float64(name, layout, ends):
    assert compared(name, layout, N, 4, ends, 2) < 1e-11


def test_linear_attention_in_chunks_is_that_of_its_tokens():
    x, _ = tensors("linear attention in chunks")
    pairs = [RULES[name].run(x, None) for name in ("linear attention in chunks", "a gate of a head")]
    assert error(*pairs) < 1e-12


def test_a_linear_unit_is_that_of_its_tokens():
    (x, a), state = tensors("a linear unit")[0], torch.randn(2, H * V).double()
    h, final = elementwise().run((x, a), state)
    for t in range(N):
        state = a[:, t] * state + x[:, t]
        assert error((h[:, t],), (state,)) < 1e-12
    assert torch.equal(final, h[:, -1])


@pytest.mark.parametrize("name", ["linear attention in chunks", "a linear unit", "Mamba 1"])
def test_states_are_in_float32_also_under_autocast(name):
    rule, x = RULES[name], tensors(name, dtype=torch.bfloat16)[0]
    want = rule.run(tuple(each.float() for each in x), None)[1]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = rule.run(x, None)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32 and error((state,), (want,)) < 1e-6


@pytest.mark.parametrize("name", RULES)
def test_every_recurrence_in_float32(name):
    assert compared(name, "zigzag", N, 3, (0, 17, N), dtype=torch.float32) < 2e-6


def drawn(seed, most):
    draw = random.Random(seed)
    size, n = draw.randint(1, 6), draw.randint(1, most)
    intra = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    layout = random_layout(draw, size, n)
    while layout.kind == "striped":
        layout = random_layout(draw, size, n)
    ends = (0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 4))), n)
    return layout, n, size, ends, intra


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_any_layout_and_any_documents(seed):
    """Of prime lengths, of one token, and with ranks that hold none."""
    layout, n, size, ends, intra = drawn(seed, 30)
    name = random.Random(seed).choice([*RULES])
    assert compared(name, layout, n, size, ends, intra) < 1e-11


def convolve(x, weight):
    return conv1d(pad(x, (weight.shape[-1] - 1, 0)), weight[:, None], groups=len(weight))


def convolved(layout, n, size, ends, width, reads=None):
    torch.manual_seed(1)
    x, weight, gradient = (torch.randn(*s).double() for s in ((2, 3, n), (3, width), (2, 3, n)))
    own = partial(convolve, weight=weight)

    def here(x, shards):
        return convolution(own, x[0], reads or width, shards, dim=-1)

    found = sharded(here, (x,), gradient, played(layout, n, size, ends), dim=-1)
    return error(found, alone(lambda x: own(x[0]), (x,), gradient, ends, dim=-1))


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 9))
def test_a_convolution_over_any_layout_and_any_documents(seed, width):
    layout, n, size, ends, _ = drawn(seed, 60)
    assert convolved(layout, n, size, ends, width) < 1e-11


def test_a_halo_one_row_short_is_wrong():
    assert convolved("zigzag", N, 3, (0, 20, N), 4, reads=3) > 1e-3


def test_states_that_pass_from_one_document_to_the_next_are_wrong():
    rule, (x, gradient) = RULES["delta rule"], tensors("delta rule")
    found = sharded(partial(whole, rule), x, gradient, played("zigzag", N, 4))
    assert error(found, alone(lambda own: rule.run(own, None)[0], x, gradient, (0, 20, N))) > 1e-3


def test_maps_composed_the_wrong_way_round_are_wrong(monkeypatch):
    composed = RULES["delta rule"].algebra.composed
    monkeypatch.setattr(
        type(RULES["delta rule"].algebra),
        "composed",
        lambda self, later, earlier: (
            composed(earlier, later) if earlier.decay is not None else composed(later, earlier)
        ),
    )
    assert compared("delta rule", "contiguous", N, 6) > 1e-3


def test_a_rank_without_tokens_takes_part_in_every_exchange():
    assert compared("delta rule", "contiguous", 3, 6) < 1e-11
    assert convolved("contiguous", 3, 6, (0, 3), 4) < 1e-11


def test_tensors_of_other_tokens_are_refused():
    (shards, *_) = played("zigzag", N, 4)
    with pytest.raises(ValueError, match="deals rank 0 12 of 48 tokens, along dimension 1, got"):
        recurrence(RULES["delta rule"], tensors("delta rule")[0], shards)
    with pytest.raises(ValueError, match="convolution: layout zigzag deals rank 0 12 of 48"):
        convolution(lambda x: x, torch.randn(1, 3, 7), 4, shards, dim=-1)


def test_bytes_sent_are_those_counted():
    rule, (x, gradient) = RULES["Kimi's delta rule"], tensors("Kimi's delta rule")
    everyone = played("zigzag", N, 4, (0, 20, N))
    sharded(partial(whole, rule), x, gradient, everyone)
    sent = sum(sum(shards.carrier.sent.values()) for shards in everyone)
    state, decay = 2 * H * K * V * 8, 2 * H * K * K * 8
    passes = [everyone[0].scan(backward=backward) for backward in (False, True)]
    assert sent == sum(p.received(rank, state=state, decay=decay) for p in passes for rank in range(4)) > 0


def layer(x, recur, mix):
    """A layer that mixes tokens twice: a convolution of the values, and a recurrence."""
    q, k, v, g, beta = x
    b, s, h, e = v.shape
    v = mix(v.permute(0, 2, 3, 1).reshape(b * h, e, s)).reshape(b, h, e, s).permute(0, 3, 1, 2)
    return recur((q, k, v, g, beta))


def on_ranks(rank, size, intra):
    """The largest error of a layer over gloo, with documents that change from step to step."""
    topology = Topology.from_group(torch.distributed.group.WORLD, intra_size=intra)
    rule, (x, gradient) = RULES["Kimi's delta rule"], tensors("Kimi's delta rule")
    mix = partial(convolve, weight=torch.tensor([[0.5, 1, -1, 2]] * V).double())
    how = {"rank": rank, "size": size, "layout": Layout("zigzag")}
    errors = []
    for ends in ((0, N), (0, 13, N), (0, 7, 11, 30, N)):
        shards = Shards(topology, how["layout"], N, ends)
        ours = partial(convolution, mix, width=4, shards=shards, dim=-1)
        own = tuple(shard(each, 1, **how).detach().requires_grad_() for each in x)
        out = layer(own, partial(recurrence, rule, shards=shards), ours)
        found = [out, *torch.autograd.grad(out, own, shard(gradient, 1, **how))]
        want = alone(lambda x: layer(x, lambda y: rule.run(y, None)[0], mix), x, gradient, ends)
        errors.append(error(found, [shard(each, 1, **how) for each in want]))
    return max(errors)


@pytest.mark.parametrize(("size", "intra"), [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_over_gloo(size, intra):
    assert max(processes(size, on_ranks, intra)) < 1e-11


def differing(rank, size):
    topology = Topology.from_group(torch.distributed.group.WORLD, intra_size=size)
    ends = (0, 20, N) if rank else (0, 21, N)
    x = tuple(shard(each, 1, rank=rank, size=size) for each in tensors("delta rule")[0])
    with pytest.raises(ValueError, match="documents"):
        recurrence(RULES["delta rule"], x, Shards(topology, Layout("zigzag"), N, ends))


def test_documents_that_differ_between_ranks_are_refused_on_all():
    processes(2, differing)
