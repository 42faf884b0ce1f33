"""Masks as words and as pictures: what `burst-mcore draw --mask ... --layout ...` shows."""

import json
import re
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import layouts, random_mask, randoms

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_mcore import BurstConfig, Layout, Mask
from burst_mcore.attention.candidates import Ranks
from burst_mcore.attention.geometry.plan import plan_for, plan_of
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.schedule.actions import Compute
from burst_mcore.attention.schedule.route import Route, program
from burst_mcore.layout.balance import imbalance
from burst_mcore.rates import Rates
from burst_plan.cli import app
from burst_plan.explain import mask_picture, predict
from burst_plan.explain.mask_picture import (
    edges_of,
    outlines,
    owners,
    placed,
    raster,
    save_mask,
    tiles_summary,
)
from burst_plan.explain.pairs import pairs_at
from burst_plan.explain.problem import LayerProblem
from burst_plan.words import document_ends, mask_of, shortened

RATES = Rates(intra=50e9, inter=5e9, compute=1e14)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("causal", Mask.causal()),
        ("full", Mask.full()),
        ("window:4", Mask.window(3, 0)),
        (" window:4, 2 ", Mask.window(4, 2)),
        ("window:-1,0", Mask.causal()),
        ("dilated:8,2&causal", Mask.dilated(8, 2) & Mask.causal()),
        ("documents:10,20", Mask.documents([0, 10, 30, 64])),
        ("causal & documents:32,32", Mask.causal() & Mask.documents([0, 32, 64])),
        ("blocks:16,1", Mask.blocks(torch.ones(4, 4, dtype=torch.bool), 16)),
        ("blocks:16,0", Mask.blocks(torch.eye(4, dtype=torch.bool), 16)),
        ("causal & chunked:16", Mask.causal() & Mask.chunked(16)),
        ("prefix:8 & window:32", Mask.prefix(8) & Mask.window(31, 0)),
        ("causal | images:4,2", Mask.causal() | Mask.images([(0, 4), (32, 36)]) | Mask.window(0, 0)),
        ("tree:40,3", Mask.tree([-1, 0, 0, 0], [40, 8, 8, 8])),
        (
            "causal & documents:9 | full & window:4",
            Mask.causal() & Mask.documents([0, 9, 64]) | Mask.window(3, 0),
        ),
    ],
)
def test_a_mask_is_what_its_words_say(text, mask):
    assert mask_of(text, 64) == mask


def test_lengths_may_be_in_k_and_m():
    assert mask_of("window:4K & documents:64K", 2**20) == Mask.window(4095, 0) & Mask.documents(
        [0, 2**16, 2**20]
    )


def test_random_documents_and_blocks_are_so_many_and_the_same_every_time():
    ends = document_ends("causal & documents:random,64", 2**20)
    assert len(ends) == 65 and (ends[0], ends[-1]) == (0, 2**20)
    assert all(a < b for a, b in pairwise(ends))
    assert mask_of("documents:random,64", 2**20) == Mask.documents(ends)
    mask_of.cache_clear()
    assert document_ends("documents:random,64", 2**20) == ends
    at = torch.arange(4096)
    allowed = mask_of("blocks:64,0.25", 4096).allows(at, at)
    assert allowed.diagonal().all()
    assert 0.2 < allowed.double().mean() < 0.3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("star", "unknown mask 'star' in 'star'; legal: causal, full, window:W"),
        ("causal &", "unknown mask ''"),
        ("causal:3", "it takes 0 numbers, got 1"),
        ("window", "it takes 1 or 2 numbers, got 0"),
        ("window:x", "a number of tokens looks like 4096, 128K or 1M, got 'x'"),
        ("window:0", "a number of tokens looks like"),
        ("dilated:8", "it takes 2 numbers"),
        ("documents", "the lengths of the documents are missing"),
        ("documents:60,5", "the documents have 65 tokens in all, but the sequence has 64"),
        ("documents:random,65", "64 tokens cannot be 65 documents"),
        ("documents:random", "it takes 2 numbers"),
        ("blocks:8,2", "a density is a number from 0 to 1, got '2'"),
        ("blocks:8,many", "got 'many'"),
        ("chunked", "it takes 1 numbers, got 0"),
        ("causal | images:8", "it takes 2 numbers, got 1"),
        ("images:8,9", "9 images have 72 tokens in all, but the sequence has 64"),
        ("tree:60,5", "64 tokens cannot be a prompt of 60 and 5 answers"),
        ("prefix:65", "prefix [0, 65) goes beyond the sequence of 64 tokens"),
        ("causal | dilated:8,2", "dilated mask cannot be part of a union"),
    ],
)
def test_words_that_are_no_mask_say_what_is_legal(text, words):
    with pytest.raises(ValueError) as error:
        mask_of(text, 64)
    assert words in str(error.value)
    with pytest.raises(ValueError, match="at most 2048: SIZE must be at least 512"):
        mask_of("blocks:8,0.5", 2**20)


