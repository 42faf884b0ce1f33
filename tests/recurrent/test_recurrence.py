"""Recurrences and convolutions over shards equal those of each whole document, in values and gradients."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import random_layout
from plain import delta_rule as plain_delta_rule
from plain import selective_scan
from players import alone, error, played, sharded
from ranks import on_ranks, processes, threads
from rules import EXACT, ON_GPUS, RULES, A, H, K, N, V, learned, tensors
from torch.nn.functional import conv1d, pad
from torch.utils.checkpoint import checkpoint

from burst_mcore import Layout, Topology, shard
from burst_mcore.recurrent import Shards, convolution, recurrence
from burst_mcore.recurrent.bound import _options
from burst_mcore.recurrent.kernels import LAST, delta_rule, gated, mamba2


def whole(rule, x, shards):
    return recurrence(rule, x, shards)


def compared(name, layout, n, size, ends=(), intra=0, dtype=torch.float64):
    rule, (x, gradient) = RULES[name], tensors(name, n, dtype)
    found = sharded(partial(whole, rule), x, gradient, played(layout, n, size, ends, intra), rule.dim)
    return error(found, alone(lambda own: rule.run(own, None)[0], x, gradient, ends or (0, n), rule.dim))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ends", [(), (0, 5, 6, 29, N)])
def test_every_recurrence(name, layout, ends):
    assert compared(name, layout, N, 4, ends, 2) < EXACT[torch.float64]


def test_linear_attention_in_chunks_is_that_of_its_tokens():
    x, _ = tensors("linear attention in chunks")
    pairs = [RULES[name].run(x, None) for name in ("linear attention in chunks", "a gate of a head")]
    assert error(*pairs) < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_states_and_decays_of_bfloat16_are_in_float32_also_under_autocast(name):
    """Beside those of the same tensors in float32, of every fragment of 4 ranks."""
    rule, (x, gradient), errors = ON_GPUS[name], tensors(name, dtype=torch.bfloat16), []

    def noted(run):
        def noting(x, *state):
            found = run(x, *state)
            with torch.autocast("cpu", enabled=False):
                want = run(tuple(each.float() for each in x), *state)
            pair = (found[1], want[1]) if state else (found, want)
            errors.append(error(*([each.detach()] for each in pair)))
            assert {each.dtype for each in pair} == {torch.float32}
            return found

        return noting

    noting = replace(rule, run=noted(rule.run), decay=noted(rule.decay))

    def here(own, shards):
        with torch.autocast("cpu", torch.bfloat16):
            return recurrence(noting, own, shards)

    sharded(here, x, gradient, played("contiguous", N, 4), rule.dim)
    assert len(errors) == 8 and max(errors) < 1e-6  # 3 finals, 2 decays, 3 runs from a state


@pytest.mark.parametrize("name", RULES)
def test_gates_in_float32_beside_tensors_in_bfloat16(name):
    """As models mix them. States are float32; an error is at most twice that of one process, or float32's."""
    ends, sizes = (0, 5, 6, 29, N), {"heads": 4, "groups": 2}
    rule, x, own = learned(name, **sizes, dtype=torch.bfloat16, gates=torch.float32, rules=ON_GPUS)
    everyone, gradient = played("zigzag", N, 4, ends), torch.randn_like(x[rule.like])
    found = sharded(partial(recurrence, rule), x, gradient, everyone, rule.dim, own)
    assert [each.dtype for each in found] == [each.dtype for each in (x[rule.like], *x, *own)]
    assert all(", torch.float32" in each["shapes"] for each in everyone[0].agreed)
    here = alone(lambda x: rule.run(x, None)[0], x, gradient, ends, rule.dim, own)
    exact, wide = ([each.detach().double().requires_grad_() for each in xs] for xs in (x, own))
    rule, *_ = learned(name, **sizes, parameters=wide)
    want = alone(lambda x: rule.run(x, None)[0], exact, gradient.double(), ends, rule.dim, wide)
    for ours, one, exactly in zip(found, here, want, strict=True):
        bar = max(2 * error([one.double()], [exactly]), EXACT.get(ours.dtype, 0))
        assert error([ours.double()], [exactly]) <= bar


def drawn(seed, most):
    draw = random.Random(seed)
    size, n = draw.randint(1, 6), draw.randint(1, most)
    intra = draw.choice([d for d in range(1, size + 1) if size % d == 0])
    layout = random_layout(draw, size, n)
    while layout.kind == "striped":
        layout = random_layout(draw, size, n)
    ends = (0, *sorted(draw.randint(0, n) for _ in range(draw.randint(0, 4))), n)
    return layout, n, size, ends, intra


@pytest.mark.parametrize("dtype", EXACT)
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_any_layout_and_any_documents(dtype, seed):
    """Of prime lengths, of one token, and with ranks that hold none."""
    layout, n, size, ends, intra = drawn(seed, 30)
    name = random.Random(seed).choice([*RULES])
    assert compared(name, layout, n, size, ends, intra, dtype) < EXACT[dtype]


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


def test_a_rank_without_tokens_takes_part_in_every_exchange():
    assert compared("delta rule", "contiguous", 3, 6) < 1e-11
    assert convolved("contiguous", 3, 6, (0, 3), 4) < 1e-11


