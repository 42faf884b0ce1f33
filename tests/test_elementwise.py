"""D, the stand-in for O and the merge: in blocks of rows, and as Triton kernels in its interpreter."""

import pytest
import torch

from burst_mcore.attention.numerics import rowwise as elementwise
from burst_mcore.attention.numerics.rowwise import merge_, output_stand_in, row_delta


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


def _merged(out, lse, out_t, lse_t):
    """By definition, in float64."""
    a, b = (x.double().transpose(1, 2).unsqueeze(-1) for x in (lse, lse_t))
    most = torch.maximum(a, b).masked_fill(torch.maximum(a, b) == -torch.inf, 0)
    weights = torch.exp(a - most), torch.exp(b - most)
    total = sum(weights)
    mixed = (out.double() * weights[0] + out_t.double() * weights[1]) / total
    return mixed.where(total > 0, out.double()), torch.logaddexp(lse.double(), lse_t.double())


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

    running, statistics = out.float().clone(), lse.clone()
    want_out, want_lse = _merged(running, lse, dout, lse_t)
    merge_(running, statistics, dout, lse_t)
    torch.testing.assert_close(statistics.double(), want_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(running.double(), want_out, rtol=1e-5, atol=1e-5)


def test_fresh_memory_is_written_whole():
    out, dout, *_ = _tensors(torch.float32)
    delta = row_delta(dout[:, :0], out[:, :0])
    assert delta.shape == (2, 3, 0)
    assert output_stand_in(dout[:, :0], delta).shape == (2, 0, 3, 24)
