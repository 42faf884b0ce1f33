"""A stand-in for deepspeed.sequence.layer.DistributedAttention, for Megatron-DeepSpeed and others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.mask import Mask
from burst_mcore.transformers.errors import UnsupportedError

CONTIGUOUS = BurstConfig(layout="contiguous", head_parallel="auto")
"""The layout by which such callers shard sequences."""


class BurstDistributedAttention(nn.Module):
    """Attention over a CP group, with DistributedAttention's constructor and forward, for any heads.

    Args:
        local_attention: what DistributedAttention would call on whole sequences of some heads. It is kept,
            for its parameters and its place in the state_dict, and not called: attention is scaled by
            1 / sqrt(head_dim) and masked by `mask`.
        sequence_process_group: the ranks that share sequences.
        scatter_idx, gather_idx: where q, k, v have their heads, 2, and their tokens, 0 or 1.
        sp_stream, num_kv_heads: not used.
        mask: over the whole sequence.
        config: its layout must be the caller's; by default sequences are sharded in contiguous parts.

    Raises:
        UnsupportedError: dimensions, dropout, or further arguments that it does not support.
    """

    def __init__(
        self,
        local_attention: Any,
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        mask: Mask | None = None,
        config: BurstConfig = CONTIGUOUS,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            text = f"scatter_idx must be 2, gather_idx 0 or 1, got {scatter_idx}, {gather_idx}"
            raise UnsupportedError("dimensions", text)
        _refuse_dropout(local_attention)
        self.local_attn, self.spg, self.gather_idx = local_attention, sequence_process_group, gather_idx
        self.mask, self.config = Mask.causal() if mask is None else mask, config
        self.topology = Topology.from_group(sequence_process_group)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Return the attention's output, as `query` is.

        Args:
            query: [local tokens, batch, heads, head_dim], or with the batch first (gather_idx 1).
            key, value: the same, of the K/V heads.
            args, kwargs: of the local attention, rotary_pos_emb too: none that says something. Rotate q and k
                before.
        """
        if {batch_dim_idx, self.gather_idx} != {0, 1}:
            raise UnsupportedError("dimensions", f"tokens in {self.gather_idx}, the batch in {batch_dim_idx}")
        further = {f"argument {i + 5}": x for i, x in enumerate(args)} | kwargs
        if names := [name for name, x in further.items() if x is not None]:
            text = f"{', '.join(names)} for the local attention, which is not called: give mask=, rotate q, k"
            raise UnsupportedError("arguments", text)
        q, k, v = (x if batch_dim_idx == 0 else x.transpose(0, 1) for x in (query, key, value))
        out = burst_attention(q, k, v, topology=self.topology, mask=self.mask, config=self.config)
        assert isinstance(out, Tensor)
        return out if batch_dim_idx == 0 else out.transpose(0, 1)


def _refuse_dropout(local_attention: Any) -> None:
    modules = local_attention.modules() if isinstance(local_attention, nn.Module) else [local_attention]
    for module in modules:
        dropout = module.p if isinstance(module, nn.Dropout) else getattr(module, "dropout_p", 0.0)
        if isinstance(dropout, int | float) and dropout:
            raise UnsupportedError("dropout", f"{type(module).__name__} has attention dropout {dropout}")
