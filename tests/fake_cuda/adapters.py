"""Cases of the adapters: attention of Megatron, of DeepSpeed and of transformers, and a sequence's loss."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dense import dense, problem
from torch import Tensor, nn

from burst_mcore import BurstConfig, Mask, shard, unshard
from burst_mcore.checkpointing import KeepAttention, checkpoint

from . import ranks
from .cases import TOKENS, findings
from .clocks import CHECKER
from .tensors import launch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SETTINGS = BurstConfig(kernel="triton", layout="contiguous")


def _megatron(group: Any) -> Attend:
    """Megatron's core attention, as a layer's spec makes it."""
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from burst_mcore.megatron.core_attention import BurstCoreAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=64, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0,
        context_parallel_size=group.size(), params_dtype=torch.float32,
    )  # fmt: skip
    core = BurstCoreAttention(
        config, 1, AttnMaskType.causal, "self", pg_collection=SimpleNamespace(cp=group),
        burst_config=BurstConfig(kernel="triton"),
    )  # fmt: skip

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = core(*(x.transpose(0, 1) for x in (q, k, v)), None)
        return out.unflatten(2, (4, 16)).transpose(0, 1)

    return attend


def _import_megatron() -> None:
    """Import Megatron beside the packages that are there, not their stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*sys.modules]:
            if name.split(".")[0] in ("transformer_engine", "flash_attn", "flash_attn_interface"):
                patch.delitem(sys.modules, name)
        importlib.import_module("burst_mcore.megatron.core_attention")


def _deepspeed(group: Any) -> Attend:
    """The stand-in for DeepSpeed's DistributedAttention."""
    from burst_mcore.deepspeed.engine.distributed_attention import BurstDistributedAttention

    attention = BurstDistributedAttention(None, group, gather_idx=1, config=SETTINGS)
    return lambda q, k, v: attention(q, k, v, 0)


def _transformers(group: Any) -> Attend:
    """The attention of transformers that DeepSpeed's engine runs."""
    from burst_mcore.attention.runtime.topology import Topology
    from burst_mcore.transformers.models.attention import LayerMask, Sequence, attend

    sequence = Sequence(Topology.from_group(group), SETTINGS, TOKENS * group.size())
    mask, module = LayerMask(sequence, (Mask.causal(),), None), nn.Module()
    return lambda q, k, v: attend(module, *(x.transpose(1, 2) for x in (q, k, v)), mask)[0]


ADAPTERS = {"megatron": (_megatron, "zigzag"), "deepspeed": (_deepspeed, "contiguous")} | {
    "transformers": (_transformers, "contiguous")
}
"""By framework: what attends, made of a group, and its layout."""


def adapter(size: int, framework: str, *, recompute: bool = False) -> Counter[str]:
    """Two steps of an adapter's attention, and DeepSpeed's mean over a sequence as loss."""
    make, layout = ADAPTERS[framework]
    p = problem(0, TOKENS * size, heads=4, kv_heads=2, dtype=torch.float32)
    if framework == "megatron":
        _import_megatron()

    def rank(me: int) -> list[Tensor]:
        from burst_mcore.loss.whole import whole_mean

        group = dist.new_group(list(range(size)))
        attend = make(group)
        for _ in range(2):
            CHECKER.syncs[me].clear()
            q, k, v, dout = (ranks.cuda(shard(x, 1, rank=me, size=size, layout=layout), me) for x in p)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            if recompute:
                out = checkpoint(attend, *leaves, policy=KeepAttention(), preserve_rng_state=False)
            else:
                out = attend(*leaves)
            loss = whole_mean((out * dout).sum(), torch.ones((), device=out.device), group)
            CHECKER.launches[me].clear()
            loss.backward()
            if recompute and CHECKER.launches[me]["triton forward"]:
                CHECKER.found("launches", "attention's forward in a backward")
            launch("optimizer", [x.grad for x in leaves], [], rank=me)
        return [x.detach().values for x in (out, *(leaf.grad for leaf in leaves), loss)]

    done = ranks.run(size, rank)

    def wanted() -> dict[str, Any]:
        want = dense(p, Mask.causal())
        whole = dict(zip(("out", "dq", "dk", "dv"), (want.out, want.dq, want.dk, want.dv), strict=True))
        pairs = {
            name: (unshard([done[r][i] for r in range(size)], 1, layout=layout), x, 1e-5)
            for i, (name, x) in enumerate(whole.items())
        }
        mean = (want.out * p.dout.double()).sum() / size
        return {**pairs, "loss": (done[0][4], mean, 1e-5)}

    return findings(size, done, wanted)
