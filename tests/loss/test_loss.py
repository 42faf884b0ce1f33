"""The fused LM head and loss on one process: equal to plain PyTorch, at three products a token."""

from types import SimpleNamespace

import pytest
import torch
from heads import D, V, both, distance, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loss import linear_cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from burst_bench.memory import LargestMade
from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.loss.chunked import CHUNK_BYTES, chunk_bytes


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([torch.float64, torch.float32]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    softcap=st.sampled_from([None, 3.0]),
    temperature=st.sampled_from([1.0, 0.7]),
    bias=st.booleans(),
    weighted=st.sampled_from([None, "mask", "any"]),
    chunk=st.sampled_from([1, 7, 39, "auto"]),
    ignored=st.sampled_from([-100, 7]),
    seed=st.integers(0, 99),
)
def test_equal_to_the_reference(
    dtype, reduction, smoothing, z_loss, softcap, temperature, bias, weighted, chunk, ignored, seed
):
    tensors = draw(dtype, bias=bias, seed=seed)
    tensors[2].masked_fill_(tensors[2] == -100, ignored)
    weights = None
    if weighted:
        weights = torch.rand(3, 13, generator=torch.Generator().manual_seed(seed))
        weights = (weights > 0.3).float() if weighted == "mask" else weights
    upstream = torch.randn(3, 13, dtype=dtype) if reduction == "none" else None
    for ours, theirs in both(
        tensors, upstream, {"chunk_tokens": chunk},
        reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, softcap=softcap,
        temperature=temperature, weights=weights, ignore_index=ignored,
    ):  # fmt: skip
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert distance(ours, theirs) < (1e-12 if dtype == torch.float64 else 5e-6)


