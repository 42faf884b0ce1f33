"""Attention of other projects in the bench: torch's templates, and calls of libraries by stand-ins."""

import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import processes
from torch.distributed.nn.functional import all_gather
from torch.nn.functional import scaled_dot_product_attention

from burst_bench import gate
from burst_bench.core import METHODS, World, of_kind
from burst_bench.methods.sharded import RingCase

CASE = RingCase(seq=128, heads=8, kv_heads=4, head_dim=16, ranks=4)
ON_GPUS = [
    method.name
    for method in of_kind("attention")
    if method.name.startswith(("te-", "ring-flash", "yunchang", "magi"))
]


def _dense(q, k, v, mine, causal):
    """Attention of the whole sequence on every rank, by torch; rows of this rank are `mine`."""
    order = torch.cat(all_gather(mine)).argsort()
    whole = [torch.cat(all_gather(x.contiguous()), 1)[:, order].transpose(1, 2) for x in (q, k, v)]
    out = scaled_dot_product_attention(*whole, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)[:, mine]


def _zigzag(n, rank, size):
    parts = torch.arange(n).chunk(2 * size)
    return torch.cat([parts[rank], parts[2 * size - 1 - rank]])


def _basic(n, rank, size):
    return torch.arange(n).chunk(size)[rank]


def _stripe(n, rank, size):
    return torch.arange(rank, n, size)


def _ring_flash_attn():
    def made(deal, masked=False):
        def run(
            q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
            deterministic=False, return_attn_probs=False, group=None,
        ):  # fmt: skip
            assert causal or not masked
            size = dist.get_world_size(group)
            return _dense(q, k, v, deal(q.shape[1] * size, dist.get_rank(group), size), causal)

        return run

    return {
        "ring_flash_attn": dict(
            zigzag_ring_flash_attn_func=made(_zigzag, masked=True),
            stripe_flash_attn_func=made(_stripe, masked=True),
            ring_flash_attn_func=made(_basic),
        )
    }


