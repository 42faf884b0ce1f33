"""The control flow on CUDA, run on devices that are not there, by every route."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")  # its kernels' arguments are what the stand-ins are given

from fake_cuda import cases, ranks, verification
from fake_cuda.catalogue import CASES, LARGE, PASSES, ROUTES, backward_of_q, counted, grid_of, run
from plain_loss import linear_cross_entropy

from burst_mcore import Mask, packages
from burst_mcore.agreement.agreement import Ring
from burst_mcore.loss import fused_linear_cross_entropy
from burst_mcore.loss.products import products_for
from burst_mcore.loss.terms import Terms

PAGE = verification.PAGE.read_text()


@pytest.fixture(autouse=True, scope="module")
def _no_device():
    """The device instead of none, for this file alone: nobody else may find its kernels, rates or streams."""
    with pytest.MonkeyPatch.context() as patch:
        verification.forget()
        ranks.install(patch)
        yield
    verification.forget()


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name):
    assert not run(name)


@pytest.fixture
def apex(monkeypatch):
    """The extension, as its binding is called; the shapes that it was called with."""
    calls = []

    def wgrad_gemm_accum_fp32(total_input, grad_output, main_grad):
        assert total_input.is_contiguous() and grad_output.is_contiguous()  # it looks at no strides
        calls.append((tuple(grad_output.shape), tuple(total_input.shape)))
        torch.addmm(main_grad, grad_output.t(), total_input, out_dtype=torch.float32, out=main_grad)

    extension = SimpleNamespace(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32)
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", extension)
    packages.loaded.cache_clear()
    yield calls
    packages.loaded.cache_clear()


def test_the_loss_adds_the_chunks_of_its_weights_gradient_by_apex(apex):
    assert not cases.loss(1, waits=1)
    assert len(apex) == 2 * 2  # of three chunks in each of two steps; the first makes the sum
    assert {call[1][1] for call in apex} == {16} and {call[0][1] for call in apex} == {40}


def test_what_the_loss_has_added_by_apex_goes_into_main_grad_once(apex):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).bfloat16() for n in (48, 40))
    labels = torch.randint(0, 40, (48,), generator=generator)

    def rank(me):
        h, w, y = (ranks.cuda(x, me) for x in (hidden, weight, labels))
        main_grad = ranks.cuda(torch.ones(40, 16), me)
        loss = fused_linear_cross_entropy(h, w.requires_grad_(), y, chunk_tokens=16, main_grad=main_grad)
        (3 * loss).backward()
        return w.grad, main_grad.values

    grad, main_grad = ranks.run(1, rank)[0]
    exact = weight.double().requires_grad_()
    (3 * linear_cross_entropy(hidden.double(), exact, labels)).backward()
    assert grad is None and len(apex) == 2
    torch.testing.assert_close(main_grad - 1, exact.grad.float(), rtol=2e-2, atol=2e-3)


def test_rows_of_logits_with_gaps_and_factors_are_not_for_apex(apex):
    products = products_for(torch.bfloat16, torch.device("cuda"), Terms())

    def rank(me):
        dlogits = ranks.cuda(torch.ones(8, 24).bfloat16(), me)
        hidden, out = ranks.cuda(torch.ones(8, 16).bfloat16(), me), ranks.cuda(torch.zeros(21, 16), me)
        products.third(dlogits[:, :21], None, None, hidden, out)
        products.third(dlogits[:, :21].contiguous(), None, None, hidden, out, alpha=2.0)
        return out.values

    out = ranks.run(1, rank)[0]
    assert torch.equal(out, torch.full((21, 16), 24.0)) and apex == []


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(ROUTES)), ids=lambda index: str(ROUTES[index]))
def test_nothing_is_found_on_any_route_with_any_kernel_mask_and_layout(index):
    size, route = ROUTES[index]
    for more in grid_of(index):
        assert not cases.attention(size, **more, **route), more


def test_a_forward_like_an_earlier_one_does_not_wait_for_the_other_hosts(monkeypatch):
    came, post = [], Ring._post

    def noted(self, claim, *, ahead=False):
        came.append((claim.signature["pass"], ahead))
        return post(self, claim, ahead=ahead)

    monkeypatch.setattr(Ring, "_post", noted)
    assert not cases.attention(2)
    assert Counter(came) == {(name, ahead): 2 for name in ("forward", "backward") for ahead in (False, True)}


def test_documents_on_a_device_are_read_again_when_they_change():
    def rank(me):
        ends = ranks.cuda(torch.tensor([0, 3, 8]), me)
        masks = [Mask.documents(ends), Mask.documents(ends)]
        ends[1] = 5
        return masks[0] is masks[1], Mask.documents(ends)

    assert ranks.run(1, rank)[0] == (True, Mask.documents([0, 5, 8]))


@pytest.mark.parametrize(
    ("kernel", "made"),
    [
        ("aten-flash", "zeros"),
        ("flash4", "zeros"),
        ("flash4", "zeros_like"),
    ],
)
def test_lengths_and_seeds_are_made_once_not_for_every_tile(kernel, made):
    assert not cases.attention(2, kernel)
    assert cases.FORWARD[0][0][made] == cases.BACKWARD[0][0][made] == 0


def test_rows_that_are_sent_are_not_copied_where_they_are_neighbours():
    assert not cases.attention(3, "flash3", "window", ring="direct", backward="kv")
    launches, _ = cases.FORWARD[1]
    assert launches["messages"] == 2 and launches["copy_"] == launches["clone"] == 0


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_takes_the_launches_and_the_memory_that_the_docs_say(name):
    assert verification.of_pass(name, counted(name)) in PAGE


def test_the_docs_count_the_cases():
    assert verification.page(PAGE, {name: Counter() for name in CASES}) == PAGE


def _slow_but(fast, settings):
    return [pytest.param(x, marks=[pytest.mark.slow] * (x not in fast), id=str(x)) for x in settings]


@pytest.mark.parametrize("setting", _slow_but([x for x in LARGE if x[0] == 4 or x[:2] == (8, 2)], LARGE))
def test_backward_takes_the_memory_that_the_docs_say_and_the_planner_counts(setting):
    (size, intra, _, backward), (peak, planned) = setting, backward_of_q(*setting, head_dim=128)
    assert verification.of_large(setting, (peak, planned)) in PAGE
    assert 0.9 < planned / peak < 1.1
    more = size > 2 * intra > 4  # nodes of more than two ranks, and more than two of them
    assert round(peak, 1) <= (8 + more / 2 if backward == "kv" else 19.5 + 2 * more if intra else 15.5)
