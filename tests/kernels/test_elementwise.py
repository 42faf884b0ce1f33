"""D, the stand-in for O and the merge: in blocks of rows, and as Triton kernels in its interpreter."""

import pytest
import torch

from burst_mcore.attention.numerics import rowwise as elementwise
from burst_mcore.attention.numerics.rowwise import add_up, combine, output_stand_in, row_delta


def _tensors(dtype, rows=37, dim=24):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    out, dout = draw(2, rows, 3, dim).to(dtype), draw(2, 3, rows, dim).to(dtype).transpose(1, 2)
    dout[:, 5] = 0
    lse, lse_t = draw(2, 3, rows) * 20, draw(2, 3, rows) * 20
    lse[..., :4] = -torch.inf
    lse_t[..., 2:7] = -torch.inf
    return out, dout, lse, lse_t


def _merged(parts):
    """By definition, in float64."""
    lses = torch.stack([lse.double().transpose(1, 2).unsqueeze(-1) for _, lse in parts])
    most = lses.amax(0)
    weights = torch.exp(lses - most.masked_fill(most == -torch.inf, 0))
    total = weights.sum(0)
    mixed = sum(weight * out.double() for weight, (out, _) in zip(weights, parts, strict=True)) / total
    lse = torch.stack([lse.double() for _, lse in parts]).logsumexp(0)
    empty = parts[0][0].double() if len(parts) == 1 else torch.zeros_like(mixed)
    return mixed.where(total > 0, empty), lse


@pytest.mark.parametrize("code", ["blocks", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_pass_each(code, dtype, monkeypatch):
    monkeypatch.setattr(elementwise, "BLOCK_BYTES", 2048)  # several blocks, the last one short
    if code == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(elementwise, "_fused", lambda *tensors: True)
    out, dout, lse, lse_t = _tensors(dtype)
    delta = row_delta(dout, out)
    want = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    assert delta.dtype == torch.float32 and delta.is_contiguous()
    torch.testing.assert_close(delta.double(), want, rtol=1e-5, atol=1e-5)
    stand_in = output_stand_in(dout, delta)
    assert stand_in.dtype == dtype and (stand_in[:, 5] == 0).all()
    again = (dout.double() * stand_in.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(again, want, rtol=0, atol=2e-6 * want.abs().max().item())

    part = torch.full_like(out, 3.0), torch.full_like(lse, 1.0)
    for parts in ([(out.float(), lse), (dout, lse_t)], [(out, lse), (dout, lse_t), part], [part]):
        want_out, want_lse = _merged(parts)
        running, statistics = parts[0][0].clone(), parts[0][1].clone()  # also where results replace a part
        combine([(running, statistics), *parts[1:]], running, statistics)
        torch.testing.assert_close(statistics.double(), want_lse, rtol=1e-6, atol=1e-6)
        unit = 1e-5 if running.dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(running.double(), want_out, rtol=unit, atol=unit)
        apart, apart_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
        combine(parts, apart, apart_lse)
        torch.testing.assert_close(apart_lse, statistics)
        torch.testing.assert_close(apart.double(), want_out, rtol=torch.finfo(dtype).eps, atol=1e-5)
        summed = sum(x.double() for x, _ in parts)
        total = parts[0][0].clone()
        add_up([total, *(x for x, _ in parts[1:])], total)
        torch.testing.assert_close(total.double(), summed, rtol=unit, atol=unit)


@pytest.mark.parametrize("code", ["blocks", "triton"])
def test_parts_that_are_not_finite_spoil_their_rows_alone(code, monkeypatch):
    if code == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(elementwise, "_fused", lambda *tensors: True)
    out, other, lse, other_lse = _tensors(torch.float32)
    out[:, 9], lse[..., 9] = torch.nan, torch.nan
    results = torch.empty_like(out), torch.empty_like(lse)
    combine([(out, lse), (other, other_lse)], *results)
    assert results[0][:, 9].isnan().all() and results[1][..., 9].isnan().all()
    assert results[0].isnan().sum() == out[:, 9].numel()


@pytest.mark.parametrize("code", ["blocks", "triton"])
def test_a_score_that_all_parts_share_costs_nothing(code, monkeypatch):
    """In float32 scores of 1000 are rounded by 3e-5, and so would be the weights."""
    if code == "triton":
        pytest.importorskip("triton")
        monkeypatch.setattr(elementwise, "_fused", lambda *tensors: True)
    out, other, lse, other_lse = _tensors(torch.float32)
    parts = [(out, lse.double() / 20 + 1e3), (other, other_lse.double() / 20 + 1e3)]
    want, want_lse = _merged(parts)
    for of_lse, exact in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        merged, merged_lse = torch.empty_like(out), torch.empty_like(lse, dtype=of_lse)
        combine(parts, merged, merged_lse)
        seen = want_lse.isfinite()
        assert torch.equal(merged_lse.isfinite(), seen)
        assert (merged_lse - want_lse)[seen].abs().max() < exact
        assert (merged - want)[seen.transpose(1, 2)].abs().max() < 1e-6
