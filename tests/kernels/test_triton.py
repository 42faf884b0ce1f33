"""Our Triton kernel: on small blocks in Triton's interpreter, and compiled for Hopper."""

import math
import os
import random
import sys
from dataclasses import replace
from itertools import product

import limits
import pytest
import torch
from cells import crossed
from dense import dense, error, pattern_of, problem, single_kernel
from masks import random_layout, random_mask
from test_simulation import simulate

from burst_mcore import Layout, Mask
from burst_mcore.attention.geometry.pattern import Pattern, Piece
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels import blocks
from burst_mcore.attention.kernels import triton as ours
from burst_mcore.attention.kernels.kernel import BackwardInputs, Problem, Scores
from burst_mcore.attention.kernels.reference import KERNEL as REFERENCE
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.numerics.rowwise import row_delta
from burst_mcore.attention.schedule.route import Route

triton = pytest.importorskip("triton")
tl, allowed = triton.language, ours._device_code()._allowed
KERNEL = KERNELS["triton"]
pytestmark = pytest.mark.skipif(not ours.interpreted(), reason="Triton compiles here: see tests/gpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(ours, "launch", lambda name, *given: ours.Launch(16, 32, 4, 1))


CAUSAL, FULL = Mask.causal(), Mask.full()
CELLS = [*product([(2, 1, 16, 16), (2, 1, 24, 8)], [CAUSAL, FULL]), ((2, 2, 192, 128), CAUSAL)]
"""Query and K/V heads, head dims of keys and of values; the last are MLA's. And masks."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "kind"), CELLS, ids=str)
def test_it_equals_float64_within_its_dtype(dtype, shape, kind):
    heads, kv_heads, dim, value_dim = shape
    p = problem(
        0, 40, batch=2, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value_dim, dtype=dtype
    )
    got = single_kernel(p, KERNEL, kind)
    for name, g, w in zip(got._fields, got, dense(p, kind), strict=True):
        assert error(g, w) < 8 * torch.finfo(dtype).eps, name


def _tile(seed):
    """Some tile of some plan for a kernel that takes pieces."""
    draw = random.Random(seed)
    while True:
        n, size = draw.randint(40, 100), draw.randint(1, 2)
        layout, mask = random_layout(draw, size, n), random_mask(draw, n)
        plan = plan_of(layout, mask, n, Placement(size))
        found = tiles_of(plan, draw.randrange(size), draw.randrange(size), KERNEL.abilities)
        if found:
            return found[0]


@pytest.mark.parametrize(
    ("seed", "deterministic"),
    crossed(range(12), (False, True), quick=lambda seed, deterministic: deterministic == bool(seed // 2 % 2)),
)
def test_any_pattern_and_option(seed, deterministic):
    pattern = _tile(seed).pattern
    rows, columns = pattern.shape
    softcap = 2.0 if seed % 3 == 0 else None
    p = problem(seed, max(rows, columns), heads=2, kv_heads=1 + seed % 2, head_dim=16, dtype=torch.float32)
    q, dout, k, v = p.q[:, :rows], p.dout[:, :rows], p.k[:, :columns], p.v[:, :columns]
    scores = Scores(0.3, softcap, deterministic)
    out, lse = KERNEL.forward(q, k, v, pattern, scores)
    want_out, want_lse = REFERENCE.forward(q, k, v, Pattern.from_table(pattern.table), scores)
    assert error(out, want_out) < 1e-6 and error(lse, want_lse) < 1e-6
    x = BackwardInputs(dout, q, k, v, None, want_lse, row_delta(dout, want_out))
    for g, w in zip(
        KERNEL.backward(x, pattern, scores),
        REFERENCE.backward(x, Pattern.from_table(pattern.table), scores),
        strict=True,
    ):
        assert error(g, w) < 2e-6 or w.norm() < 1e-6


@triton.jit
def _table_of(entries, table, SIZE: tl.constexpr):
    at, along = tl.arange(0, SIZE), tl.arange(0, SIZE)
    met = allowed(entries, tl.program_id(0), 0, 0, 0, 0, 0, 0, SIZE, SIZE, False)
    tl.store(table + (tl.program_id(0) * SIZE + at[:, None]) * SIZE + along[None, :], met.to(tl.int8))


@pytest.mark.parametrize("by_columns", [False, True])
def test_the_largest_block_meets_what_its_part_says_for_any_step(by_columns):
    """The comparison that tells multiples of a step from other numbers, against division."""
    size, draw, pieces = blocks.LARGEST_BLOCK, random.Random(by_columns), []
    for step in range(1, 256):
        m0, m1, n0, n1 = (
            draw.randrange(40) if end == 0 else size - draw.randrange(40) for end in (0, 1, 0, 1)
        )
        low, high = sorted(draw.choices(range(m0 - m1 + 1, n1 - n0), k=2))
        low, high = (low, high) if draw.random() < 0.5 else (-blocks.FAR, blocks.FAR)
        pieces.append(Piece(m0, m1, n0, n1, low, high, step, draw.randrange(step)))
    patterns = [Pattern((size, size), parts=(piece,)) for piece in pieces]
    lists = [blocks.blocks(pattern, size, size, by_columns=by_columns) for pattern in patterns]
    some = [i for i, pattern in enumerate(patterns) if pattern.table.any() and not pattern.table.all()]
    entries = torch.cat([lists[i].entries for i in some])
    assert len(entries) == len(some) > 150
    tables = torch.full((len(some), size, size), -1, dtype=torch.int8)
    _table_of[(len(some),)](entries, tables, SIZE=size)
    for table, i in zip(tables, some, strict=True):
        assert torch.equal((table.T if by_columns else table) == 1, patterns[i].table), pieces[i]


def test_it_merges_and_adds_in_place_into_views():
    p = problem(1, 48, kv_heads=2, dtype=torch.float32)
    pattern, scores = pattern_of(Mask.causal(), 48), Scores(0.25)
    out, lse = KERNEL.forward(p.q, p.k, p.v, pattern, scores)
    room = torch.full((1, 64, 4, 16), torch.nan)
    room_lse = torch.full((1, 4, 64), torch.nan, dtype=lse.dtype)
    at = slice(8, 56)
    ours.merge_forward(p.q, p.k, p.v, pattern, scores, room[:, at], room_lse[:, :, at], fresh=True)
    assert torch.equal(room[:, at], out) and torch.equal(room_lse[:, :, at], lse)
    assert room[:, :8].isnan().all() and room[:, 56:].isnan().all()
    ours.merge_forward(
        p.q, p.k, p.v, pattern, scores, room[:, at], room_lse[:, :, at], fresh=False
    )  # each key twice
    torch.testing.assert_close(room[:, at], out)
    torch.testing.assert_close(room_lse[:, :, at], lse + math.log(2))
    x = BackwardInputs(p.dout, p.q, p.k, p.v, None, lse, row_delta(p.dout, out))
    dq, dk, dv = KERNEL.backward(x, pattern, scores)
    sums = [torch.full((1, 64, h, 16), torch.nan) for h in (4, 2, 2)]
    for fresh in (True, False):
        ours.add_dq(x, pattern, scores, sums[0][:, at], fresh=fresh)
        ours.add_dkv(x, pattern, scores, sums[1][:, at], sums[2][:, at], fresh=fresh)
    for total, share in zip(sums, (dq, dk, dv), strict=True):
        torch.testing.assert_close(total[:, at], 2 * share)
        assert total[:, :8].isnan().all() and total[:, 56:].isnan().all()


@pytest.mark.parametrize("seed", crossed(range(8), quick=lambda seed: seed == 1))
def test_what_is_not_finite_stays_in_its_document(seed):
    draw = random.Random(seed)
    n = draw.randint(40, 90)
    ends = sorted({0, n, *(draw.randint(1, n) for _ in range(6))})
    mask = Mask.documents(ends) & (Mask.causal() if seed % 2 else Mask.full())
    (tile,) = tiles_of(plan_of(Layout("zigzag"), mask, n, Placement(1)), 0, 0, KERNEL.abilities)
    at = draw.randrange(len(ends) - 1)
    others, scores = torch.ones(n, dtype=torch.bool), Scores(0.3)
    others[ends[at] : ends[at + 1]] = False
    p = problem(seed, n, heads=2, kv_heads=1, head_dim=16, dtype=torch.float32)
    for name in ("q", "k", "v", "dout"):
        spoilt = p._replace(**{name: getattr(p, name).clone()})
        getattr(spoilt, name)[:, ~others] = draw.choice((torch.nan, torch.inf))
        found = []
        for x in (p, spoilt):
            out, lse = KERNEL.forward(x.q, x.k, x.v, tile.pattern, scores)
            row = BackwardInputs(x.dout, x.q, x.k, x.v, None, lse, row_delta(x.dout, out))
            found.append([out, *KERNEL.backward(row, tile.pattern, scores)])
        assert any(not x[:, ~others].isfinite().all() for x in found[1]), name
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got[:, others], want[:, others], msg=name)


ON_RINGS = [
    (Mask.causal(), "zigzag", Route(1, 3)),
    (Mask.causal() & Mask.documents([0, 7, 30, 48]), "contiguous", Route(2, 2)),
    (Mask.window(9, 3), "striped", Route(1, 2, direct=True)),
    (Mask.causal() & Mask.dilated(20, 3), "zigzag", Route(1, 2, heads=2)),
    (Mask.causal() & Mask.dilated(20, 3), "zigzag", Route(2, 1, overlap=False)),
    (Mask.causal() & Mask.documents([0, 7, 30, 48]), "striped", Route(1, 3)),
]


@pytest.mark.parametrize(
    ("at", "direction", "deterministic"),
    crossed(
        range(len(ON_RINGS)),
        ("query", "kv"),
        (False, True),
        quick=lambda at, direction, deterministic: not deterministic and (direction == "kv") == at % 2,
    ),
)
def test_on_a_ring_it_equals_dense_attention(at, direction, deterministic):
    mask, layout, route = ON_RINGS[at]
    p = problem(3, 48, heads=2 * route.heads, kv_heads=route.heads, dtype=torch.float32)
    options = {"deterministic": deterministic}
    got, *_ = simulate(p, mask, layout, route, direction, "triton", dtype=torch.float32, **options)
    for name, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, dense(p, mask), strict=True):
        assert error(g, w) < 3e-6, name


def _compiling(statement, seconds=limits.SECONDS):
    """Run a statement about `compiled` in a process where Triton compiles."""
    place = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    return limits.run([sys.executable, "-c", f"import compiled; {statement}"], seconds, env=place)


OF_HOPPER = "check()", "check_lengths()", "hold('forward', 'dq', 'dkv', 'all')"
OF_OTHERS = ("hold()",)


@pytest.mark.parametrize("checks", [OF_HOPPER, pytest.param(OF_OTHERS, marks=pytest.mark.slow)])
def test_what_is_compiled_for_gpus_that_are_not_here(checks):
    """It uses their matrix units; other lengths compile no row-wise kernel again; no inner loop spills.

    No kernel takes more registers, shared memory and instructions than the table says.
    """
    done = _compiling("; ".join(f"compiled.{check}" for check in checks), 10 * limits.SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_gpu_with_too_little_shared_memory_is_refused_before_any_launch(monkeypatch):
    asked = Problem("cuda", torch.bfloat16, 4, 2, 192, 128)
    monkeypatch.setattr(ours.packages, "capability", lambda: (8, 9))
    need = ours.needs(384, 2, (8, 9))
    for there, refused in ((None, False), (need, False), (need - 1, True), (49152, True)):
        monkeypatch.setattr(ours.packages, "shared_memory", lambda there=there: there)
        reason = KERNEL.supports(asked)
        if not refused:
            assert reason is None, reason
            continue
        for word in ("192", "128", str(need), str(there), "(8, 9)"):
            assert word in reason, reason
    monkeypatch.setattr(ours.packages, "shared_memory", lambda: 2**14)
    assert KERNEL.supports(replace(asked, device="cpu")) is None


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_no_two_warps_compute_the_same(capability, monkeypatch):
    monkeypatch.undo()
    for dims, itemsize, lists in product(range(32, 513, 16), (2, 4), (False, True)):
        names = {"forward"}
        for deterministic in (True, False):
            names |= {*ours.of_gradients(dims, itemsize, capability, deterministic=deterministic)}
        for name in names:
            sizes = ours.launch(name, dims, itemsize, capability, lists)
            own = sizes.rows if name in ("forward", "dq") else sizes.columns
            if itemsize == 4:  # no matrix units: each thread has a score of its own
                assert sizes.rows * sizes.columns >= 32 * sizes.warps, (name, dims, sizes)
            else:
                assert own >= 16 * sizes.warps, (name, dims, sizes)


def test_any_number_of_batches_and_heads_fits_a_grid(monkeypatch):
    """A grid's second dimension ends at 65,535; the first does not."""
    grids = []

    class Code:
        def __getattr__(self, name):
            return self

        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(ours, "_device_code", Code)
    q = torch.empty(2**15, 1, 4, 16).expand(2**15, 40, 4, 16)
    out, lse = KERNEL.forward(q, q, q, Pattern((40, 40), high=0), Scores(0.25))
    x = BackwardInputs(out, q, q, q, None, lse, lse)
    KERNEL.backward(x, Pattern((40, 40), high=0), Scores(0.25))
    KERNEL.backward(x, Pattern((40, 40), high=0), Scores(0.25, deterministic=True))
    assert grids == [(3 * 2**17,), (2 * 2**17,), (3 * 2**17,), (2 * 2**17,)]
