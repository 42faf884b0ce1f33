"""Every kernel that this GPU has, on tiles of every kind, against float64 on the same GPU."""

import pytest
import torch
from dense import error

from burst_mcore import Mask
from burst_mcore.attention.geometry.pattern import Pattern
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.kernel import BackwardInputs, Problem, Scores
from burst_mcore.attention.kernels.reference import KERNEL as REFERENCE
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.kernels.wrappers import takes_delta
from burst_mcore.attention.numerics import rowwise as elementwise
from burst_mcore.attention.numerics.latent import _product
from burst_mcore.attention.numerics.rowwise import combine, output_stand_in, row_delta
from burst_mcore.layout import Layout

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = [name for name in KERNELS if name not in ("aten-cpu", "reference")]
SHAPES = {"MHA": (4, 4, 128, 128), "GQA": (8, 2, 64, 64), "MLA": (4, 4, 192, 128), "wide": (2, 1, 256, 256)}
CELLS = [
    (shape, dtype) for shape in SHAPES for dtype in DTYPES if dtype.itemsize == 2 or shape in ("MHA", "GQA")
]
"""Each is three kernels more for Triton to compile: wide heads are tested in 16 bits."""


def _tensors(shape, rows, columns, dtype):
    heads, kv_heads, dim, value_dim = shape

    def draw(n, h, d):
        return torch.randn(2, n, h, d, device="cuda", dtype=torch.float32).to(dtype)

    q, k, v = draw(rows, heads, dim), draw(columns, kv_heads, dim), draw(columns, kv_heads, value_dim)
    return q, k, v, draw(rows, heads, value_dim)


def _kernel(name, shape, dtype, adapted=lambda kernel: kernel, **asked):
    kernel = adapted(KERNELS[name])
    reason = kernel.supports(Problem("cuda", dtype, *shape, **asked))
    if reason is not None:
        pytest.skip(reason)
    return kernel


def _compare(kernel, tensors, pattern, scores):
    """All results at most twice as wrong as the reference of the same dtype would be, and half an ulp."""
    q, k, v, dout = tensors
    exact = q.double(), k.double(), v.double()
    want_out, want_lse = REFERENCE.forward(*exact, pattern, scores)
    out, lse = kernel.forward(q, k, v, pattern, scores)
    assert error(lse, want_lse) < 2e-5
    # As in a ring: statistics from outside, and no more of O than kernels need.
    lse, delta = want_lse.float(), row_delta(dout.double(), want_out).float()
    stand_in = None if kernel.takes_delta else output_stand_in(dout, delta)
    x = BackwardInputs(dout, q, k, v, stand_in, lse, delta)
    exact_x = BackwardInputs(dout.double(), *exact, None, want_lse, row_delta(dout.double(), want_out))
    want = (want_out, *REFERENCE.backward(exact_x, pattern, scores))
    bar = (REFERENCE.forward(q, k, v, pattern, scores)[0], *REFERENCE.backward(x, pattern, scores))
    got = (out, *kernel.backward(x, pattern, scores))
    for name, g, b, w in zip(("out", "dq", "dk", "dv"), got, bar, want, strict=True):
        assert error(g, w) <= 2 * max(error(b, w), torch.finfo(q.dtype).eps / 2), name


@pytest.mark.parametrize("name", ["cudnn", "aten-flash", "triton"])
def test_what_comes_with_torch_is_there(name):
    # The others may be skipped, with their reasons; these must not be.
    assert KERNELS[name].supports(Problem("cuda", torch.bfloat16, *SHAPES["MHA"])) is None


