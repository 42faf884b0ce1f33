"""The stand-in for ring-flash-attention, and a recipe's function, under the lines of stacks."""

from types import SimpleNamespace

import pytest
import recipes
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from causal_lms import VOCABULARY, model_of, worst
from ranks import processes

from burst_mcore.compat.ring_flash_attn import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
    use_ring_attn,
)

LENGTHS = [11, 5, 13]
SIZE = 2


def _packed():
    ids = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    for start in (0, 11, 16):
        labels[:, start] = -100
    return ids, labels, torch.cat([torch.arange(n) for n in LENGTHS])[None]


def _of_one(kind):
    """Each document by itself."""
    ids, labels, _ = _packed()
    model = model_of(**kind)
    logits = torch.cat([model(input_ids=each, use_cache=False).logits for each in ids.split(LENGTHS, 1)], 1)
    loss = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def _of_a_part(rank, size, kind):
    """This rank's part of the padded row through a model; (the row, logits, gradients of all ranks)."""
    ids, labels, positions = _packed()
    model = model_of(**kind)
    model.config._attn_implementation = "flash_attention_2"  # its setter asks for the package flash_attn
    more = -ids.numel() % size
    shifted = F.pad(labels[:, 1:], (0, 1 + more), value=-100)
    ids, positions = F.pad(ids, (0, more)), F.pad(positions, (0, more))
    mine = slice(rank * ids.numel() // size, (rank + 1) * ids.numel() // size)
    logits = model(input_ids=ids[:, mine], position_ids=positions[:, mine], use_cache=False).logits
    F.cross_entropy(logits[0], shifted[0, mine], ignore_index=-100, reduction="sum").backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return model, ids, logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def _as_a_stack_calls(rank, size, kind):
    """As OpenRLHF's ring_attn_utils does: pad to the ranks, cumulate, end with the whole length, slice."""
    group = dist.group.WORLD
    substitute_hf_flash_attn(group, 1)
    cu_seqlens = torch.cumsum(torch.tensor(LENGTHS), dim=-1, dtype=torch.int32)
    cu_seqlens = F.pad(F.pad(cu_seqlens, (1, 0), value=0), (0, 1), value=-(-sum(LENGTHS) // size) * size)
    update_ring_flash_attn_params(cu_seqlens, group)
    model, ids, *found = _of_a_part(rank, size, kind)
    with pytest.raises(ValueError, match=r"2 rows of 7 tokens on each of 2 ranks: pack documents"):
        model(input_ids=ids[:, :14].view(2, 7), use_cache=False)
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0 to the number of tokens"):
        update_ring_flash_attn_params(torch.tensor([1, 8]), group)
    use_ring_attn(False)
    with pytest.raises(Exception, match="kernels|flash"):  # transformers' own, which is not here
        model(input_ids=ids[:, :15], use_cache=False)
    return found


def _counted(calls):
    """The page's function, which counts its calls."""
    recipe = recipes.run("def flash_attention_forward")["flash_attention_forward"]
    return lambda *args, **kwargs: calls.append(1) or recipe(*args, **kwargs)


def _by_the_recipe(rank, size, kind):
    """As the page has it: the function is set where transformers reads its name."""
    calls = []
    recipe = _counted(calls)
    recipes.run("flash_attention._flash_attention_forward = ", flash_attention_forward=recipe)
    _, _, *found = _of_a_part(rank, size, kind)
    assert len(calls) == 2  # layers
    q = torch.ones(1, 4, 2, 8)
    place = {"position_ids": torch.arange(4)[None]}
    for odd in (
        {},
        {"position_ids": torch.zeros(2, 4)},
        {**place, "dropout": 0.1},
        {**place, "is_causal": False},
    ):
        with pytest.raises(ValueError, match="give the position_ids of this rank|attention is causal here"):
            recipe(q, q, q, None, query_length=4, **odd)
    return found


def _as_verl_calls(rank, size, kind):
    """Its workers put the function of its own module in transformers' place, and the recipe has set that."""
    from transformers import modeling_flash_attention_utils
    from transformers.integrations import flash_attention

    calls, of_towers = [], []
    modeling_flash_attention_utils._flash_attention_forward = lambda *args, **kwargs: (
        of_towers.append((args, kwargs)) or args[0] + 1  # transformers' own, which is not here
    )
    module = recipes.stand_in("verl.models.transformers.monkey_patch", _ulysses_flash_attention_forward=None)
    recipes.run("import monkey_patch", flash_attention_forward=_counted(calls))
    flash_attention._flash_attention_forward = module._ulysses_flash_attention_forward
    _, _, *found = _of_a_part(rank, size, kind)
    assert len(calls) == 2 and not of_towers
    _as_a_tower_calls(flash_attention.flash_attention_forward, of_towers)
    return found


def _as_a_tower_calls(attend, reached):
    """A vision tower gives no position_ids and attends both ways: transformers' own gets the call."""
    tower = torch.nn.Linear(1, 1)
    tower.is_causal, tower.config = False, SimpleNamespace(_attn_implementation="flash_attention_2")
    q, ends = torch.randn(1, 2, 12, 8), torch.tensor([0, 4, 12])
    out, _ = attend(tower, q, q, q, None, scaling=0.3, dropout=0.1, cu_seq_lens_q=ends)
    (((query, *_), named),) = reached
    assert query.equal(q.transpose(1, 2)) and out.equal(query + 1)
    assert named["softmax_scale"] == 0.3 and named["dropout"] == 0.1 and not named["is_causal"]
    assert named["cu_seq_lens_q"] is ends and named.get("position_ids") is None


GEMMA = {"kind": "Gemma2", "sliding_window": 4, "attn_logit_softcapping": 3.0}
SINKS = {"kind": "GptOss", "sliding_window": 4}


@pytest.mark.parametrize(
    ("seam", "kind"),
    [
        (_as_a_stack_calls, {"kind": "Qwen3"}),
        (_as_verl_calls, {"kind": "Qwen3"}),
        (_by_the_recipe, GEMMA),
        (_by_the_recipe, SINKS),
    ],
)
def test_call_sites_of_stacks(seam, kind):
    logits, gradients = _of_one(kind)
    found = processes(SIZE, seam, kind)
    whole = torch.cat([each for each, _ in found], 1)[:, : sum(LENGTHS)]
    torch.testing.assert_close(whole, logits, rtol=1e-5, atol=1e-5)
    for _, mine in found:
        assert worst(mine, gradients) < 2e-6
