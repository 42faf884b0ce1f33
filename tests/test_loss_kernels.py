"""Losses of libraries through the table: as exact as plain PyTorch where they serve, a reason where not."""

import sys
from importlib import metadata
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from heads import D, V, both, distance, draw
from ranks import processes

from burst_mcore import packages
from burst_mcore.loss import fused_linear_cross_entropy, libraries, loss_kernel
from burst_mcore.loss.libraries import Problem
from burst_mcore.loss.reference import linear_cross_entropy
from burst_mcore.loss.table import AUTO, KERNELS, choose
from burst_mcore.loss.terms import Terms

needs_torchs = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch has it from 2.13 on"
)


def problem(**changes):
    given = {
        "device": "cuda", "dtype": torch.float32, "grad_weight_dtype": torch.float32, "terms": Terms(),
        "reduction": "mean", "bias": False, "weights": False, "metrics": False, "shared": False,
    }  # fmt: skip
    return Problem(**{**given, **changes})


@needs_torchs
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk", [7, "auto"])
def test_torchs_own_equals_the_reference(dtype, bias, reduction, chunk):
    with loss_kernel("torch"):
        found = both(draw(dtype, bias=bias), torch.tensor(0.3), {"chunk_tokens": chunk}, reduction=reduction)
    for ours, theirs in found:
        assert ours.dtype == theirs.dtype == dtype
        assert distance(ours, theirs) < 20 * torch.finfo(dtype).eps


@needs_torchs
def test_it_is_torchs_own_that_runs(monkeypatch):
    calls = []
    monkeypatch.setattr(
        torch.nn.functional,
        "linear_cross_entropy",
        lambda h, w, *_, **__: calls.append(h.shape) or (h @ w.t()).sum(),
    )
    hidden, weight, labels, _ = draw()
    fused_linear_cross_entropy(hidden, weight, labels)
    assert calls == []
    with loss_kernel("torch"):
        fused_linear_cross_entropy(hidden, weight, labels)
    assert calls == [(31, D)]  # of 39 labels every fifth is ignored
    fused_linear_cross_entropy(hidden, weight, labels)
    assert len(calls) == 1


@needs_torchs
def test_what_our_own_backward_does_is_done_for_it_too():
    hidden, weight, labels, _ = draw(torch.float32)
    main_grad = torch.ones_like(weight)
    with loss_kernel("torch"):
        loss = fused_linear_cross_entropy(hidden, weight, labels, main_grad=main_grad)
        frozen = fused_linear_cross_entropy(hidden.detach(), weight, labels)
        frozen_head = fused_linear_cross_entropy(hidden, weight.detach(), labels)
        with torch.no_grad():
            assert not fused_linear_cross_entropy(hidden, weight, labels).requires_grad
        nothing = fused_linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
        empty = fused_linear_cross_entropy(hidden[:0], weight, labels[:0])
    want = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    for _ in range(2):
        loss.backward(torch.tensor(2.0), retain_graph=True)
    assert weight.grad is None
    assert distance(hidden.grad, 4 * want[0]) < 1e-6
    assert distance(main_grad - 1, 4 * want[1]) < 1e-6
    assert distance(*torch.autograd.grad(frozen, weight), want[1]) < 1e-6
    assert distance(*torch.autograd.grad(frozen_head, hidden), want[0]) < 1e-6
    for zero in (nothing, empty):
        (gradient,) = torch.autograd.grad(zero, weight)
        assert zero.item() == 0 and not gradient.any()


@needs_torchs
@pytest.mark.parametrize("valid", [1, 200, 600])
def test_its_chunks_are_of_valid_tokens(valid, monkeypatch):
    chunks = []
    options = torch.nn.LinearCrossEntropyOptions
    monkeypatch.setattr(
        torch.nn,
        "LinearCrossEntropyOptions",
        lambda **given: chunks.append(given["batch_chunk_size"]) or options(**given),
    )
    hidden, weight, labels, bias = draw(torch.float32, (600,), bias=True)
    labels = labels.clamp(min=0)
    labels[: 600 - valid] = -100
    with loss_kernel("torch"):
        loss = fused_linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert chunks == [{1: 1, 200: 128, 600: 384}[valid]]
    want = linear_cross_entropy(hidden, weight, labels, bias=bias)
    leaves = (hidden, weight, bias)
    for ours, theirs in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(want, leaves), strict=True
    ):
        assert distance(ours, theirs) < 1e-5


