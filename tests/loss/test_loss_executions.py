"""The fused loss in sixteen bits, and by Triton in its interpreter."""

import math

import pytest
import torch
from heads import both, distance, draw
from plain_loss import linear_cross_entropy

from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.loss.products import Products


def unfused_bf16(hidden, weight, labels):
    """dW as plain layers give it in bfloat16, its products summed in float32, and the loss."""
    logits = (hidden @ weight.t()).float()
    loss = torch.nn.functional.cross_entropy(logits, labels)
    p = torch.softmax(logits, -1)
    p[torch.arange(len(labels)), labels] -= 1
    return loss, (p / len(labels)).bfloat16().float().t() @ hidden.float()


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 2.0])
def test_bfloat16_is_as_exact_as_unfused_in_any_number_of_chunks(sharpness):
    tokens, d, v = 1024, 128, 2000
    make = torch.Generator().manual_seed(0)
    weight = (torch.randn(v, d, generator=make) * sharpness / math.sqrt(d)).bfloat16().requires_grad_()
    labels = (torch.rand(tokens, generator=make) ** 3 * v).long()
    hidden = torch.randn(tokens, d, generator=make) + sharpness * weight.detach().float()[labels]
    hidden = hidden.bfloat16().requires_grad_()
    exact = linear_cross_entropy(hidden.double(), weight.double(), labels)
    _, want = torch.autograd.grad(exact, (hidden, weight), retain_graph=True)
    h, w = hidden.detach().double(), weight.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(linear_cross_entropy(h, w, labels), w)
    plain = distance(unfused_bf16(hidden.detach(), weight.detach(), labels)[1], want)
    errors = []
    for chunks in (1, 4, 16, 64):
        main_grad = torch.zeros(v, d)
        loss = fused_linear_cross_entropy(
            hidden, weight, labels, chunk_tokens=tokens // chunks, main_grad=main_grad
        )
        assert abs(loss.item() / exact.item() - 1) < 1e-4
        loss.backward()
        assert weight.grad is None
        errors.append(distance(main_grad, want))
    assert max(errors) <= 1.2 * plain, (errors, plain)
    assert max(errors) <= 1.1 * errors[0], errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**-30, 2.0**60])
def test_weights_of_any_size_in_sixteen_bits(dtype, scale):
    """Weights are rounded into neither factor: errors are those of weights of one."""
    hidden, weight, labels, _ = draw(dtype, (300,), seed=2)
    weights = scale * torch.rand(300, generator=torch.Generator().manual_seed(3))
    loss = fused_linear_cross_entropy(hidden, weight, labels, weights, reduction="sum", chunk_tokens=64)
    ours = torch.autograd.grad(loss, (hidden, weight), torch.tensor(1 / scale))
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    theirs = torch.autograd.grad(linear_cross_entropy(h, w, labels, weights / scale, reduction="sum"), (h, w))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype and distance(a, b) < 3 * torch.finfo(dtype).eps


def test_triton_does_the_same(monkeypatch):
    pytest.importorskip("triton")
    from burst_mcore.loss import chunked, rows_triton

    monkeypatch.setattr(chunked, "rows_for", lambda weight: rows_triton.logits_to_gradients)
    monkeypatch.setattr(rows_triton, "BLOCK", 32)
    weights = torch.rand(3, 13)
    weights[0, :4] = 0
    for options in (
        {},
        {"z_loss": 0.1, "label_smoothing": 0.2},
        {"softcap": 3.0, "temperature": 0.7, "label_smoothing": 0.1},
        {"reduction": "sum", "weights": weights},
    ):
        for ours, theirs in both(draw(torch.float32, bias=True), None, {"chunk_tokens": 10}, **options):
            assert distance(ours, theirs) < 5e-6, options
    hidden, weight, labels, _ = draw(torch.float32)
    _, found = fused_linear_cross_entropy(hidden, weight, labels, return_metrics=True)
    log_p, seen = torch.log_softmax(hidden @ weight.t(), -1), labels != -100
    torch.testing.assert_close(
        found.entropy, (-(log_p.exp() * log_p).sum(-1)).where(seen, 0.0), rtol=1e-5, atol=1e-5
    )


def test_triton_in_two_parts_of_the_vocabulary():
    """As ranks do it: statistics of each part, then gradients from those of the whole; one part is empty."""
    pytest.importorskip("triton")
    from burst_mcore.loss import rows, rows_triton
    from burst_mcore.loss.terms import Terms, combined
    from burst_mcore.loss.vocabulary import Vocabulary

    class Part(Vocabulary):
        def whole(self, statistics):
            return found

    torch.manual_seed(0)
    logits, labels, scale = 3 * torch.randn(6, 70), torch.randint(0, 70, (6,)), torch.rand(6)
    labels[2] = -1
    terms = Terms(z_loss=0.1, label_smoothing=0.1, softcap=5.0, temperature=0.9)
    want = torch.empty(6, 70)
    rows.logits_to_gradients(logits.clone(), labels, None, scale, terms, Vocabulary(70, 0, 70), want, True)
    parts = [(0, 40), (40, 70), (70, 70)]

    def mine(a, b):
        return labels.sub(a).where((labels >= a) & (labels < b), -1)

    statistics = [
        rows_triton.logits_to_gradients(
            logits[:, a:b].contiguous(),
            mine(a, b),
            None,
            None,
            terms,
            Vocabulary(70, a, b - a),
            want[:, a:b],
            True,
        )[0]
        for a, b in parts
    ]
    found = combined(torch.stack(statistics))
    z = 5 * torch.tanh(logits / 5) / 0.9
    p = torch.softmax(z, -1)
    torch.testing.assert_close(found[0], torch.logsumexp(z, -1))
    torch.testing.assert_close(found[4], -(p * p.log()).sum(-1))
    for a, b in parts:
        out = torch.empty(6, b - a, dtype=torch.bfloat16)  # as on CUDA: another dtype, another place
        part = Part(70, a, b - a, object())
        rows_triton.logits_to_gradients(
            logits[:, a:b].contiguous(), mine(a, b), None, scale, terms, part, out, True
        )
        torch.testing.assert_close(out.float(), want[:, a:b], rtol=1e-2, atol=1e-4)


def test_float16_where_products_are_scaled(monkeypatch):
    """As on CUDA, where dlogits are float16: they are scaled against underflow, and the results back."""
    from burst_mcore.loss import chunked

    scaled = Products(torch.float32, torch.float32, gain=1024.0)
    monkeypatch.setattr(chunked, "products_for", lambda *_: scaled)
    for ours, theirs in both(draw(torch.float32, bias=True), None, {"chunk_tokens": 10}, z_loss=0.1):
        assert distance(ours, theirs) < 5e-6
