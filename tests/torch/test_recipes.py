"""Recipes of stacks whose attention takes one packed row, held to dense attention and to one process."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import recipes
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from causal_lms import VOCABULARY, model_of
from ranks import on_ranks, processes
from torch.distributed.device_mesh import init_device_mesh

from burst_mcore import shard

ENDS = torch.tensor([0, 10, 24])
SCALE = 0.3
RUN = {
    "substitute_hf_flash_attn": "test_compat",
    "def flash_attention_forward": "test_compat",
    "import monkey_patch": "test_compat",
    "flash_attention._flash_attention_forward = ": "test_compat",
    "def packed_attention": "test_recipes",
    "class BurstVarlenInnerAttention": "test_recipes",
    "class BurstVarlenAttention": "test_recipes",
    "import magi": "test_recipes",
    "def burst_glm_spec": "test_core_attention",
    "own_mesh = SequenceParallel": "test_recipes",
    "class SequenceGRPOTrainer": "test_accelerate",
}
"""Words of a block, and the file of tests that runs it."""
FLAGS = "--context-parallel-size 8 --spec"
"""The block that is no Python: arguments of slime's train.py, which needs Ray."""


def test_every_block_is_run():
    for block in recipes.FENCED:
        assert sum(words in block for words in (*RUN, FLAGS)) == 1, block


def _attends(attend, part, whole, allowed, real=slice(None)):
    """Hold attend(q, k, v) of parts of [..., tokens, heads, dim] to dense attention, gradients too.

    real: tokens of this part that are no padding.
    """
    q, k, v = (x.transpose(-3, -2) for x in whole)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True, scale=SCALE)
    want = want.transpose(-3, -2)
    upstream = torch.randn_like(want)
    want.backward(upstream)
    mine = [part(x.detach()).requires_grad_() for x in whole]
    out = attend(*mine)
    torch.testing.assert_close(out[..., real, :, :], part(want)[..., real, :, :], rtol=1e-12, atol=1e-12)
    out.backward(part(upstream))
    for x, theirs in zip(mine, whole, strict=True):
        torch.testing.assert_close(x.grad, part(theirs.grad), rtol=1e-12, atol=1e-12)
    return mine


def _attends_in_documents(rank, size, attend):
    """The same of zigzag shards of two documents."""
    torch.manual_seed(0)
    whole = [torch.randn(24, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    document = torch.bucketize(torch.arange(24), ENDS, right=True)
    allowed = (document[:, None] == document) & torch.ones(24, 24, dtype=torch.bool).tril()
    _attends(attend, lambda x: shard(x, 0, rank=rank, size=size, layout="zigzag"), whole, allowed)


class _Config:
    """Stands for a class of torchtitan's with a configuration."""

    class Config:
        __slots__ = ()


class _Ulysses(_Config):
    class Config(_Config.Config):
        __slots__ = ()


@on_ranks(2)
def test_classes_of_torchtitan(rank, size):
    from dataclasses import dataclass

    packed = recipes.run("def packed_attention")["packed_attention"]
    applied, group = [], dist.group.WORLD
    config = SimpleNamespace(parallelism=SimpleNamespace())
    recipes.run(
        "class BurstVarlenInnerAttention",
        packed_attention=packed, config=config, dataclass=dataclass, UlyssesAttention=_Ulysses,
        VarlenInnerAttention=_Config, MeshAxisName=SimpleNamespace(CP="cp"),
        spmd_mesh_group={"cp": group}.get, ContextParallelTransform=SimpleNamespace,
        apply_transforms=lambda of, transforms: applied.append((of, transforms)),
    )  # fmt: skip
    ((of, (transform,)),) = applied
    assert of is config and config.parallelism.context_parallel_load_balancer == "headtail"
    ends = SimpleNamespace(cu_seq_q=ENDS)
    inner = transform.inner_attention()
    _attends_in_documents(rank, size, lambda *qkv: inner.forward(*qkv, attention_metadata=ends, scale=SCALE))

    layer = SimpleNamespace(attention=SimpleNamespace())
    before = recipes.run(
        "class BurstVarlenAttention",
        packed_attention=packed, layer=layer, dataclass=dataclass, VarlenAttention=_Config,
        mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)),
    )["BurstVarlenAttention"]  # fmt: skip
    assert type(layer.attention.inner_attention) is before.Config
    _attends_in_documents(rank, size, lambda *qkv: before().forward(*qkv, attention_masks=ends, scale=SCALE))


def _magi(group):
    """Automodel's module, as far as the block asks it."""
    active = {}

    def ranges(lengths):
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return SimpleNamespace(q_ranges=[[a, b] for a, b in pairwise(ends)])

    def hand(model, to):
        for module in model.modules():
            if "Attention" in type(module).__name__:
                module.cp_group = to

    return recipes.stand_in(
        "nemo_automodel.components.distributed.context_parallel.magi",
        AttnMaskSpec=SimpleNamespace(varlen=ranges),
        set_active_attn_spec=lambda spec: active.update(spec=spec),
        get_active_attn_spec=lambda: active["spec"],
        get_active_cp_group=lambda: group,
        _packed_cp_doc_seqlens=lambda batch, tokens: batch["cu_seqlens"].diff().tolist(),
        _set_cp_group_on_attention=hand,
    )