@needs_torchs
def test_bfloat16_only_where_a_rounded_gradient_is_asked_for():
    hidden, weight, labels, _ = draw(torch.bfloat16, (300,))
    with loss_kernel("torch"):
        with pytest.raises(ValueError, match="rounds the weight's gradient to torch.bfloat16: pass grad_w"):
            fused_linear_cross_entropy(hidden, weight, labels)
        loss = fused_linear_cross_entropy(hidden, weight, labels, grad_weight_dtype=torch.bfloat16)
    ours = torch.autograd.grad(loss, (hidden, weight))
    exact = linear_cross_entropy(hidden.double(), weight.double(), labels)
    for a, b in zip(ours, torch.autograd.grad(exact, (hidden, weight)), strict=True):
        assert a.dtype == torch.bfloat16 and distance(a, b) < 1e-2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "none"}, "no reduction='none' in one pass"),
        ({"weights": torch.ones(3, 13)}, "no weights"),
        ({"return_metrics": True}, "no return_metrics"),
        ({"temperature": 0.5, "softcap": 3.0}, "no temperature, softcap"),
        ({"z_loss": 0.1, "label_smoothing": 0.1}, "no z_loss, label_smoothing"),
    ],
)
def test_what_torchs_own_cannot_do_is_an_error_with_its_reason(options, words):
    hidden, weight, labels, _ = draw(torch.float32)
    with loss_kernel("torch"), pytest.raises(ValueError, match=f"loss kernel 'torch' cannot serve.*{words}"):
        fused_linear_cross_entropy(hidden, weight, labels, **options)


def test_names_and_what_is_chosen_without_one():
    words = "unknown loss kernel 'fast'; legal: 'auto', 'burst', 'torch', 'liger', 'cce'"
    with pytest.raises(ValueError, match=words), loss_kernel("fast"):
        pass
    assert AUTO == ("burst",)
    assert choose("auto", problem()) is choose("burst", problem()) is KERNELS["burst"]
    for name in ("liger", "cce"):
        with pytest.raises(ValueError, match=f"'{name}' cannot serve.*it is for CUDA, not cpu"):
            choose(name, problem(device="cpu"))
        with pytest.raises(ValueError, match="no float64"):
            choose(name, problem(dtype=torch.float64, grad_weight_dtype=torch.float64))


def liger(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0,
    label_smoothing=0.0, reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None,
    use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1,
):  # fmt: skip
    """liger_fused_linear_cross_entropy of 0.8.5, by our reference."""
    assert accum_dtype == torch.float32
    return linear_cross_entropy(
        input, weight, target, None, bias, ignore_index, reduction, lse_square_scale, label_smoothing, softcap
    )


def cce(
    e, c, targets, ignore_index=-100, softcap=None, reduction="mean", shift=False, filter_eps="high",
    impl="cce",
):  # fmt: skip
    """linear_cross_entropy of cut-cross-entropy 25.1.1, by our reference."""
    assert filter_eps is None
    return linear_cross_entropy(
        e, c, targets, ignore_index=ignore_index, reduction=reduction, softcap=softcap
    )


STAND_INS = {
    "liger": (
        "liger_kernel.transformers.functional", "liger-kernel", "0.8.5", "0.9.0",
        {"liger_fused_linear_cross_entropy": liger},
        {"z_loss": 0.1, "label_smoothing": 0.2, "softcap": 3.0}, True,
    ),
    "cce": (
        "cut_cross_entropy", "cut-cross-entropy", "25.1.1", "26.0.0", {"linear_cross_entropy": cce},
        {"softcap": 3.0}, False,
    ),
}  # fmt: skip
"""Module, package, a version that serves, one that does not, functions, options, whether there is a bias."""


