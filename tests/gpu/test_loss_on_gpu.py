"""The fused head and loss on a GPU: products into float32, Triton for the rest, against float64."""

import math
import warnings

import pytest
import torch
from plain_loss import linear_cross_entropy

from burst_mcore.loss import fused_linear_cross_entropy

OPTIONS = {
    "plain": {},
    "all": {"z_loss": 1e-3, "label_smoothing": 0.1, "softcap": 30.0, "temperature": 0.8},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
}


def _draw(dtype, tokens=1000, d=256, v=5003):
    hidden = torch.randn(tokens, d, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(v, d, device="cuda") / d**0.5).to(dtype).requires_grad_()
    bias = torch.randn(v, device="cuda").to(dtype).requires_grad_()
    labels = torch.randint(0, v, (tokens,), device="cuda")
    labels[::7] = -100
    return hidden, weight, bias, labels, torch.rand(tokens, device="cuda")


def _allowed(dtype, of_plain, tokens):
    """The distance from float64 that is allowed, given the one of plain torch in the same dtype."""
    if dtype == torch.float64:  # plain torch is what is exact here: sums in another order, with room
        return 1e-12
    half_ulp = torch.finfo(dtype).eps / 2
    # All are sums over tokens, or over a vocabulary, which is longer. However lucky plain torch is, float32
    # loses half an ulp at each level of a pairwise sum. What 16 bits hold is summed in float32 and loses half
    # an ulp of theirs once.
    levels = math.log2(tokens) if dtype == torch.float32 else 1
    return 2 * max(of_plain, levels * half_ulp)


def _distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("upstream", ["scaled", "any"])
def test_against_float64(dtype, name, upstream):
    hidden, weight, bias, labels, weights = _draw(dtype)
    options = OPTIONS[name]
    given = None
    if name == "none":
        given = 3 * weights if upstream == "scaled" else torch.randn_like(weights)

    def run(function, as_, **more):
        leaves = [x.detach().to(as_).requires_grad_() for x in (hidden, weight, bias)]
        loss = function(leaves[0], leaves[1], labels, weights.to(as_), leaves[2], **options, **more)
        with torch.no_grad():
            up = None if given is None else given.to(loss.dtype)
        return loss, *torch.autograd.grad(loss, leaves, up)

    ours = run(fused_linear_cross_entropy, dtype, chunk_tokens=300)
    plain, exact = run(linear_cross_entropy, dtype), run(linear_cross_entropy, torch.float64)
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert _distance(a, c) <= _allowed(dtype, _distance(b, c), len(hidden))


def test_forward_waits_for_the_device_once():
    hidden, weight, bias, labels, weights = _draw(torch.bfloat16)

    def run():
        return fused_linear_cross_entropy(hidden, weight, labels, weights, bias, chunk_tokens=300)

    run()  # compiles
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            loss = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
    assert len([w for w in waits if "called a synchronizing" in str(w.message)]) == 1


def test_a_capture_is_refused():
    hidden, weight, bias, labels, _ = _draw(torch.bfloat16)
    capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="fused_linear_cross_entropy cannot be captured"), capture:
        fused_linear_cross_entropy(hidden, weight, labels, bias=bias)


def test_memory_is_that_of_a_chunk():
    hidden, weight, _, labels, _ = _draw(torch.bfloat16, tokens=16384, d=64, v=32000)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused_linear_cross_entropy(hidden, weight, labels, chunk_tokens=256).backward()
    assert torch.cuda.max_memory_allocated() - before < 16384 * 32000 * 2 / 4