@pytest.mark.parametrize(("shape", "dtype"), CELLS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_causal_full_and_windows(name, shape, dtype):
    kernel = _kernel(name, SHAPES[shape], dtype)
    scores = Scores(SHAPES[shape][2] ** -0.5)
    tiles = [
        Pattern((512, 512), high=0),
        Pattern((384, 640)),
        Pattern((200, 331)),
        Pattern((41, 1)),
        Pattern((1, 1)),
    ]
    if kernel.abilities.windows:
        tiles += [
            Pattern((384, 512), -100, 200),
            Pattern((384, 512), None, 129),
            Pattern((384, 512), 5, None),
        ]
    for pattern in tiles:
        _compare(kernel, _tensors(SHAPES[shape], *pattern.shape, dtype), pattern, scores)


@pytest.mark.parametrize("name", NAMES)
def test_softcap(name):
    kernel = _kernel(name, SHAPES["GQA"], torch.bfloat16, softcap=True)
    pattern = Pattern((512, 512), high=0)
    _compare(kernel, _tensors(SHAPES["GQA"], 512, 512, torch.bfloat16), pattern, Scores(0.2, softcap=3.0))


MASKS = {
    "documents": Mask.causal() & Mask.documents([0, 100, 101, 700, 1024, 2048]),
    "dilated": Mask.causal() & Mask.dilated(300, 3),
    "blocks": Mask.blocks(torch.rand(16, 16, generator=torch.Generator().manual_seed(0)) > 0.75, 128),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("mask", MASKS)
def test_any_pattern_on_our_own(mask, layout, dtype):
    kernel = _kernel("triton", SHAPES["GQA"], dtype)
    plan = plan_of(Layout.of(layout), MASKS[mask], 2048, Placement(2))
    for tile in tiles_of(plan, 1, 0, kernel.abilities):
        _compare(kernel, _tensors(SHAPES["GQA"], *tile.pattern.shape, dtype), tile.pattern, Scores(0.2))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", NAMES)
def test_documents(name, layout):
    kernel = _kernel(name, SHAPES["GQA"], torch.bfloat16, documents=True)
    plan = plan_of(Layout.of(layout), MASKS["documents"], 2048, Placement(2))
    for q_at, k_at in ((0, 0), (1, 0), (1, 1)):
        for tile in tiles_of(plan, q_at, k_at, kernel.abilities):
            _compare(
                kernel,
                _tensors(SHAPES["GQA"], *tile.pattern.shape, torch.bfloat16),
                tile.pattern,
                Scores(0.2),
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_given_delta(name):
    kernel = _kernel(name, SHAPES["GQA"], torch.bfloat16, takes_delta)  # it may need room for more columns
    q, k, v, dout = _tensors(SHAPES["GQA"], 256, 256, torch.bfloat16)
    pattern, scores = Pattern((256, 256), high=0), Scores(0.1)
    lse = REFERENCE.forward(q.double(), k.double(), v.double(), pattern, scores)[1].float()
    dout[:, ::3] = 0
    delta = torch.randn_like(lse)  # not rowsum(dO * O) at all
    x = BackwardInputs(dout, q, k, v, None, lse, delta)
    want = REFERENCE.backward(
        BackwardInputs(*(None if t is None else t.double() for t in x)), pattern, scores
    )
    for g, w in zip(kernel.backward(x, pattern, scores), want, strict=True):
        assert error(g, w) < 2e-2


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_gradients_are_bitwise_equal(name):
    kernel = _kernel(name, SHAPES["GQA"], torch.bfloat16, deterministic=True)
    q, k, v, dout = _tensors(SHAPES["GQA"], 2048, 2048, torch.bfloat16)
    pattern, scores = Pattern((2048, 2048), high=0), Scores(0.1, deterministic=True)
    out, lse = kernel.forward(q, k, v, pattern, scores)
    x = BackwardInputs(dout, q, k, v, out, lse, row_delta(dout, out))
    runs = [kernel.backward(x, pattern, scores) for _ in range(5)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_deterministic_gradients_of_listed_blocks(mask, dtype):
    """By lists, deterministic calls take launches of their own: they are right, and bitwise equal."""
    kernel = _kernel("triton", SHAPES["GQA"], dtype, deterministic=True)
    scores = Scores(0.2, deterministic=True)
    for tile in tiles_of(
        plan_of(Layout.of("zigzag"), MASKS[mask], 2048, Placement(2)), 1, 0, kernel.abilities
    ):
        tensors = _tensors(SHAPES["GQA"], *tile.pattern.shape, dtype)
        _compare(kernel, tensors, tile.pattern, scores)
        q, k, v, dout = tensors
        out, lse = kernel.forward(q, k, v, tile.pattern, scores)
        x = BackwardInputs(dout, q, k, v, out, lse, row_delta(dout, out))
        runs = [kernel.backward(x, tile.pattern, scores) for _ in range(3)]
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_a_latent_are_in_float32(dtype):
    """Of rows as they lie, and turned, as for weights: as near float64 as sums in float32 are."""
    rows, numbers, heads = 300, 96, 160
    of_keys, latent, weight = (
        torch.randn(shape, device="cuda").to(dtype)
        for shape in ((rows, heads), (rows, numbers), (heads, numbers))
    )
    for a, b in ((of_keys, weight), (of_keys.T, latent)):
        got, want = _product(a, b), a.double() @ b.double()
        assert got.dtype == torch.float32
        assert error(got, want) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_passes_equal_the_unfused(dtype, monkeypatch):
    out, dout = (torch.randn(2, 300, 4, 96, device="cuda").to(dtype) for _ in range(2))
    lse, lse_t = (torch.randn(2, 4, 300, device="cuda") for _ in range(2))
    lse[..., :9], lse_t[..., 5:20] = -torch.inf, -torch.inf

    def run():
        delta = row_delta(dout, out)
        total, statistics = out.to(torch.float32, copy=True), lse.clone()  # these are written
        combine([(total, statistics), (dout, lse_t)], total, statistics)
        return delta, output_stand_in(dout, delta), total, statistics

    fused = run()
    monkeypatch.setattr(elementwise, "_fused", lambda *tensors: False)
    for a, b in zip(fused, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if a.dtype == torch.bfloat16 else 1e-3, atol=1e-4)