@pytest.fixture
def installed(monkeypatch):
    def install(name, version):
        module, package, *_, functions, _, _ = STAND_INS[name]
        stand_in = ModuleType(module)
        vars(stand_in).update(functions)
        parts = module.split(".")
        for i in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        monkeypatch.setitem(sys.modules, module, stand_in)
        found = metadata.version
        monkeypatch.setattr(metadata, "version", lambda p: version if p == package else found(p))
        packages.loaded.cache_clear()
        choose.cache_clear()

    yield install
    packages.loaded.cache_clear()
    choose.cache_clear()


@pytest.mark.parametrize("name", STAND_INS)
def test_packages_are_called_as_their_versions_want(name, installed, monkeypatch):
    *_, version, wrong, _, options, bias = STAND_INS[name]
    installed(name, wrong)
    with pytest.raises(ValueError, match=f"'{name}' cannot serve.*{wrong} is not from"):
        choose(name, problem())
    installed(name, version)
    assert choose(name, problem()) is KERNELS[name]
    with pytest.raises(
        ValueError, match="it has no " + ("temperature" if bias else "z_loss, label_smoothing, b")
    ):
        choose(
            name,
            problem(bias=True, terms=Terms(temperature=2.0) if bias else Terms(z_loss=1, label_smoothing=1)),
        )
    monkeypatch.setattr(libraries, "DEVICE", "cpu")  # where the stand-ins run
    with loss_kernel(name):
        for some in ({}, options):
            for ours, theirs in both(draw(torch.float32, bias=bias), None, **some):
                assert distance(ours, theirs) < 1e-6


@pytest.mark.parametrize("name", STAND_INS)
def test_a_package_that_is_not_here_is_a_reason(name):
    module, package, *_ = STAND_INS[name]
    if not isinstance(packages.loaded(module, package), str):
        pytest.skip(f"{package} is here")
    with pytest.raises(ValueError, match=f"{package} is not usable here"):
        choose(name, problem())


def test_liger_in_tritons_interpreter(monkeypatch):
    """Its own code, where it is installed. The interpreter does not take the number that softcap is."""
    pytest.importorskip("liger_kernel")
    monkeypatch.setattr(libraries, "DEVICE", "cpu")
    with loss_kernel("liger"):
        for some in ({}, {"z_loss": 0.1, "label_smoothing": 0.2}):
            for ours, theirs in both(draw(torch.float32, bias=True), torch.tensor(0.3), **some):
                assert distance(ours, theirs) < 1e-5


def _on_ranks(rank, size):
    """What each rank is told where one of them asks for another kernel, and where it cannot serve."""
    hidden, weight, labels, _ = draw(torch.float32, v=2 * V)
    said = []
    with loss_kernel("torch" if rank else "burst"), pytest.raises(ValueError) as caught:
        fused_linear_cross_entropy(hidden, weight, labels, cp_group=dist.group.WORLD)
    said.append(str(caught.value))
    with loss_kernel("torch"), pytest.raises(ValueError) as caught:
        fused_linear_cross_entropy(hidden, weight[rank * V :][:V], labels, tp_group=dist.group.WORLD)
    said.append(str(caught.value))
    mine = slice(0, 1) if rank else slice(1, 3)
    with loss_kernel("torch"):
        loss = fused_linear_cross_entropy(hidden[mine], weight, labels[mine], cp_group=dist.group.WORLD)
    loss.backward()
    return said, weight.grad


@needs_torchs
def test_on_ranks():
    found = processes(2, _on_ranks)
    for (different, shared), _ in found:
        assert "ranks make different calls" in different and "kernel = burst" in different
        assert "it has no tp_group" in shared
    hidden, weight, labels, _ = draw(torch.float32, v=2 * V)
    (want,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), weight)
    assert distance(sum(gradient for _, gradient in found), want) < 1e-6