@pytest.mark.parametrize(
    ("text", "shorter"),
    [
        ("causal", "causal"),
        ("window:4K", "window:32"),
        ("window:-1,0", "window:-1,0"),
        ("causal & dilated:1K,8", "causal & dilated:8,8"),
        ("documents:16K,16K", "documents:128,128,256"),
        ("documents:1", "documents:512"),
        ("documents:random,64", "documents:random,64"),
        ("blocks:256,0.5", "blocks:2,0.5"),
        ("chunked:8K & causal | images:256,9", "chunked:64 & causal | images:2,9"),
        ("tree:32K,8", "tree:256,8"),
        ("tree:65000,500", "tree:507,5"),
        ("causal | images:16,4000", "causal | images:1,512"),
        ("prefix:4K", "prefix:32"),
    ],
)
def test_a_mask_over_fewer_tokens_is_the_same_picture(text, shorter):
    assert shortened(text, 2**16, 512) == shorter
    mask_of(shorter, 512)


@given(randoms, st.integers(1, 60), st.integers(1, 70))
@settings(max_examples=60, deadline=None)
def test_the_raster_is_the_mask(draw, n, cells):
    mask = random_mask(draw, n)
    at, edges = torch.arange(n), edges_of(n, cells).tolist()
    allowed = mask.allows(at, at).double()
    found = raster(mask, n, cells)
    assert found.shape == (len(edges) - 1,) * 2 and len(found) <= cells
    for (row, (a, b)), (column, (c, d)) in product(enumerate(pairwise(edges)), repeat=2):
        assert found[row, column] == pytest.approx(float(allowed[a:b, c:d].mean()))


def test_a_raster_of_a_million_tokens_needs_no_million_squared():
    found = raster(mask_of("causal & documents:random,64", 2**20), 2**20)
    allowed = sum(length * (length + 1) / 2 for length in _lengths())
    assert float(found.mean()) * 2**40 == pytest.approx(allowed, rel=1e-12)


def _lengths():
    return [b - a for a, b in pairwise(document_ends("documents:random,64", 2**20))]


