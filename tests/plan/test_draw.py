"""Masks as words, and drawings of passes: what `burst-mcore draw --mask ... --layout ...` shows."""

import json

import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

from burst_mcore import BurstConfig, Mask
from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.rates import Rates
from burst_plan.cli import app
from burst_plan.explain import predict
from burst_plan.explain.problem import LayerProblem
from burst_plan.words import mask_of

RATES = Rates(intra=50e9, inter=5e9, compute=1e14)


MASKS = {
    "causal": Mask.causal(),
    "full": Mask.full(),
    "window:4": Mask.window(3, 0),
    " window:4, 2 ": Mask.window(4, 2),
    "window:-1,0": Mask.causal(),
    "dilated:8,2&causal": Mask.dilated(8, 2) & Mask.causal(),
    "documents:10,20": Mask.documents([0, 10, 30, 64]),
    "causal & documents:32,32": Mask.causal() & Mask.documents([0, 32, 64]),
    "blocks:16,1": Mask.blocks(torch.ones(4, 4, dtype=torch.bool), 16),
    "blocks:16,0": Mask.blocks(torch.eye(4, dtype=torch.bool), 16),
    "causal & chunked:16": Mask.causal() & Mask.chunked(16),
    "prefix:8 & window:32": Mask.prefix(8) & Mask.window(31, 0),
    "causal | images:4,2": Mask.causal() | Mask.images([(0, 4), (32, 36)]) | Mask.window(0, 0),
    "tree:40,3": Mask.tree([-1, 0, 0, 0], [40, 8, 8, 8]),
    "causal & documents:9 | full & window:4": Mask.causal() & Mask.documents([0, 9, 64]) | Mask.window(3, 0),
}


def test_a_mask_is_what_its_words_say():
    for text, mask in MASKS.items():
        assert mask_of(text, 64) == mask, text
    long = Mask.window(4095, 0) & Mask.documents([0, 2**16, 2**20])
    assert mask_of("window:4K & documents:64K", 2**20) == long


NO_MASKS = [
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
]


def test_words_that_are_no_mask_say_what_is_legal():
    for text, words in NO_MASKS:
        with pytest.raises(ValueError) as error:
            mask_of(text, 64)
        assert words in str(error.value), text
    with pytest.raises(ValueError, match="at most 2048: SIZE must be at least 512"):
        mask_of("blocks:8,0.5", 2**20)


def _drawn(mask, layout, *, ranks=None, pass_="query", ring="double", seq=1024):
    problem = LayerProblem(seq=seq, heads=4, kv_heads=4, head_dim=16, mask=mask)
    return predict.draw(problem, ranks or Ranks(4, 2), RATES, BurstConfig(ring=ring), pass_, layout)


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
def test_a_drawing_computes_all_that_any_mask_allows(mask, layout, ring):
    at = torch.arange(1000)
    pairs = int(mask_of(mask, 1000).allows(at, at).sum())
    for pass_, products in (("forward", 4), ("query", 10), ("kv", 10)):
        drawing = _drawn(mask, layout, pass_=pass_, ring=ring, seq=1000)
        seconds = sum(e.ended - e.started for e in drawing.timeline.events if e.lane == "compute")
        assert seconds == pytest.approx(products * pairs * 4 * 16 / RATES.compute)
        assert all(size <= dense for size, dense in drawing.sent.values())
        assert drawing.schedule.route.direct or ring != "direct"


def test_draw_shows_the_mask_and_runs_the_schedule_that_it_shows(tmp_path):
    trace = tmp_path / "trace.json"
    words = "--cluster 2x2 --direction kv --ring auto --seq 1000 --heads 4 --dtype float32 --measure".split()
    mask = ["--mask", "causal & documents:random,7", "--layout", "auto", "--out", str(trace)]
    done = CliRunner().invoke(app, ["draw", *words, *mask])
    assert done.exit_code == 0, done.output
    for word in ("backward kv", "layout: ", "work:   the busiest rank", "read:   ", "sent:   ", "tiles:  "):
        assert word in done.output
    events = json.loads(trace.read_text())["traceEvents"]
    runs = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    ran = {run: [] for run in ("predicted", "measured")}
    for event in events:
        if event["ph"] == "X" and (event["name"].startswith("[") or "<" in event["name"]):
            run, rank = runs[event["pid"]].split(", ")
            ran[run].append((rank, event["cat"], event["name"]))
    assert sorted(ran["predicted"]) == sorted(ran["measured"]) != []
