"""Changing SP changes nothing: losses, gradients, norm and a clipped step equal those of one process."""

import itertools

import deepspeed
import pytest
import torch
from engines import (
    config_of,
    dataset,
    in_order,
    model_of,
    models_loss,
    plain,
    plain_loss,
    start,
    trained,
    worst,
)
from ranks import on_ranks, processes

import burst_mcore.deepspeed as burst

CLIP = 0.5
STAGES = (0, 1, 2, 3)
LAYOUTS = ("zigzag", "striped", "contiguous")
HEADS = ((4, 2), (4, 1), (3, 3), (6, 3))
EVERY = [
    (stage, scatter, gas, layout, heads)
    for stage, scatter, gas, layout, heads in itertools.product(STAGES, (True, False), (1, 2), LAYOUTS, HEADS)
]
SAMPLE = {  # each stage, the later ones with and without reduce_scatter; every other value several times
    4: [
        (0, True, 2, "zigzag", (4, 2)),
        (1, True, 1, "striped", (4, 1)),
        (2, True, 2, "contiguous", (3, 3)),
        (3, True, 2, "striped", (6, 3)),
    ],
    2: [(2, False, 1, "zigzag", (6, 3)), (3, False, 1, "zigzag", (4, 1)), (3, True, 1, "contiguous", (4, 2))],
}


def hold(size, sp, cell, rank, section=(), zero=(), tokens=40, losses=(models_loss, plain_loss)):
    """Hold an engine to one process: losses, gradients, norm, and what a clipped step does.

    losses: of an engine and its batch, of the model in one process and its sample.
    """
    stage, scatter, gas, layout, (heads, kv_heads) = cell
    dp, kind = size // sp, {"heads": heads, "kv_heads": kv_heads}
    data = dataset(dp * gas, tokens)
    zero = {"reduce_scatter": scatter, **dict(zero)}
    config = config_of(stage, sp, gas=gas, clip=CLIP, zero=zero, layout=layout, **dict(section))
    engine, _ = start(config, **kind)
    loader = burst.shard_loader(in_order(data, sp), engine)
    told, gradients, norm, parameters = trained(engine, loader, gas, losses[0])
    engine.destroy()
    first = dict(model_of(**kind).named_parameters())
    want_losses, want_gradients, want_norm, want_parameters = plain(data, CLIP, losses[1], **kind)
    steps = [{k: (p - first[k]).detach() for k, p in x.items()} for x in (parameters, want_parameters)]
    assert told == pytest.approx(want_losses[rank // sp :: dp], rel=1e-5), cell
    assert worst(gradients, want_gradients) <= 1e-5, cell
    if norm is not None:  # ZeRO-0 reports it after clipping alone
        assert norm == pytest.approx(want_norm, rel=1e-5), cell
    assert worst(*steps) <= 1e-4, cell  # differences of rounded numbers


def _cells(rank, size, sp, cells, **how):
    for cell in cells:
        hold(size, sp, cell, rank, **how)


@pytest.mark.parametrize(
    ("size", "sp", "cells"),
    [
        (3, 3, [(3, True, 1, "zigzag", (4, 2)), (1, True, 2, "striped", (4, 1))]),
        (4, 4, SAMPLE[4]),
        pytest.param(4, 2, SAMPLE[2], marks=pytest.mark.slow),
        *(
            pytest.param(4, sp, [cell for cell in EVERY if cell[0] == stage], marks=pytest.mark.slow)
            for sp, stage in itertools.product((4, 2), STAGES)
        ),
    ],
)
def test_cells(size, sp, cells):
    processes(size, _cells, sp, cells)


ONE = (3, True, 1, "zigzag", (4, 2))
ALL_REDUCED = (3, False, 1, "zigzag", (4, 2))
TWO = (2, True, 2, "zigzag", (4, 2))
OF_ATTENTION = {
    "ring alone": (ONE, {"section": {"head_parallel": 1}}),
    "Ulysses": (ONE, {"section": {"head_parallel": 2, "backward": "kv"}}),
    "shorter than the ring": (ONE, {"tokens": 5}),
}
OPTIONS = {
    "unfused": (TWO, {"section": {"fused_loss": False}}),
    "uneven length": (TWO, {"tokens": 37}),
    "parameters larger than a bucket": (ALL_REDUCED, {"zero": {"reduce_bucket_size": 100}}),
    "gradients not contiguous": (ONE, {"zero": {"contiguous_gradients": False}}),
    "offload": (TWO, {"zero": {"offload_optimizer": {"device": "cpu"}}}),
}


def _options(rank, size, options):
    for cell, how in options.values():
        hold(size, 2, cell, rank, **how)


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, OF_ATTENTION), (4, OPTIONS), pytest.param(4, OF_ATTENTION, marks=pytest.mark.slow)],
    ids=["of attention", "of ZeRO", "of attention, DP2xSP2"],
)
def test_options(size, options):
    """Options of attention concern the ranks of a sequence alone, others those of all sequences, too."""
    processes(size, _options, options)