@pytest.mark.parametrize("layout", layouts(4), ids=str)
@pytest.mark.parametrize("heads", [1, 2])
def test_a_row_has_the_colours_of_those_that_hold_it(layout, heads):
    n = 101
    plan = plan_for(layout, Mask.causal(), n, 4 // heads, heads)
    edges = edges_of(n, 20)
    held = owners(plan, edges)
    holder = torch.empty(n, dtype=torch.int64)
    for rank in range(4):
        for run in layout.runs(n, rank, 4):
            holder[[at for at in run if at < n]] = rank // heads
    for row, (a, b) in enumerate(pairwise(edges.tolist())):
        want = torch.bincount(holder[a:b], minlength=4 // heads) / (b - a)
        torch.testing.assert_close(held[row], want.double())


@given(randoms, st.sampled_from(["aten-cpu", "reference", "cudnn"]))
@settings(max_examples=40, deadline=None)
def test_outlines_hold_the_pairs_of_their_tile(draw, kernel):
    """A polygon covers the middle of every pair that meets, and, but along diagonals, of no other."""
    n, size = draw.randint(8, 48), 2
    layout, mask = draw.choice(layouts(size)), random_mask(draw, n)
    plan = plan_for(layout, mask, n, size)
    chosen = KERNELS[kernel]
    for q_at, k_at in product(range(size), repeat=2):
        for tile in tiles_of(plan, q_at, k_at, chosen.abilities):
            polygons = outlines(tile)
            area = sum(map(_area, polygons))
            assert area > 0
            gaps = any(abs(r.step) > 1 for r in (*tile.q, *tile.k)) or mask.stride > 1
            if not gaps:
                edge = sum(tile.pattern.shape) * len(tile.pattern.pieces)
                assert tile.pattern.pairs <= area + 1e-6 and area <= tile.pattern.pairs + edge
            for x, y in (point for polygon in polygons for point in polygon):
                assert 0 <= x <= plan.rows and 0 <= y <= plan.rows


def _area(polygon):
    around = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    return abs(sum(x * v - u * y for (x, y), (u, v) in around)) / 2


@pytest.mark.parametrize(
    ("pass_", "kernel"), [("forward", "aten-cpu"), ("query", "reference"), ("kv", "cudnn")]
)
def test_pictures_are_written_for_all_masks_and_layouts(pass_, kernel, tmp_path):
    words = ["full", "causal", "window:16", "causal & dilated:32,3", "documents:random,5", "blocks:8,0.3"]
    for number, (text, layout) in enumerate(zip(words, layouts(4), strict=True)):
        out = tmp_path / f"{number}.png"
        plan = plan_for(layout, mask_of(text, 101), 101, 4)
        save_mask(plan, pass_, KERNELS[kernel], text, out)
        assert out.read_bytes().startswith(b"\x89PNG")
    many = plan_for(Layout("zigzag"), Mask.causal(), 120, 20, 2)
    save_mask(many, pass_, KERNELS[kernel], "groups of two", tmp_path / "many.png")


ROUTES = [Route(1, 4), Route(2, 2), Route(1, 2, 2), Route(1, 2, 2, outer=True)]


@pytest.mark.parametrize("pass_", ["forward", "kv", "query"])
@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_the_picture_shows_what_the_ranks_of_a_route_compute(layout, route, pass_, tmp_path):
    """Tiles and work of a rank are those of its program."""
    n, mask, kernel = 96, Mask.causal(), KERNELS["reference"]
    plan = plan_of(Layout(layout), mask, n, route.placement)
    met = torch.zeros(route.positions, route.positions, dtype=torch.float64)
    for q_at, k_at in product(range(route.positions), repeat=2):
        tiles = tiles_of(plan, q_at, k_at, kernel.abilities)
        met[(k_at, q_at) if pass_ == "query" else (q_at, k_at)] = sum(t.pattern.pairs for t in tiles)
    whole = plan.rows * route.positions
    for position in range(route.positions):
        rank = route.placement.rank(position, 0)
        actions = program(rank, route, pass_, plan)
        computes = {action.source for action in actions if isinstance(action, Compute)}
        assert float(pairs_at(plan, pass_)[position]) == sum(float(met[position, s]) for s in computes)
        polygons = [polygon for _, polygon in placed(plan, pass_, kernel, position)]
        shown = {int(min(x for x, _ in polygon) // plan.rows) for polygon in polygons}
        assert shown == {source for source in computes if met[position, source]}
        assert all(0 <= x <= whole and 0 <= y <= plan.rows for polygon in polygons for x, y in polygon)
    if layout == "striped" and pass_ == "query":
        save_mask(plan, pass_, kernel, "a route", tmp_path / "route.png")


def test_groups_of_ranks_far_apart_are_named():
    plan = plan_of(Layout("zigzag"), Mask.causal(), 64, Route(1, 4, 2, outer=True).placement)
    assert mask_picture._name(plan, 1) == "ranks 1, 4 apart"
    assert mask_picture._name(plan_for(Layout("zigzag"), Mask.causal(), 64, 4, 2), 1) == "ranks 2-3"


@pytest.mark.parametrize("pass_", ["forward", "query"])
def test_the_tiles_of_a_zigzag_ring_are_those_of_the_paper(pass_):
    plan = plan_for(Layout("zigzag"), Mask.causal(), 64, 4)
    text = tiles_summary(plan, pass_, KERNELS["cudnn"])
    assert text.startswith("tiles:  16 for kernel cudnn (12 full, 4 causal), 2,080 pairs")
    assert text.endswith("100.0%")


def _drawn(mask, layout, *, ranks=None, pass_="query", ring="double", seq=1024):
    problem = LayerProblem(seq=seq, heads=4, kv_heads=4, head_dim=16, mask=mask)
    return predict.draw(problem, ranks or Ranks(4, 2), RATES, BurstConfig(ring=ring), pass_, layout)


@pytest.mark.parametrize("pass_", ["forward", "query", "kv"])
@pytest.mark.parametrize("ring", ["double", "flat", "direct", "auto"])
@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        ("causal & window:100", "contiguous"),
        ("causal & documents:random,9", "auto"),
        ("dilated:64,4", "striped"),
        ("causal", "stacked-zigzag:4"),
    ],
)
def test_a_drawing_computes_all_that_any_mask_allows(mask, layout, ring, pass_):
    drawing = _drawn(mask, layout, pass_=pass_, ring=ring, seq=1000)
    at = torch.arange(1000)
    pairs = int(mask_of(mask, 1000).allows(at, at).sum())
    seconds = sum(e.ended - e.started for e in drawing.timeline.events if e.lane == "compute")
    assert seconds == pytest.approx((4 if pass_ == "forward" else 10) * pairs * 4 * 16 / RATES.compute)
    assert all(size <= dense for size, dense in drawing.sent.values())
    if ring == "direct":
        assert drawing.schedule.route.direct


def test_a_summary_says_how_even_the_work_is_and_what_is_read():
    drawing = _drawn("causal & window:64", "contiguous", pass_="forward", ring="direct")
    text = predict.summary(drawing)
    even = imbalance(Layout("contiguous"), Mask.window(63, 0), 1024, 4)
    assert f"has {even:.3f} x the mean" in text
    assert "read:   189 rows of other positions, 6.2% of 3,072" in text  # 63 from each of three neighbours
    of_full = predict.summary(_drawn("full", "zigzag"))
    assert "has 1.000 x the mean" in of_full and "100.0% of 3,072" in of_full


def test_layouts_are_words_and_auto_goes_by_the_mask():
    ranks = Ranks(4, 2)
    problem = LayerProblem(seq=1024, heads=4, kv_heads=4, head_dim=16, mask="causal & documents:512,256,256")
    assert predict.layout_of("auto", problem, ranks) == Layout.for_mask(problem.seen, 1024, 4)
    assert predict.layout_of("zigzag-documents", problem, ranks).ends == (0, 512, 768, 1024)
    assert predict.layout_of("block-striped:64", problem, ranks) == Layout("block-striped", block=64)
    for word, complaint in (
        ("block-striped:7", "must be a multiple of 4"),
        ("star", "unknown layout 'star'; .*also auto, and zigzag-documents"),
    ):
        with pytest.raises(ValueError, match=complaint):
            predict.layout_of(word, problem, ranks)
    causal = LayerProblem(seq=1024, heads=4, kv_heads=4, head_dim=16)
    with pytest.raises(ValueError, match="must have documents, once"):
        predict.layout_of("zigzag-documents", causal, ranks)


def _invoke(*words, tmp_path):
    out, trace, mask = (tmp_path / name for name in ("t.png", "trace.json", "mask.png"))
    return CliRunner().invoke(app, ["draw", *words, "--out", str(out)]), trace, mask


def test_draw_shows_the_mask_and_runs_the_schedule_that_it_shows(tmp_path):
    words = "--cluster 2x2 --direction kv --ring auto --seq 1000 --heads 4 --dtype float32 --measure".split()
    mask = ["--mask", "causal & documents:random,7", "--layout", "auto"]
    done, trace, picture = _invoke(*words, *mask, tmp_path=tmp_path)
    assert done.exit_code == 0, done.output
    for word in ("backward kv", "layout: ", "work:   the busiest rank", "read:   ", "sent:   ", "tiles:  "):
        assert word in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    runs = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    ran = {run: [] for run in ("predicted", "measured")}
    for event in events:
        if event["ph"] == "X" and (event["name"].startswith("[") or "<" in event["name"]):
            run, rank = runs[event["pid"]].split(", ")
            ran[run].append((rank, event["cat"], event["name"]))
    assert sorted(ran["predicted"]) == sorted(ran["measured"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mask", "star"], "unknown mask 'star'"),
        (["--mask", "documents:131073"], "but the sequence has 131072"),
        (["--layout", "star"], "unknown layout 'star'"),
        (["--layout", "zigzag-documents"], "must have documents"),
        (["--ring", "star"], "'direct'"),
    ],
)
def test_draw_says_what_is_wrong_with_a_mask(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["draw", *arguments])
    assert done.exit_code == 2
    assert words in done.output
    assert not list(Path(tmp_path).glob("*.json"))


def test_explain_takes_masks_layouts_and_all_rings():
    words = ["--mask", "causal & window:4K", "--layout", "contiguous", "--seq", "128K", "--cluster", "2x4"]
    done = CliRunner().invoke(app, ["explain", *words])
    assert done.exit_code == 0, done.output
    assert "layout contiguous: the busiest rank has 1.0" in done.output
    assert "default: ring='direct'" in done.output
    causal = CliRunner().invoke(app, ["explain", "--seq", "128K", "--cluster", "2x2", "--heads", "4"])
    assert all(re.search(rf" {ring}[ ,]", causal.output) for ring in ("double", "flat", "direct"))
    flat = CliRunner().invoke(app, ["explain", "--seq", "128K", "--cluster", "2x2", "--ring", "flat"])
    assert "direct" not in flat.output and "default: ring='flat'" in flat.output
    bad = CliRunner().invoke(app, ["explain", "--mask", "star"])
    assert bad.exit_code == 2 and "unknown mask 'star'" in bad.output