def _yunchang():
    degrees = SimpleNamespace()

    def set_seq_parallel_pg(sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True):
        vars(degrees).update(ulysses=sp_ulysses_degree, ring=sp_ring_degree, rank=rank)

    class LongContextAttention(torch.nn.Module):
        def __init__(
            self, scatter_idx=2, gather_idx=1, ring_impl_type="basic", use_pack_qkv=False, use_sync=False,
            attn_type=None, attn_processor=None,
        ):  # fmt: skip
            super().__init__()
            self.deal = {"basic": _basic, "zigzag": _zigzag, "strip": _stripe}[ring_impl_type]
            self.degrees = SimpleNamespace(**vars(degrees))

        def forward(
            self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
            softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, *args,
        ):  # fmt: skip
            d = self.degrees
            n = query.shape[1] * d.ring * d.ulysses
            assert query.shape[2] % d.ulysses == key.shape[2] % d.ulysses == 0
            of_group = self.deal(n, d.rank // d.ulysses, d.ring)
            return _dense(query, key, value, of_group.chunk(d.ulysses)[d.rank % d.ulysses], causal)

    return {
        "yunchang": dict(set_seq_parallel_pg=set_seq_parallel_pg, LongContextAttention=LongContextAttention)
    }


def _megatron():
    mask_types = SimpleNamespace(causal="causal", no_mask="no_mask")

    @dataclass
    class TransformerConfig:
        num_layers: int
        hidden_size: int
        num_attention_heads: int
        num_query_groups: int
        kv_channels: int
        attention_dropout: float
        context_parallel_size: int

    class TEDotProductAttention:
        cp_stream = None

        def __init__(
            self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None,
            softmax_scale=None, k_channels=None, v_channels=None, num_splits=None, cp_comm_type="p2p",
            pg_collection=None,
        ):  # fmt: skip
            self.config, self.comm, self.groups = config, cp_comm_type, pg_collection.cp
            assert cp_comm_type in ("p2p", "all_gather", "a2a", "a2a+p2p")

        def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
            within, across = map(dist.get_process_group_ranks, cp_group)
            assert len(within) * len(across) == len(cp_global_ranks)
            assert set(within) & set(across) == {dist.get_rank()}
            self.groups = cp_group

        def __call__(self, query, key, value, attention_mask, attn_mask_type):
            assert isinstance(self.groups, list) == (self.comm == "a2a+p2p")
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            size = self.config.context_parallel_size
            mine = _zigzag(q.shape[1] * size, dist.get_rank(), size)
            return _dense(q, k, v, mine, attn_mask_type == "causal").transpose(0, 1).flatten(2)

    return {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.extensions": {},
        "megatron.core.transformer": {},
        "megatron.core.extensions.transformer_engine": dict(TEDotProductAttention=TEDotProductAttention),
        "megatron.core.process_groups_config": dict(ProcessGroupCollection=SimpleNamespace),
        "megatron.core.transformer.enums": dict(AttnMaskType=mask_types),
        "megatron.core.transformer.transformer_config": dict(TransformerConfig=TransformerConfig),
    }


def _magi():
    def magi_attn_varlen_key(
        cu_seqlens_q, cu_seqlens_k, num_heads_q, num_heads_kv, head_dim, pad_size, cp_group_or_mesh,
        causal=False, window_size=(-1, -1), dist_attn_config=None, chunk_size=None,
    ):  # fmt: skip
        chunk, n = dist_attn_config.dispatch_config.chunk_size, int(cu_seqlens_q[-1])
        rank, size = dist.get_rank(cp_group_or_mesh), dist.get_world_size(cp_group_or_mesh)
        assert n % (chunk * size) == 0  # no padding
        return _stripe(n // chunk, rank, size)[:, None] * chunk + torch.arange(chunk), causal

    def get_position_ids(key):
        return key[0].flatten()

    def calc_attn(q, k, v, key, sink=None, softmax_scale=None, softcap=0.0, return_max_logits=False):
        return _dense(q[None], k[None], v[None], key[0].flatten(), key[1])[0], "meta"

    config = dict(DispatchConfig=SimpleNamespace, DistAttnConfig=SimpleNamespace)
    api = dict(
        magi_attn_varlen_key=magi_attn_varlen_key, get_position_ids=get_position_ids, calc_attn=calc_attn
    )
    return {"magi_attention": {}, "magi_attention.api": api, "magi_attention.config": config}


def _stand_in():
    for modules in (_ring_flash_attn(), _yunchang(), _megatron(), _magi()):
        for name, contents in modules.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(contents, __path__=[])
            package, _, child = name.rpartition(".")
            if package:
                setattr(sys.modules[package], child, sys.modules[name])


def _errors(rank, size, names, local):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    _stand_in()
    world, found = World(rank, size), {}
    for name in names:
        for mask in ("causal", "full"):
            case = replace(CASE, mask=mask, ranks=size)
            if mask == "full" and name.startswith(("ring-flash", "yunchang")) and "basic" not in name:
                continue
            found[name, mask] = gate.error(case, METHODS["attention", name].build(case, world), world)
    return found


def test_calls_of_libraries_give_attention_with_stand_ins_of_their_signatures():
    names = [name for name in ON_GPUS if not name.endswith("-8")]
    (errors, *_) = processes(4, _errors, names, 2)
    assert {name for name, _ in errors} == set(names) and len(names) == 17
    assert all(0 < error <= gate.BOUND for error in errors.values()), errors


def test_without_a_gpu_or_a_library_a_method_says_so():
    case = replace(CASE, dtype="bfloat16", heads=8, kv_heads=8)
    for name in ON_GPUS:
        assert METHODS["attention", name].needs(case, "cpu").startswith("a GPU for each rank"), name
    packages = {"te": "transformer-engine", "ring": "ring-flash-attn", "yunchang": "yunchang"}
    packages["magi"] = "magi-attention"
    for name in ON_GPUS:
        why = METHODS["attention", name].needs(case, "cuda")
        unless = {"te-a2a+p2p": "several nodes of several ranks"}
        assert why == unless.get(name, f"the package {packages[name.split('-')[0]]}"), name


def _templates(rank, size, masks):
    world, found = World(rank, size), {}
    for name in ("torch-ring", "torch-gather"):
        for mask in masks:
            case = replace(CASE, seq=96, mask=mask, ranks=size, kv_heads=CASE.heads)
            found[name, mask] = gate.error(case, METHODS["attention", name].build(case, world), world)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_torchs_templates_run_on_cpus(size):
    for errors in processes(size, _templates, ("causal", "full")):
        assert len(errors) == 4 and all(0 < error <= gate.BOUND for error in errors.values()), errors
    needs = METHODS["attention", "torch-ring"].needs
    assert needs(CASE, "cpu") == "as many K/V heads as heads, got 4 and 8"
    assert needs(replace(CASE, kv_heads=8, mask="causal & window:8"), "cpu").startswith("a mask that is")