def test_gradients_of_gradients_are_refused():
    def rank(r, function):
        own = tuple(x.detach().requires_grad_() for x in (y[:, : N // 2] for y in x))
        with pytest.raises(RuntimeError, match="have no second derivative"):
            torch.autograd.grad(function(own, everyone[r]).sum(), own, create_graph=True, allow_unused=True)

    (x, _), everyone = tensors("delta rule"), played("zigzag", N, 2)
    weight = torch.rand(H * V, 1, 3, dtype=torch.float64)

    def convolved_values(own, shards):
        return convolution(
            lambda y: conv1d(pad(y, (2, 0)), weight, groups=H * V), own[2].flatten(2).mT, 3, shards, 2
        )

    for function in (partial(whole, RULES["delta rule"]), convolved_values):
        threads(2, partial(rank, function=function))


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


def over_gloo(rank, size, intra):
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


@pytest.mark.parametrize(("size", "intra"), [(4, 2), (3, 3), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_over_gloo(size, intra):
    assert max(processes(size, over_gloo, intra)) < 1e-11


@pytest.mark.parametrize(
    "name", ["delta rule", "a linear unit", pytest.param("Mamba 2", marks=pytest.mark.slow)]
)
@on_ranks(2)
def test_a_recurrence_that_is_made_again_or_offloaded(rank, size, name):
    """The largest error where a recurrence alone is made again or waits elsewhere, over two backwards.

    From some ranks states leave alone. What is asked for twice would be made, or moved, twice.
    """
    topology = Topology.from_group(torch.distributed.group.WORLD, intra_size=size)
    rule, (x, gradient) = RULES[name], tensors(name)
    want, errors = partial(alone, lambda x: rule.run(x, None)[0], x, gradient, dim=rule.dim), []
    ways = ("checkpoint", "reentrant", "offload")
    documents = ("contiguous", (0, N)), ("zigzag", (0, N)), ("zigzag", (0, 36, N))
    for (layout, ends), way in product(documents, ways):
        how = {"rank": rank, "size": size, "layout": layout}
        shards, count = Shards(topology, Layout(layout), N, ends), Counter()
        own = tuple(shard(each, rule.dim, **how).detach().requires_grad_() for each in x)

        def run(*x, shards=shards, count=count):
            count["run"] += 1
            return recurrence(rule, x, shards)

        def back(each, count=count):
            count[id(each)] += 1
            return each[0].clone()

        with torch.autograd.graph.saved_tensors_hooks(lambda each: [each], back):
            out = run(*own) if way == "offload" else checkpoint(run, *own, use_reentrant=way == "reentrant")
        for retain in (True, False):
            out.backward(shard(gradient, rule.dim, **how), retain_graph=retain)
        assert count.pop("run") == (1 if way == "offload" else 3) and {*count.values()} <= {2}, count
        found = [out.detach(), *(each.grad / 2 for each in own)]
        errors.append(error(found, [shard(each, rule.dim, **how) for each in want(ends=ends)]))
    assert max(errors) < 1e-11


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"output_final_state": True}, "a cache in a forward over shards"),
        ({"initial_state": torch.zeros(1)}, "a cache in a forward over shards"),
        ({"scale": 7.0}, "takes the options use_qk_l2norm_in_kernel, and the mixer sets scale"),
    ],
)
def test_options_of_a_mixer_that_a_kernel_over_shards_would_not_get_are_refused(given, words):
    def chunk_kda(q, k, v, g, scale=None, use_qk_l2norm_in_kernel=False, **of_models):
        """By the signature of fla's."""

    of_model = {"g": None, "num_items_in_batch": 3, "use_qk_l2norm_in_kernel": True}
    known = {"use_qk_l2norm_in_kernel": True}
    assert _options(chunk_kda, of_model, LAST, *known) == known
    with pytest.raises(ValueError, match=words):
        _options(chunk_kda, of_model | given, LAST, *known)


def alone_trained(rank, size, layout):
    """The largest error of each tensor's and parameter's gradient, where nothing else needs one."""
    topology = Topology.from_group(torch.distributed.group.WORLD, intra_size=size)
    how = {"rank": rank, "size": size, "layout": Layout(layout)}
    errors = {}
    for name in ("delta rule", "Mamba 2"):
        rule, x, own = learned(name)
        gradient = torch.randn_like(x[rule.like])
        wants = torch.autograd.grad(rule.run(tuple(x), None)[0], [*x, *own], gradient)
        for number, (leaf, want) in enumerate(zip([*x, *own], wants, strict=True)):
            for each in (*x, *own):
                each.requires_grad_(each is leaf)
            shards = tuple(shard(each, 1, **how) for each in x)
            out = recurrence(rule, shards, Shards(topology, how["layout"], N))
            (found,) = torch.autograd.grad(out, leaf, shard(gradient, 1, **how))
            torch.distributed.all_reduce(found)
            errors[name, number] = error((found,), (want,))
    return errors


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_one_tensor_or_parameter_alone_is_trained(layout):
    """A rank that only ends documents makes no state, and takes part in backward all the same."""
    for errors in processes(2, alone_trained, layout):
        assert len(errors) == 5 + 7 and max(errors.values()) < 1e-11, errors


def without_a_state(q, k, v, g, beta, **_):
    return plain_delta_rule(q, k, v, g=g, beta=beta)


def test_a_kernel_that_takes_no_state_or_swallows_one_is_refused_by_name():
    with pytest.raises(ValueError, match="kernel without_a_state takes no initial_state or output_final"):
        delta_rule(without_a_state)
    with pytest.raises(ValueError, match="takes no initial_state or output_final_state: states could not"):
        gated(lambda q, k, v, g: (v, None))
    with pytest.raises(ValueError, match="kernel selective_scan takes no initial_states or return_final"):
        mamba2(selective_scan, A)