def upstreams(tokens, weights):
    """(name, upstream gradients, how many tokens differ from a scalar times the weights)."""
    generator = torch.Generator().manual_seed(1)
    scaled = 3.7 * weights
    one_off = scaled.clone()
    one_off[7] += 1.0
    normalised = (weights / weights.sum()) * 1024.0 / 3.0 * weights.sum()
    arbitrary = torch.randn(tokens, generator=generator, dtype=weights.dtype)
    some = scaled.clone()
    some[::4] = 0
    slightly = scaled.clone()
    slightly[5] *= 1 + 1e-4
    most = 1 + torch.rand(tokens, generator=generator, dtype=weights.dtype)
    most[: tokens * 3 // 8] = 0
    few = 0 * scaled
    few[::4] = scaled[::4]
    return {
        "one slightly off": (slightly, 1),
        "scaled": (scaled, 0),
        "zero": (0 * scaled, 0),
        "one off": (one_off, 1),
        "normalised before": (normalised, 0),
        "a quarter without": (some, (tokens + 3) // 4),
        "a quarter": (few, (tokens + 3) // 4),
        "arbitrary": (arbitrary, tokens - 1),  # one is the scalar itself
        "arbitrary and zeros": (most, tokens - tokens * 3 // 8),  # fewer than differ from their median
    }


@pytest.mark.parametrize("name", upstreams(8, torch.ones(8)))
@pytest.mark.parametrize("masked", [False, True])
def test_any_upstream_gradient_and_the_products_that_it_costs(name, masked):
    tokens = 64
    hidden, weight, labels, _ = draw(torch.float32, (tokens,))
    labels = labels.clamp(min=0)
    weights = (
        torch.rand(tokens, generator=torch.Generator().manual_seed(5)) + 0.5 if masked else torch.ones(tokens)
    )
    upstream, repaired = upstreams(tokens, weights)[name]
    given = weights if masked else None
    with FlopCounterMode(display=False) as counter:
        loss = fused_linear_cross_entropy(hidden, weight, labels, given, reduction="none", chunk_tokens=20)
        loss.backward(upstream)
    product = 2 * tokens * D * V
    assert counter.get_total_flops() == pytest.approx(product * (3 + 2 * repaired / tokens))
    want = linear_cross_entropy(hidden, weight, labels, reduction="none")
    for ours, theirs in zip(
        (hidden.grad, weight.grad), torch.autograd.grad(want, (hidden, weight), upstream), strict=True
    ):
        assert distance(ours, theirs) < 5e-6


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.6, 0.9])
def test_ignored_labels_cost_nothing(share, weighted):
    hidden, weight, labels, _ = draw(torch.float32, (200,))
    make = torch.Generator().manual_seed(4)
    labels = torch.randint(0, V, (200,), generator=make)
    labels[torch.rand(200, generator=make) < share] = -100
    weights = torch.rand(200, generator=make) if weighted else None
    with FlopCounterMode(display=False) as counter:
        losses = fused_linear_cross_entropy(hidden, weight, labels, weights, reduction="none")
        (losses.sum() if weights is None else (losses * weights).sum()).backward()
    valid = (labels != -100).sum().item()
    assert counter.get_total_flops() == 3 * 2 * valid * D * V


def test_hidden_states_of_ignored_labels_are_not_read():
    hidden, weight, labels, bias = draw(torch.float32, (40,), bias=True)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    loss, metrics = fused_linear_cross_entropy(
        hidden, weight, labels, bias=bias, z_loss=0.1, chunk_tokens=7, return_metrics=True
    )
    loss.backward()
    clean = hidden.detach().nan_to_num().requires_grad_()
    w, b = weight.detach().requires_grad_(), bias.detach().requires_grad_()
    want = linear_cross_entropy(clean, w, labels, bias=b, z_loss=0.1)
    want.backward()
    for ours, theirs in ((loss, want), (hidden.grad, clean.grad), (weight.grad, w.grad), (bias.grad, b.grad)):
        assert distance(ours, theirs) < 5e-6
    assert all(x.isfinite().all() for x in metrics)


@pytest.mark.parametrize(
    ("free", "unused", "alone", "share"),
    [
        (70, 0, True, 10),  # an eighth of the GPU, at most
        (30, 2, True, 8),
        (27, 4, True, 4),
        (0, 3, True, 0.5),
        (70, 0, False, 5),  # other ranks may have less
        (3, 0, False, 5),
    ],
)
def test_chunks_of_a_gpu_follow_its_free_memory_where_no_rank_must_agree(
    free, unused, alone, share, monkeypatch
):
    gibibyte = 2**30
    for name, value in {
        "get_device_properties": SimpleNamespace(total_memory=80 * gibibyte),
        "mem_get_info": (free * gibibyte, 80 * gibibyte),
        "memory_reserved": (unused + 7) * gibibyte,
        "memory_allocated": 7 * gibibyte,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert chunk_bytes(torch.device("cuda"), alone=alone) == share * gibibyte
    assert chunk_bytes(torch.device("cpu"), alone=alone) == CHUNK_BYTES


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_of_ignored_labels_do_not_matter(reduction):
    hidden, weight, labels, _ = draw(torch.float32, (40,))
    weights = 1e-8 * torch.rand(40)
    found = []
    for ignored in (0.0, 1e38):
        given = weights.where(labels != -100, ignored)
        loss = fused_linear_cross_entropy(hidden, weight, labels, given, reduction=reduction)
        found.append([loss, *torch.autograd.grad(loss, (hidden, weight))])
    assert found[0][0] > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_upstream_gradients_that_are_no_numbers_are_not_lost():
    hidden, weight, labels, _ = draw(torch.float32, (10,))
    upstream = torch.ones(10)
    upstream[3], upstream[5] = torch.nan, torch.inf  # 5 is ignored: its gradient is nothing
    fused_linear_cross_entropy(hidden, weight, labels, reduction="none").backward(upstream)
    assert weight.grad.isnan().any() and hidden.grad[3].isnan().all()
    assert hidden.grad[[0, 1, 2, 4, 5, 6]].isfinite().all()


@pytest.mark.parametrize("nothing", ["labels", "weights", "tokens"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_learn_from_gives_zeros(nothing, reduction):
    hidden, weight, labels, bias = draw(torch.float32, (0,) if nothing == "tokens" else (10,), bias=True)
    labels = torch.full_like(labels, -100) if nothing == "labels" else labels
    weights = torch.zeros(labels.shape) if nothing == "weights" else None
    loss = fused_linear_cross_entropy(hidden, weight, labels, weights, bias, reduction=reduction)
    loss.backward()
    for x in (loss, hidden.grad, weight.grad, bias.grad):
        assert (x == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_tensor_of_all_logits(dtype):
    hidden, weight, labels, _ = draw(dtype, (512,), v=1000)
    with LargestMade([hidden, weight]) as seen:
        loss = fused_linear_cross_entropy(
            hidden, weight, labels, reduction="none", chunk_tokens=16, z_loss=0.1, softcap=9.0
        )
        loss.backward(torch.randn(512))
    assert seen.elements <= 1000 * max(16, D)


def test_backward_again_and_no_second_order():
    hidden, weight, labels, bias = draw(torch.float32, (40,), bias=True)
    loss = fused_linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none", chunk_tokens=16)
    upstream = torch.ones(40)
    upstream[3] = 2
    first = torch.autograd.grad(loss, (hidden, weight, bias), upstream, retain_graph=True)
    kept = [x.clone() for x in first]
    again = torch.autograd.grad(loss, (hidden, weight, bias), 2 * upstream)
    for a, b, c in zip(first, kept, again, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(2 * a, c, rtol=1e-6, atol=1e-6)
    total = fused_linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(RuntimeError, match="no second derivative: call backward without create_graph"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_only_what_is_asked_for_is_done():
    def products(hidden, weight, run):
        with FlopCounterMode(display=False) as counter:
            run(fused_linear_cross_entropy(hidden, weight, labels))
        return counter.get_total_flops() / (2 * (labels != -100).sum().item() * D * V)

    hidden, weight, labels, _ = draw(torch.float32, (40,))
    assert products(hidden, weight, lambda loss: loss.backward()) == 3
    assert products(hidden, weight.detach(), lambda loss: loss.backward()) == 2
    assert products(hidden.detach(), weight, lambda loss: loss.backward()) == 2
    with torch.no_grad():
        assert products(hidden, weight, lambda loss: None) == 1


def test_gradients_add_up_in_main_grad():
    hidden, weight, labels, _ = draw(torch.bfloat16, (40,))
    main_grad = torch.ones(V, D)
    for _ in range(2):
        (3 * fused_linear_cross_entropy(hidden, weight, labels, main_grad=main_grad)).backward()
    assert weight.grad is None
    fused_linear_cross_entropy(hidden, weight, labels).backward()
    torch.testing.assert_close(main_grad - 1, 6 * weight.grad.float(), rtol=1e-2, atol=1e-2)


def test_tied_weights_and_changed_inputs():
    hidden, weight, labels, _ = draw(torch.float32, (40,))
    ids = labels.clamp(min=0)
    tied = fused_linear_cross_entropy(weight[ids] + hidden, weight, labels)
    want = linear_cross_entropy(weight[ids] + hidden, weight, labels)
    (ours,), (theirs,) = (torch.autograd.grad(x, weight) for x in (tied, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    loss = fused_linear_cross_entropy(hidden, weight, labels, reduction="none")
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()


def test_autocast_and_compile():
    hidden, weight, labels, _ = draw(torch.float32, (40,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = fused_linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert weight.grad.dtype == torch.float32 and loss.dtype == torch.float32
    a, b = (x.detach().bfloat16() for x in (hidden, weight))
    assert torch.equal(loss, fused_linear_cross_entropy(a, b, labels))

    @torch.compile(backend="eager")
    def body(h):
        return fused_linear_cross_entropy(h * 2, weight, labels) + 1

    torch.testing.assert_close(body(hidden), linear_cross_entropy(2 * hidden, weight, labels) + 1)


BAD = {
    "outside": (lambda a: a["labels"].__setitem__((0, 1), V), r"labels must be in \[0, 53\) or -100.*got 53"),
    "negative": (lambda a: a["labels"].__setitem__((0, 1), -7), r"labels must be in \[0, 53\).*got -7"),
    "few labels": (lambda a: a.update(labels=a["labels"][:2]), r"labels must have the shape \(3, 13\)"),
    "float labels": (lambda a: a.update(labels=a["labels"].float()), "labels must be int64 or int32"),
    "no fit": (lambda a: a.update(weight=a["weight"][:, :5]), r"do not fit: \(3, 13, 16\) and \(53, 5\)"),
    "dtypes": (
        lambda a: a.update(weight=a["weight"].bfloat16()),
        "weight is torch.bfloat16, hidden torch.float32",
    ),
    "integers": (lambda a: a.update(hidden=a["hidden"].long()), "hidden must be one of"),
    "negative weights": (lambda a: a.update(weights=-torch.ones(3, 13)), "finite and at least 0"),
    "weights": (lambda a: a.update(weights=torch.full((3, 13), torch.nan)), "finite and at least 0"),
    "weights' shape": (lambda a: a.update(weights=torch.ones(13)), "shape of labels"),
    "weights' gradient": (lambda a: a.update(weights=torch.ones(3, 13, requires_grad=True)), "detach them"),
    "bias": (lambda a: a.update(bias=torch.ones(5)), r"bias must have the shape \(53,\)"),
    "main_grad": (lambda a: a.update(main_grad=torch.ones(5, 16)), "main_grad must have the shape"),
    "reduction": (lambda a: a.update(reduction="average"), "reduction must be one of"),
    "chunk": (lambda a: a.update(chunk_tokens=0), "chunk_tokens must be"),
    "z_loss": (lambda a: a.update(z_loss=-1.0), "z_loss must be a finite number at least 0"),
    "smoothing": (lambda a: a.update(label_smoothing=1.5), "at least 0 and at most 1"),
    "softcap": (lambda a: a.update(softcap=0.0), "softcap must be a finite number above 0"),
    "temperature": (lambda a: a.update(temperature=0), "temperature must be a finite number above 0"),
    "a tensor": (
        lambda a: a.update(temperature=torch.ones(64, 64)),
        r"temperature must be a finite number above 0, got a tensor \[64, 64\]$",
    ),
    "group": (lambda a: a.update(sequence_parallel=True), "sequence_parallel needs tp_group"),
    "no group": (lambda a: a.update(cp_group="cp"), "cp_group must be a process group that .* got 'cp'"),
    "grad dtype": (
        lambda a: a.update(grad_weight_dtype=torch.float64),
        "grad_weight_dtype must be torch.float32",
    ),
    "least label": (lambda a: a["labels"].__setitem__((0, 1), -(2**63)), r"labels must be in \[0, 53\)"),
    "huge": (
        lambda a: a.update(z_loss=10**400),
        r"z_loss must be a finite number at least 0, got 10*\.\.\.$",
    ),
    "no tensor": (lambda a: a.update(labels=[1, 2]), "labels must be a tensor, got list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    hidden, weight, labels, _ = draw(torch.float32)
    arguments = {"hidden": hidden, "weight": weight, "labels": labels}
    change, words = BAD[name]
    change(arguments)
    with pytest.raises(ValueError, match=words):
        fused_linear_cross_entropy(**arguments)
