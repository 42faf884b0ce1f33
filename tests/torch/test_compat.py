"""The stand-in for ring-flash-attention under the lines of the stacks that call it."""

import pytest
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
    ids, labels, positions = _packed()
    model = model_of(**kind)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    loss = F.cross_entropy(logits[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def _as_a_stack_calls(rank, size, kind):
    """As OpenRLHF's ring_attn_utils does: pad to the ranks, cumulate, end with the whole length, slice."""
    group = dist.group.WORLD
    substitute_hf_flash_attn(group, 1)
    ids, labels, positions = _packed()
    model = model_of(**kind)
    model.config._attn_implementation = "flash_attention_2"  # its setter asks for the package flash_attn
    more = -ids.numel() % size
    shifted = F.pad(labels[:, 1:], (0, 1 + more), value=-100)
    ids, positions = F.pad(ids, (0, more)), F.pad(positions, (0, more))
    cu_seqlens = torch.cumsum(torch.tensor(LENGTHS), dim=-1, dtype=torch.int32)
    cu_seqlens = F.pad(F.pad(cu_seqlens, (1, 0), value=0), (0, 1), value=ids.numel())
    update_ring_flash_attn_params(cu_seqlens, group)
    mine = slice(rank * ids.numel() // size, (rank + 1) * ids.numel() // size)
    logits = model(input_ids=ids[:, mine], position_ids=positions[:, mine], use_cache=False).logits
    F.cross_entropy(logits[0], shifted[0, mine], ignore_index=-100, reduction="sum").backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    with pytest.raises(ValueError, match=r"2 rows of 7 tokens on each of 2 ranks: pack documents"):
        model(input_ids=ids[:, :14].view(2, 7), use_cache=False)
    with pytest.raises(ValueError, match=r"cu_seqlens must ascend from 0 .* 2 ranks share evenly"):
        update_ring_flash_attn_params(torch.tensor([0, 7]), group)
    use_ring_attn(False)
    with pytest.raises(Exception, match="kernels|flash"):  # transformers' own, which is not here
        model(input_ids=ids[:, mine], use_cache=False)
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "kind",
    [
        {"kind": "Qwen3"},
        pytest.param({"kind": "Gemma2", "sliding_window": 4}, marks=pytest.mark.slow),
        pytest.param({"kind": "Llama", "heads": 3, "kv_heads": 3}, marks=pytest.mark.slow),
    ],
)
def test_call_sites_of_stacks(kind):
    logits, gradients = _of_one(kind)
    found = processes(SIZE, _as_a_stack_calls, kind)
    whole = torch.cat([each for each, _ in found], 1)[:, : sum(LENGTHS)]
    torch.testing.assert_close(whole, logits, rtol=1e-5, atol=1e-5)
    for _, mine in found:
        assert worst(mine, gradients) < 2e-6
