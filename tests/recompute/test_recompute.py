"""Recompute policies in one process: what is kept and freed, in whatever order calls come back."""

import contextlib
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.utils.checkpoint as torchs
from cells import crossed
from kernel_calls import rows_of_kernel_calls
from torch import nn

from burst_mcore import BurstConfig, Mask, Topology, burst_attention
from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.attention.resolve import call_of
from burst_mcore.checkpointing import (
    Full,
    KeepAttention,
    Offload,
    RecomputeError,
    Segment,
    checkpoint,
    recorded,
)

N, HEADS, DIM = 32, 2, 8
POLICIES = {
    "full": Full(),
    "keep": KeepAttention(),
    "segment": Segment(0.5),
    "offload": Offload(Segment(0.5)),
}


class Layer(nn.Module):
    """Projections and dropout around attention, as a model has them."""

    def __init__(self, seed=0, number=1, dropout=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.layer_number, self.times = number, 1
        self.topology, self.mask, self.config = Topology.single(), Mask.causal(), BurstConfig()
        width = HEADS * DIM
        self.qkv, self.out, self.drop = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        for _ in range(self.times):
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
            attended = burst_attention(q, k, v, topology=self.topology, mask=self.mask, config=self.config)
            x = x + self.drop(self.out(attended.flatten(2)))
        return x


def _input(seed):
    return torch.randn(
        1, N, HEADS * DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    ).requires_grad_()


def _gradients(layers, inputs):
    return [x.grad for x in inputs] + [p.grad for layer in layers for p in layer.parameters()]


def _wanted(layers, seeds):
    """Gradients of the same without checkpointing, one microbatch after another."""
    inputs = [_input(seed) for seed in seeds]
    for x in inputs:
        y = x
        for layer in layers:
            y = layer(y)
        y.square().sum().backward()
    want = [g.clone() for g in _gradients(layers, inputs)]
    for layer in layers:
        layer.zero_grad()
    return want


def _assert_equal(layers, inputs, want):
    for got, wanted in zip(_gradients(layers, inputs), want, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("order", "reentrant"),
    [("first in, first out", False), ("last in, first out", True), ("1F1B", False), ("1F1B", True)],
)
def test_microbatches_in_flight_with_eval_forwards_in_between(policy, reentrant, order):
    layers = [Layer(0, 1), Layer(1, 2)]
    want = _wanted(layers, range(4))
    inputs, outs = [_input(seed) for seed in range(4)], {}

    def forward(i):
        y = inputs[i]
        for layer in layers:
            y = checkpoint(layer, y, policy=POLICIES[policy], use_reentrant=reentrant)
        outs[i] = y.square().sum()
        with torch.no_grad():
            checkpoint(layers[0], _input(99), policy=POLICIES[policy], use_reentrant=reentrant)

    def backward(i):
        outs.pop(i).backward()

    plans = {
        "first in, first out": [forward] * 4 + [backward] * 4,
        "1F1B": [forward, forward, backward, forward, backward, forward, backward, backward],
    }
    plan = plans.get(order, [forward] * 4 + [backward] * 4)
    at = {forward: iter(range(4)), backward: iter(reversed(range(4)) if "last" in order else range(4))}
    for step in plan:
        step(next(at[step]))
    _assert_equal(layers, inputs, want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_several_calls_in_one_checkpoint_and_one_in_another(policy, reentrant):
    """Nested: what the outer one kept serves the inner one's forward, which keeps it for its own."""
    layers = [Layer(0, 1), Layer(1, 2), Layer(2, 3)]
    layers[1].times = 2
    want = _wanted(layers, [0])
    one = partial(checkpoint, policy=POLICIES[policy], use_reentrant=reentrant)
    x = _input(0)
    one(lambda y: layers[2](one(lambda z: layers[1](one(layers[0], z)), y)), x).square().sum().backward()
    _assert_equal(layers, [x], want)


@pytest.fixture
def forwards(monkeypatch):
    """Rows of queries of each call of the kernel."""
    monkeypatch.setitem(KERNELS, "aten-cpu", KERNELS["aten-cpu"])
    yield rows_of_kernel_calls()
    choose.cache_clear()
    call_of.cache_clear()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_backward_computes_all_again(forwards, reentrant):
    layer = Layer()
    layer.config = BurstConfig(kernel="aten-cpu")
    want = _wanted([layer], [0])
    x = _input(0)
    loss = checkpoint(layer, x, policy=Segment(0.5), use_reentrant=reentrant).square().sum()
    forwards.clear()
    loss.backward(retain_graph=True)
    assert forwards == [N // 2]
    _assert_equal([layer], [x], want)
    x.grad = None
    layer.zero_grad()
    if reentrant:
        return  # torch does not retain the graph of a reentrant checkpoint
    forwards.clear()
    loss.backward()
    assert forwards == [N]
    _assert_equal([layer], [x], want)


@pytest.mark.parametrize("cast", [False, True])
def test_dropout_elsewhere_in_the_layer_and_autocast(cast):
    layer, got = Layer(dropout=0.5), []
    for policy in (None, KeepAttention(), Segment(0.5)):
        torch.manual_seed(7)
        layer.zero_grad()
        x = _input(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            out = layer(x) if policy is None else checkpoint(layer, x, policy=policy)
        torch.manual_seed(8)
        out.square().sum().backward()
        got.append([out, *(g.clone() for g in _gradients([layer], [x]))])
    limit = dict(rtol=0.05, atol=0.05) if cast else dict(rtol=2e-5, atol=2e-6)
    for other in got[1:]:
        for a, b in zip(other, got[0], strict=True):
            torch.testing.assert_close(a, b, **limit)


@pytest.mark.parametrize(
    ("reentrant", "dynamic", "backend"),
    crossed(
        (False, True),
        (None, True),
        ("aot_eager", "inductor"),
        quick=lambda reentrant, dynamic, backend: backend == "aot_eager" and reentrant == bool(dynamic),
    ),
)
def test_compiled_layers(reentrant, dynamic, backend):
    """Other lengths, shares and policies with the same compiled code, and more layers than torch compiles."""
    layers = [Layer(number, number) for number in range(10)]
    torch._dynamo.reset()
    compiled = [torch.compile(layer, backend=backend, dynamic=dynamic) for layer in layers]
    auto = Segment("auto", memory_gb=1e-5)
    cases = [(32, 0.5), (48, 0.25), (32, 0.75), (32, 0.6), (32, 1.0), (48, auto), (48, auto)]
    for n, keep in cases:
        policy = keep if keep is auto else Segment(keep)
        x = torch.randn(1, n, HEADS * DIM)
        found = []
        for run in (layers, compiled):
            for layer in layers:
                layer.zero_grad()
            y = mine = x.clone().requires_grad_()
            for layer in run:
                y = (
                    layer(y)
                    if run is layers
                    else checkpoint(layer, y, policy=policy, use_reentrant=reentrant)
                )
            y.square().mean().backward()
            found.append([g.clone() for g in _gradients(layers, [mine])])
        for got, want in zip(*found[::-1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_through_torchs_own_checkpoint(forwards):
    layer = Layer()
    layer.config = BurstConfig(kernel="aten-cpu")
    want = _wanted([layer], [0, 1])
    inputs = [_input(0), _input(1)]
    contexts = Segment(0.5).contexts
    losses = [
        torchs.checkpoint(layer, x, use_reentrant=False, context_fn=contexts).square().sum() for x in inputs
    ]
    forwards.clear()
    for loss in losses:
        loss.backward(retain_graph=loss is losses[0])
    assert forwards == [N // 2] * 2
    _assert_equal([layer], inputs, want)
    with torch.no_grad():
        assert all(isinstance(c, contextlib.nullcontext) for c in Segment(0.5).contexts())


def _watched(policy):
    """(policy, weak references to what it keeps, (address, shape) of that by call)."""
    seen, kept, hold = [], [], policy.hold

    def watching(what):
        seen.extend(weakref.ref(x) for x in what.tensors)
        kept.append([(x.data_ptr(), tuple(x.shape)) for x in what.tensors])
        return hold(what)

    object.__setattr__(policy, "hold", watching)
    return policy, seen, kept


@pytest.mark.parametrize("policy", [KeepAttention(), Segment(0.5)], ids=["keep", "segment"])
def test_what_is_kept_is_freed_as_soon_as_it_is_used(policy):
    (policy, seen, _), layers, alive = _watched(policy), [Layer(0, 1), Layer(1, 2)], []
    x = _input(0)
    y = checkpoint(layers[0], x, policy=policy)
    y.register_hook(lambda g: alive.append([ref() is not None for ref in seen]))
    checkpoint(layers[1], y, policy=policy).square().sum().backward()
    assert alive == [[True, True, False, False]]  # the second layer's are gone, the first's still there
    gc.collect()
    assert not any(ref() is not None for ref in seen)


def test_an_output_that_is_written_to_is_noticed():
    def attend(q):
        return burst_attention(q, q, q, topology=Topology.single(), mask=Mask.causal()).mul_(2)

    x = torch.randn(1, N, HEADS, DIM, requires_grad=True)
    out = checkpoint(attend, x, policy=KeepAttention(), use_reentrant=True)  # else torch forbids it
    with pytest.raises(RecomputeError, match="modified in place"):
        out.sum().backward()


def _forgetful(layer, first, second):
    runs = iter([first, second])

    def run(x):
        layer.times = next(runs)
        return layer(x)

    return run


@pytest.mark.parametrize("policy", [Full(), Segment(0.5)], ids=["full", "segment"])
@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        ((1, 2), {"use_reentrant": True}, r"call 2 .*_forgetful.* has no record: its forward made 1"),
        ((2, 1), {"use_reentrant": True}, "made 1 calls of burst_attention, but its forward made 2"),
        ((1, 2), {"early_stop": False}, r"has no record|trying to save more tensors"),  # who comes first
    ],
)
def test_other_calls_in_the_recomputation_are_an_error(policy, runs, options, words):
    out = checkpoint(_forgetful(Layer(), *runs), _input(0), policy=policy, **options)
    with pytest.raises(RuntimeError, match=words):
        out.sum().backward()


CHANGES = {
    "mask": {"mask": Mask.full()},
    "softmax_scale": {"softmax_scale": 0.5},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.zeros(HEADS)},
    "layout": {"config": BurstConfig(layout="striped")},
    "k": {"kv_heads": 1},
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_attention_in_the_recomputation_is_an_error(what):
    def attend(q):
        asked = {"mask": Mask.causal(), **next(runs)}
        k = q[:, :, : asked.pop("kv_heads", HEADS)]
        return burst_attention(q, k, k, topology=Topology.single(), **asked)

    x = torch.randn(1, N, HEADS, DIM, requires_grad=True)
    for policy in (Full(), KeepAttention(), Segment(0.5)):
        runs = iter([{}, CHANGES[what]])
        out = checkpoint(attend, x, policy=policy, use_reentrant=True)
        with pytest.raises(RecomputeError, match=f"another than in its forward: {what} .*, not "):
            out.sum().backward()


def _documents_change(checkpointed):
    """The backward of a layer whose documents were overwritten after its forward."""
    layer = Layer()
    layer.mask = Mask.causal() & Mask.documents([0, 20, N])
    out = checkpointed(layer, _input(0))
    layer.mask = Mask.causal() & Mask.documents([0, 12, N])
    out.sum().backward()


@pytest.mark.parametrize(
    "checkpointed",
    [
        checkpoint,
        lambda layer, x: torchs.checkpoint(layer, x, use_reentrant=False, context_fn=Full().contexts),
        lambda layer, x: checkpoint(torch.compile(layer, backend="aot_eager", fullgraph=True), x),
        lambda layer, x: checkpoint(lambda y: checkpoint(layer, y), x),
    ],
    ids=["ours", "torch's", "compiled", "nested"],
)
def test_documents_that_change_before_a_full_recomputation_are_an_error(checkpointed):
    with pytest.raises(RecomputeError, match=r"its forward: mask causal & documents.*, not causal"):
        _documents_change(checkpointed)


def test_recorded_is_for_one_call():
    layer, x = Layer(), _input(0)
    run = recorded(layer, Segment(0.5))
    torchs.checkpoint(run, x, use_reentrant=True)
    with pytest.raises(RecomputeError, match="once for each call"):
        torchs.checkpoint(run, _input(1), use_reentrant=True)
    with torch.no_grad():
        assert recorded(layer, Segment(0.5)) is layer  # nothing would come back for it


@pytest.mark.parametrize(
    ("make", "words"),
    [
        *((partial(Segment, keep), "from 0 to 1") for keep in (-0.5, 1.5, float("nan"), None, True)),
        (lambda: Segment("most"), "or 'auto', got 'most'"),
        (lambda: Segment("auto"), "needs memory_gb"),
        (lambda: Segment("auto", memory_gb=0), "above 0; got 0"),
        (lambda: Segment(0.5, memory_gb=1), "memory_gb is for keep='auto'"),
        (lambda: Offload(0.5), "Offload takes"),
        (lambda: Offload(Offload(Full())), "Offload takes"),
        (lambda: checkpoint(Layer(), _input(0), policy=0.5), "policy must be Full"),
    ],
)
def test_policies_that_are_none(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_auto_takes_the_largest_share_that_fits():
    layers, each = [Layer(i, i) for i in range(4)], N * HEADS * (DIM + 1) * 4
    policy, _, kept = _watched(Segment("auto", memory_gb=2 * each / 1e9))
    want = _wanted(layers, [0])
    shares = []
    for _ in range(3):
        kept.clear()
        for layer in layers:
            layer.zero_grad()
        x = _input(0)
        y = x
        for layer in layers:
            y = checkpoint(layer, y, policy=policy)
        shares.append([of_call[0][1][1] / N if of_call else 0 for of_call in kept])
        y.square().sum().backward()
        _assert_equal(layers, [x], want)
    assert shares == [[0] * 4, [0.5] * 4, [0.5] * 4]  # learnt in the first step
    # More calls in flight than ever: the budget holds.
    outs = [checkpoint(layers[0], _input(i), policy=policy) for i in range(8)]
    assert policy._live.bytes <= 2 * each
    del outs, y
    gc.collect()
    assert policy._live.calls == policy._live.bytes == 0
