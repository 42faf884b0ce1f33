"""Attention of other projects in the bench: torch's context_parallel, and calls of libraries by stand-ins."""

import sys
from dataclasses import dataclass, replace
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import processes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import scaled_dot_product_attention

from burst_bench import gate
from burst_bench.core import METHODS, World, of_kind
from burst_bench.methods import peers
from burst_bench.methods.attention import RingCase

CASE = RingCase(seq=128, heads=8, kv_heads=4, head_dim=16, ranks=4)
ON_GPUS = [method.name for method in of_kind("attention") if method.name.startswith(("te-", "ring-flash"))]


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
    def made(shard, masked=False):
        def run(
            q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
            deterministic=False, return_attn_probs=False, group=None,
        ):  # fmt: skip
            assert causal or not masked
            size = dist.get_world_size(group)
            return _dense(q, k, v, shard(q.shape[1] * size, dist.get_rank(group), size), causal)

        return run

    return {
        "ring_flash_attn": dict(
            zigzag_ring_flash_attn_func=made(_zigzag, masked=True),
            stripe_flash_attn_func=made(_stripe, masked=True),
            ring_flash_attn_func=made(_basic),
        )
    }


def _megatron():
    state = {}
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
            assert cp_comm_type in ("p2p", "all_gather", "a2a", "a2a+p2p") and pg_collection is None
            assert state == {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": [2, 2]}
            self.size = config.context_parallel_size

        def __call__(self, query, key, value, attention_mask, attn_mask_type):
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            size = self.size
            mine = _zigzag(q.shape[1] * size, dist.get_rank(), size)
            return _dense(q, k, v, mine, attn_mask_type == "causal").transpose(0, 1).flatten(2)

    return {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.extensions": {},
        "megatron.core.transformer": {},
        "megatron.core.extensions.transformer_engine": dict(TEDotProductAttention=TEDotProductAttention),
        "megatron.core.parallel_state": dict(
            model_parallel_is_initialized=lambda: bool(state),
            initialize_model_parallel=lambda **sizes: state.update(sizes),
        ),
        "megatron.core.transformer.enums": dict(AttnMaskType=mask_types),
        "megatron.core.transformer.transformer_config": dict(TransformerConfig=TransformerConfig),
    }


def _stand_in():
    for modules in (_ring_flash_attn(), _megatron()):
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
            if mask == "full" and name.startswith("ring-flash") and "basic" not in name:
                continue
            found[name, mask] = gate.error(case, METHODS["attention", name].build(case, world), world)
    return found


def test_calls_of_libraries_give_attention_with_stand_ins_of_their_signatures():
    (errors, *_) = processes(4, _errors, ON_GPUS, 2)
    assert {name for name, _ in errors} == set(ON_GPUS) and len(ON_GPUS) == 7
    assert all(0 < error <= gate.BOUND for error in errors.values()), errors


def test_without_a_gpu_or_a_library_a_method_says_so():
    case = replace(CASE, dtype="bfloat16", heads=8, kv_heads=8)
    for name in ON_GPUS:
        assert METHODS["attention", name].needs(case, "cpu").startswith("a GPU for each rank"), name
    packages = {"te": "transformer-engine", "ring": "ring-flash-attn"}
    for name in ON_GPUS:
        why = METHODS["attention", name].needs(case, "cuda")
        unless = {"te-a2a+p2p": "several nodes of several ranks"}
        assert why == unless.get(name, f"the package {packages[name.split('-')[0]]}"), name


def _torchs(rank, size, masks):
    world, found = World(rank, size), {}
    for mask, kv_heads in product(masks, (8, 4)):
        case = replace(CASE, seq=96, mask=mask, ranks=size, kv_heads=kv_heads)
        built = {
            name: METHODS["attention", name].build(case, world) for name in ("torch-ring", "torch-gather")
        }
        for name in built:
            found[name, mask, kv_heads] = gate.error(case, built[name], world)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_torchs_context_parallel_runs_on_cpus(size):
    for errors in processes(size, _torchs, ("causal", "full")):
        assert len(errors) == 8 and all(0 < error <= gate.BOUND for error in errors.values()), errors
    needs = METHODS["attention", "torch-ring"].needs
    assert needs(replace(CASE, mask="causal & window:8"), "cpu").startswith("a mask that is causal or full")


def _alone(rank, size):
    """What torch says where its table has only its own operators."""
    table = peers.templates().custom_ops
    for operator in (peers.FORWARD, peers.BACKWARD):
        table.pop(operator)
    q = torch.randn(1, 2, 4 * size, 8)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    with (
        context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]),
        pytest.raises(NotImplementedError) as error,
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    return str(error.value)


def test_torch_alone_has_no_context_parallel_on_cpus():
    """As docs/evidence/benchmark.md says; a torch that has it needs no entries of ours."""
    for said in processes(2, _alone):
        assert "flash_attention_for_cpu.default does not have a sharding strategy registered" in said
