"""Megatron's packed batches are read one ahead, and planned while the batch before is trained on."""

import pytest
import torch
from models import Case, megatron_on, transformer_config

PACKED = ((16, 48), (32, 32), (8, 24, 32), (24, 40))
"""Lengths of the documents of four batches of 64 tokens."""


def _batches():
    """As Megatron's datasets give them: the ends padded to one length."""
    for lengths in PACKED:
        ends = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        cu_seqlens = torch.tensor([ends + [64] * (65 - len(ends))], dtype=torch.int32)
        yield {"tokens": torch.zeros(1, 64, dtype=torch.int64), "cu_seqlens": cu_seqlens}


@pytest.mark.parametrize("window", [None, (9, 0)])
@megatron_on(2)
def test_packed_batches_are_planned_ahead(window):
    """From the third batch on, its mask is planned before its call is done."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from burst_mcore.attention import prepare
    from burst_mcore.megatron.ahead import planned_ahead
    from burst_mcore.megatron.core_attention import BurstCoreAttention

    plan, wait = prepare._plan, prepare.await_plan
    planned, called, in_time = [], [], []

    def planning(asked, tokens):
        plan(asked, tokens)  # first: what cannot be planned is not
        planned.append(asked.mask)

    prepare._plan = planning
    prepare.await_plan = lambda mask: (called.append(mask), wait(mask))
    config = transformer_config(Case(cp=2, fields=(("window_size", window),) if window else ()))
    core = BurstCoreAttention(config, 1, AttnMaskType.causal, "self")
    for batch in planned_ahead(_batches(), 2):
        ends = batch["cu_seqlens"][0].unique()
        core(*torch.randn(3, 32, 4, 16), None, packed_seq_params=PackedSeqParams("thd", ends, ends))
        in_time.append(called[-1] in planned)
    assert in_time == [False, False, True, True] and len(set(map(str, called))) == len(PACKED)


def test_only_megatrons_own_loaders_are_read_ahead(monkeypatch):
    from megatron.core import parallel_state

    from burst_mcore.megatron.ahead import Ahead, read_ahead

    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    external = iter([1])
    assert read_ahead(external) is external
    assert read_ahead(None) is None
    own = torch.utils.data.DataLoader(list(range(4)), batch_size=2)
    loader = read_ahead(own)
    assert isinstance(loader, Ahead) and len(loader) == 2 and loader.batch_size == 2
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 1)
    assert read_ahead(own) is own


def test_batches_pass_in_order_and_only_packed_ones_are_read_ahead(monkeypatch):
    from burst_mcore.megatron import ahead

    planned, read = [], []
    monkeypatch.setattr(
        ahead, "prepare", lambda mask, **how: planned.append((mask.document_ends, how["tokens"]))
    )

    def logged(batches):
        for index, batch in enumerate(batches):
            read.append(index)
            yield batch

    def order(batches):
        """Of each batch that comes out: whether it is the next, and how many were read before."""
        read.clear()
        return [(x is batches[i], len(read)) for i, x in enumerate(ahead.planned_ahead(logged(batches), 2))]

    assert order([{"tokens": torch.full((2, 64), i)} for i in range(3)]) == [(True, 1), (True, 2), (True, 3)]
    packed = list(_batches())
    assert order(packed) == [(True, 2), (True, 3), (True, 4), (True, 4)]
    assert [ends.tolist() for ends, _ in planned] == [[0, 16, 64], [0, 32, 64], [0, 8, 32, 64], [0, 24, 64]]
    both = {"tokens": torch.zeros(2, 64), "cu_seqlens": torch.cat([x["cu_seqlens"] for x in packed[:2]])}
    assert order([both]) == [(True, 1)]
    assert (planned[-1][0].tolist(), planned[-1][1]) == ([0, 16, 64, 96, 128], 128)
    odd = {"tokens": torch.zeros(1, 64), "cu_seqlens": torch.tensor([0, 7, 64])}
    assert order([odd]) == [(True, 1)]  # the forward refuses it
