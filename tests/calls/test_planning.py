"""A whole call is planned once, in work that grows with ranks and runs, and again at no cost."""

import random
import sys
from itertools import pairwise
from types import SimpleNamespace

import planned as planning
import pytest
import torch
from cells import crossed
from counting import count_calls

from burst_mcore import BurstConfig, Layout, Mask, Topology
from burst_mcore.attention import choose
from burst_mcore.attention import resolve as resolve_module
from burst_mcore.attention.choose import candidates
from burst_mcore.attention.geometry.pattern import Abilities
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.geometry.shard import Placement
from burst_mcore.attention.geometry.tiles import tiles_of
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.attention.request import Options, Tensors, validate
from burst_mcore.rollouts import tree_mask

RANKS, TOKENS = 64, 2**20
GROUPS = SimpleNamespace(backends="cpu or cuda tensors")  # which check_group asks of meta tensors
RING = Topology(rank=3, size=RANKS, intra_size=8, communicators=GROUPS)
"""A rank on the first of eight nodes, whose process groups are never used: nothing is sent."""


def _packed(documents, seed):
    cuts = random.Random(seed).sample(range(1, TOKENS), documents - 1)
    return Mask.causal() & Mask.documents([0, *sorted(cuts), TOKENS])


def _planned(mask, layout):
    """All that a call does before it sends, on rank 3 of 8 x 8."""
    q = torch.empty(1, TOKENS // RANKS, 32, 128, dtype=torch.bfloat16, device="meta")
    kv = torch.empty(1, TOKENS // RANKS, 8, 128, dtype=torch.bfloat16, device="meta")
    config = BurstConfig(layout=layout)

    def plan():
        request = validate(Tensors(q, kv, kv), Options(RING, mask, config))
        call = resolve_module.call_of(request, (TOKENS // RANKS,) * RANKS)
        assert request.signature and call.signature
        return call, [call.program(name) for name in ("forward", call.direction)]

    return plan


def _tiles(call):
    return [tiles_of(call.plan, 3, source, call.kernel.abilities) for source in range(RANKS)]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch):
    """Nothing is computed: tensors are on no device, for which there is no kernel."""
    monkeypatch.setattr(resolve_module, "choose", lambda *_: KERNELS["aten-cpu"])


@pytest.mark.parametrize("layout", ["zigzag", "striped", "for_mask"])
def test_a_warm_call_has_the_plan_of_the_first(layout):
    mask = _packed(1000, seed=layout)
    plan = _planned(mask, Layout.for_mask(mask, TOKENS, RANKS) if layout == "for_mask" else layout)
    (call, steps), (again, steps_again) = plan(), plan()
    assert call.plan is again.plan
    assert all(a is b for a, b in zip(steps, steps_again, strict=True))
    assert all(a is b for a, b in zip(_tiles(call), _tiles(again), strict=True))
    assert count_calls(plan) < 400


def _forget():
    """Empty every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("burst_mcore."):
            for found in vars(module).values():
                if hasattr(found, "cache_clear"):
                    found.cache_clear()


def _calls(function):
    """How many functions are called where nothing was planned before."""
    _forget()
    return count_calls(function)


@pytest.mark.parametrize("planned", planning.PLANNED)
def test_what_is_done_grows_with_the_ranks_not_with_their_square(planned):
    planning.PLANNED[planned](8)
    small, large = (_calls(lambda size=size: planning.PLANNED[planned](size)) for size in (32, 256))
    assert large <= 1.5 * 8 * small, f"{small} calls for 32 ranks, {large} for 256"


def test_documents_of_a_kind_are_decided_once(monkeypatch):
    _forget()
    decided = []
    monkeypatch.setattr(choose, "candidates", lambda *a: decided.append(a) or candidates(*a))
    for seed in range(5):
        _planned(planning.packed(TOKENS, seed), "zigzag")()
    assert len(decided) == 1


RUN = 12
"""Tokens of a run, which no stride of these tests but 2 and 3 divides."""


def _layout(kind, n):
    """A layout of two ranks, each of which has n / 24 runs of 12 tokens; of documents, of uneven ones."""
    if kind == "zigzag-documents":
        draw, ends = random.Random(n), [0]
        while ends[-1] < n:
            ends.append(min(n, ends[-1] + 4 * draw.randint(6, 18)))
        return Layout(kind, ends=tuple(ends))
    if kind == "chunks":
        order = random.Random(n).sample(range(n // RUN), n // RUN)
        return Layout(kind, chunks=tuple(tuple(order[rank::2]) for rank in range(2)))
    return Layout.of(f"{kind}:{2 * RUN if kind == 'block-striped' else n // (4 * RUN)}")


def _terms(n):
    draw = random.Random(n)
    cuts = sorted(draw.sample(range(1, n), 7))
    apart = Mask.documents([0, *cuts, n])
    slices = Mask.ranges([(0, n // 2), (n // 3, n)], [(0, n), (n // 4, n)], ["causal", "full"])
    blocks = Mask.blocks(torch.ones(8, 8).tril().bool(), -(-n // 8))
    tree = torch.tensor([-1, 0, 1, 1, 0, -1, 5, 5, *torch.tensor([0, *cuts, n]).diff()])
    return {
        "a tree": tree_mask(tree),
        "a tree with a window": tree_mask(tree, Mask.window(100, 0)),
        "a window": Mask.window(100, 3),
        "chunks": Mask.causal() & Mask.chunked(n // 5),
        "images": Mask.causal() | Mask.images([*pairwise(cuts)][::2]),
        "all terms but a dilation": Mask.causal() & apart & slices & blocks,
        "no end": Mask.causal() & Mask.dilated(n, 2),
        "short": Mask.causal() & Mask.dilated(100, 5),
        "of all sides": Mask.dilated(n, 7),
        "documents": apart & Mask.dilated(n, 3),
        "slices": slices & Mask.dilated(n, 4),
        "blocks": blocks & Mask.dilated(n, 2),
    }


RUNS = ["block-striped", "stacked-zigzag", "zigzag-documents", "chunks"]
TERMS = list(_terms(64))


@pytest.mark.parametrize(
    ("term", "kind"),
    crossed(TERMS, RUNS, quick=lambda term, kind: (TERMS.index(term) + RUNS.index(kind)) % 4 == 0),
)
def test_what_is_done_grows_with_the_runs_not_with_their_square(term, kind):
    def planned(n):
        plan = plan_of(_layout(kind, n), _terms(n)[term], n, Placement(2))
        for part, abilities in ((None, Abilities(masks=True)), (0, Abilities(windows=True, packed=True))):
            assert tiles_of(plan, 1, 0, abilities, q_part=part)
        assert plan.needed(0, 1, of_queries=False) and plan.needed(1, 0, of_queries=True)

    few, many = (_calls(lambda n=n: planned(n)) for n in (16 * 2 * RUN, 128 * 2 * RUN))
    assert many <= 2 * 8 * few, f"{few} calls for 16 runs, {many} for 128"  # n log n: 14; n * n: 64


def test_layers_of_all_kinds_share_a_plan():
    plans = []
    for heads in (32, 16, 32):
        q = torch.empty(1, TOKENS // RANKS, heads, 128, dtype=torch.bfloat16, device="meta")
        request = validate(Tensors(q, q, q), Options(RING, _packed(50, 4), BurstConfig()))
        plans.append(resolve_module.call_of(request, (TOKENS // RANKS,) * RANKS).plan)
    assert plans[0] is plans[1] is plans[2]