def penalty(model):
    """A term that is equal on all ranks, and as large as the loss."""
    return 20 * model.get_input_embeddings()(torch.arange(3, 20)).square().mean()


def _of_tokens(logits, labels):
    """(sum, weights) of a loss in which every token weighs something else."""
    weights = (labels % 3 + 1) * (labels != -100)
    each = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return (each * weights.flatten()).sum(), weights.sum().float()


def own_loss(engine, batch):
    labels = batch.pop("shift_labels")
    return burst.whole_loss(*_of_tokens(engine(**batch).logits, labels))


def plain_own_loss(model, sample):
    labels = torch.nn.functional.pad(sample["labels"][None], (0, 1), value=-100)[:, 1:]
    total, weights = _of_tokens(model(input_ids=sample["input_ids"][None], use_cache=False).logits, labels)
    return total / weights


LOSSES = {
    "with a term equal on all ranks": (
        lambda engine, batch: models_loss(engine, batch) + penalty(engine.module),
        lambda model, sample: plain_loss(model, sample) + penalty(model),
    ),
    "of logits": (own_loss, plain_own_loss),
}
STAGE_BY_STAGE = [(stage, True, gas, "zigzag", (4, 2)) for stage, gas in ((0, 1), (1, 2), (2, 1), (3, 2))]


def _losses(rank, size, sp, losses, cells):
    _cells(rank, size, sp, cells, losses=LOSSES[losses])


@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize(
    ("size", "sp", "cells"),
    [
        (2, 2, STAGE_BY_STAGE[1:2]),
        pytest.param(2, 2, [*STAGE_BY_STAGE, ALL_REDUCED], marks=pytest.mark.slow),
        pytest.param(4, 2, STAGE_BY_STAGE, marks=pytest.mark.slow),
    ],
    ids=["SP2", "SP2, every stage", "DP2xSP2"],
)
def test_losses_of_the_users(size, sp, cells, losses):
    processes(size, _losses, sp, losses, cells)


BFLOAT16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
HALVES = {
    "ZeRO-1": (1, BFLOAT16, {"layout": "striped"}),
    "ZeRO-3": (3, BFLOAT16, {"checkpointing": {"policy": "segment"}}),
    "ZeRO-2, unfused": (2, BFLOAT16, {"fused_loss": False}),
    "autocast": (2, AUTOCAST, {}),
}


@on_ranks(2)
def test_bfloat16_is_as_exact_as_one_process(rank, size):
    """Errors of an engine, beside those of one process in the same precision."""
    (sample,) = dataset(1)
    (exact,), gradients, *_ = plain([sample])
    whole = torch.cat([gradients[name].flatten() for name in sorted(gradients)])

    def error(of):
        together = torch.cat([of[name].flatten() for name in sorted(of)]).float()
        return ((together - whole).norm() / whole.norm()).item()

    for name, (stage, precision, section) in HALVES.items():
        engine, _ = start({**config_of(stage, size, **section), **precision})
        (batch,) = burst.shard_loader(in_order([sample], size), engine)
        loss = engine(**batch).loss
        engine.backward(loss)
        get = deepspeed.utils.safe_get_full_grad
        ours = error({n: get(p).clone() for n, p in engine.module.named_parameters()})
        engine.destroy()
        model = model_of() if precision is AUTOCAST else model_of().bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision is AUTOCAST):
            alone = plain_loss(model, sample)
        alone.backward()
        bar = error({n: p.grad for n, p in model.named_parameters()})
        loss, loss_bar = (abs(x.item() / exact - 1) for x in (loss, alone))
        assert bar > 1e-4 and ours <= 2 * bar, (name, ours, bar)
        assert loss <= 2 * max(loss_bar, torch.finfo(torch.bfloat16).eps / 2), (name, loss, loss_bar)
