"""Burst attention in ms-swift's sequence parallelism, as an external plugin (docs/frameworks/recipes.md)."""

import inspect

from swift.sequence_parallel import SequenceParallel
from swift.sequence_parallel.ulysses import DistributedAttention

from burst_mcore import BurstConfig, Mask, Topology, burst_attention

own_mesh = SequenceParallel._init_device_mesh


def mesh_without_ring(self):
    self.num_heads = self.world_size  # as if heads divided: one dim of ranks, and contiguous parts
    own_mesh(self)


def attend(self, query, key, value, attention_mask, *args, **kwargs):
    shared = self.sequence_parallel
    if shared.world_size == 1:
        return self.local_attn(query, key, value, attention_mask, *args, **kwargs)
    positions, tokens = shared.real_position_ids, query.shape[1] * shared.world_size
    if positions is None or len(positions) != 1:
        raise ValueError("give one packed row a rank: set --padding_free true, or a batch size of 1")
    causal = kwargs.get("is_causal")
    if causal is None:  # then the attention module says so, which ms-swift's closure holds
        causal = inspect.getclosurevars(self.local_attn).nonlocals["module"].is_causal
    if kwargs.get("dropout") or not causal:
        raise ValueError("attention is causal here, and has no dropout: set attention_dropout to 0")
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    ends = sorted({*starts, positions.shape[1], tokens})  # the padding is a document of its own
    window = kwargs.get("sliding_window")  # with the query's own token
    mask = Mask.causal() if window is None or window >= tokens else Mask.window(window - 1, 0)
    return burst_attention(
        query,
        key,
        value,
        topology=Topology.from_group(shared.sp_group),
        mask=mask & Mask.documents(ends),
        config=BurstConfig(layout="contiguous", head_parallel="auto"),
        softmax_scale=kwargs.get("scaling"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )


SequenceParallel._init_device_mesh = mesh_without_ring
DistributedAttention.forward = attend