@on_ranks(2)
def test_the_module_of_automodel(rank, size):
    group = dist.group.WORLD
    magi = _magi(group)
    packed = recipes.run("def packed_attention")
    recipes.run("import magi", packed_attention=packed["packed_attention"], shard=shard)
    assert magi.is_magi_available()
    places = {"rank": rank, "size": size, "layout": "zigzag"}

    ids = torch.randint(3, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(4))
    row, _ = magi.magi_prepare_packed_cp(None, {"input_ids": ids, "labels": ids, "cu_seqlens": ENDS}, group)
    assert row["qkv_format"] == "thd" and row["input_ids"].equal(shard(ids[0], 0, **places))
    own = magi.make_magi_attn_func(SCALE)
    _attends_in_documents(rank, size, lambda *qkv: own(*qkv, window_size=(-1, 0)))
    with pytest.raises(ValueError, match="windows"):
        own(*(torch.ones(12, 2, 8) for _ in "qkv"), window_size=(4, 0))

    alone, model, ids = model_of(), model_of(), ids[:, :13]  # of another length than the layout's
    want = alone(input_ids=ids, use_cache=False).logits
    magi.register_magi_attention()
    model.set_attn_implementation("magi")
    part, _ = magi.magi_prepare_batch(model, {"input_ids": ids, "labels": ids}, group)
    at = part["position_ids"]
    logits = model(input_ids=part["input_ids"], position_ids=at, use_cache=False).logits
    torch.testing.assert_close(logits[at < 13], want[0, at[at < 13]], rtol=1e-5, atol=1e-5)


class _SequenceParallel:
    """Stands for ms-swift's: as many ranks as divide the heads have parts, the others would have a ring."""

    def __init__(self, size, heads):
        self.world_size, self.num_heads, self.sp_group = size, heads, dist.group.WORLD

    def _init_device_mesh(self):
        self.sp_world_size = math.gcd(self.num_heads, self.world_size)

    def part(self, x, rank):
        """This rank's tokens of [1, tokens, ...], padded as ms-swift pads."""
        assert self.sp_world_size == self.world_size  # no ring
        more = -x.shape[1] % self.world_size
        return F.pad(x, (0, 0) * (x.dim() - 2) + (0, more)).chunk(self.world_size, 1)[rank]


def _swift(rank, size, lengths, window):
    package = recipes.stand_in("swift.sequence_parallel", SequenceParallel=_SequenceParallel)
    theirs = recipes.stand_in("swift.sequence_parallel.ulysses", DistributedAttention=torch.nn.Module)
    assert package.ulysses is theirs
    theirs.DistributedAttention = type("DistributedAttention", (), {})
    recipes.run("own_mesh = SequenceParallel")
    shared = _SequenceParallel(size, heads=1)
    shared._init_device_mesh()
    module = SimpleNamespace(is_causal=True)
    layer = theirs.DistributedAttention()
    layer.sequence_parallel, layer.local_attn = shared, lambda *_: module

    torch.manual_seed(0)
    tokens = sum(lengths)
    whole = [
        torch.randn(1, tokens, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (3, 1, 1)
    ]
    shared.real_position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    document = (shared.real_position_ids[0] == 0).cumsum(0)
    allowed = (document[:, None] == document) & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if window:
        allowed = allowed.triu(1 - window)
    real = shared.part(torch.ones(1, tokens, dtype=torch.bool), rank)[0]

    def attend(*qkv):
        return layer.forward(*qkv, None, scaling=SCALE, sliding_window=window, dropout=0.0)

    mine = _attends(attend, lambda x: shared.part(x, rank), whole, allowed, real)
    with pytest.raises(ValueError, match="attention is causal here"):
        layer.forward(*mine, None, dropout=0.1)
    for named, own in ({"is_causal": False}, True), ({"is_causal": None}, False), ({}, False):
        module.is_causal = own
        with pytest.raises(ValueError, match="attention is causal here"):
            layer.forward(*mine, None, **named)
    for positions in (None, shared.real_position_ids.repeat(2, 1)):
        shared.real_position_ids = positions
        with pytest.raises(ValueError, match="give one packed row a rank"):
            layer.forward(*mine, None)
    shared.world_size = 1
    assert layer.forward(*mine, None) is module  # sequence parallelism is off


@pytest.mark.parametrize(
    ("size", "lengths", "window"), [(2, [37], None), (3, [11, 1, 1, 30], None), (2, [9, 14], 4)]
)
def test_the_module_of_ms_swift(size, lengths, window):
    processes(size, _swift, lengths, window)
