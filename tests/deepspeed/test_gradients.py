"""Changing SP changes nothing: losses, gradients, norm and a clipped step equal those of one process."""

import itertools

import pytest
from engines import config_of, dataset, in_order, model_of, plain, start, trained, worst
from ranks import processes

import burst_mcore.deepspeed as burst

CLIP = 0.5
STAGES = (0, 1, 2, 3)
LAYOUTS = ("zigzag", "striped", "contiguous")
HEADS = ((4, 2), (4, 1), (3, 3), (6, 3))
EVERY = [
    (stage, scatter, gas, layout, heads)
    for stage, scatter, gas, layout, heads in itertools.product(STAGES, (True, False), (1, 2), LAYOUTS, HEADS)
]
SAMPLE = [  # each stage with and without reduce_scatter; every other value several times
    (0, True, 2, "zigzag", (4, 2)),
    (1, True, 1, "striped", (4, 1)),
    (2, True, 2, "contiguous", (3, 3)),
    (2, False, 1, "zigzag", (6, 3)),
    (3, True, 2, "striped", (6, 3)),
    (3, False, 1, "zigzag", (4, 1)),
    (3, True, 1, "contiguous", (4, 2)),
]


def differences(size, sp, cell, rank, section=(), zero=(), tokens=40):
    """Of one engine from one process: of losses, gradients, norm, and what a clipped step does."""
    stage, scatter, gas, layout, (heads, kv_heads) = cell
    dp, kind = size // sp, {"heads": heads, "kv_heads": kv_heads}
    data = dataset(dp * gas, tokens)
    zero = {"reduce_scatter": scatter, **dict(zero)}
    config = config_of(stage, sp, gas=gas, clip=CLIP, zero=zero, layout=layout, **dict(section))
    engine, _ = start(config, **kind)
    loader = burst.shard_loader(in_order(data, sp), engine)
    losses, gradients, norm, parameters = trained(engine, loader, gas)
    engine.destroy()
    first = dict(model_of(**kind).named_parameters())
    want_losses, want_gradients, want_norm, want_parameters = plain(data, CLIP, **kind)
    mine = want_losses[rank // sp :: dp]
    steps = [{k: (p - first[k]).detach() for k, p in x.items()} for x in (parameters, want_parameters)]
    return {
        "losses": max(abs(a / b - 1) for a, b in zip(losses, mine, strict=True)),
        "gradients": worst(gradients, want_gradients),
        "norm": 0.0 if norm is None else abs(norm / want_norm - 1),  # ZeRO-0 reports it after clipping alone
        "step": worst(*steps),
    }


def _cells(rank, size, sp, cells):
    return [differences(size, sp, cell, rank) for cell in cells]


def check(size, sp, cells):
    for rank, found in enumerate(processes(size, _cells, sp, cells, timeout=60 + 30 * len(cells))):
        for cell, of in zip(cells, found, strict=True):
            bars = {
                "losses": 1e-5,
                "gradients": 1e-5,
                "norm": 1e-5,
                "step": 1e-4,
            }  # differences of rounded numbers
            wrong = {name: error for name, error in of.items() if not error <= bars[name]}
            assert not wrong, f"rank {rank}, SP {sp}, cell {cell}: {wrong}"


@pytest.mark.parametrize(("size", "sp"), [(4, 4), (4, 2)], ids=["SP4", "DP2xSP2"])
def test_sample(size, sp):
    check(size, sp, SAMPLE)


def test_three_ranks_and_heads_that_do_not_divide():
    check(3, 3, [(3, True, 1, "zigzag", (4, 2)), (1, True, 2, "striped", (4, 1))])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("size", "sp"), [(4, 4), (4, 2)], ids=["SP4", "DP2xSP2"])
def test_every_cell(size, sp, stage):
    check(size, sp, [cell for cell in EVERY if cell[0] == stage])


def _options(rank, size, _):
    cell = (3, True, 1, "zigzag", (4, 2))
    two = (2, True, 2, "zigzag", (4, 2))
    return {
        "unfused": differences(size, 2, two, rank, {"fused_loss": False}),
        "ring alone": differences(size, 2, cell, rank, {"head_parallel": 1}),
        "Ulysses": differences(size, 2, cell, rank, {"head_parallel": 2, "backward": "kv"}),
        "recompute": differences(size, 2, cell, rank, {"checkpointing": {"policy": "full"}}),
        "uneven length": differences(size, 2, two, rank, tokens=37),
        "shorter than the ring": differences(size, 2, cell, rank, tokens=5),
        "gradients not contiguous": differences(size, 2, cell, rank, zero={"contiguous_gradients": False}),
        "neither": differences(
            size, 2, (3, False, 1, "zigzag", (4, 2)), rank, zero={"contiguous_gradients": False}
        ),
        "offload": differences(size, 2, two, rank, zero={"offload_optimizer": {"device": "cpu"}}),
        "offload 3": differences(size, 2, cell, rank, zero={"offload_optimizer": {"device": "cpu"}}),
    }


def test_options():
    for found in processes(4, _options, None):
        for name, of in found.items():
            assert all(error <= (1e-4 if what == "step" else 1e-5) for what, error in of.items()), (name, of)
