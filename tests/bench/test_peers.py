"""Attention of other projects in the bench: torch's context_parallel, and calls of libraries by stand-ins."""

from dataclasses import replace
from itertools import product

from ranks import processes

from burst_bench import gate
from burst_bench.core import METHODS, World, of_kind
from burst_bench.methods.attention import RingCase

CASE = RingCase(seq=128, heads=8, kv_heads=4, head_dim=16, ranks=4)
ON_GPUS = [method.name for method in of_kind("attention") if method.name.startswith(("te-", "ring-flash"))]


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


def test_torchs_context_parallel_runs_on_cpus():
    for errors in processes(3, _torchs, ("causal", "full")):
        assert len(errors) == 8 and all(0 < error <= gate.BOUND for error in errors.values()), errors
    needs = METHODS["attention", "torch-ring"].needs
    assert needs(replace(CASE, mask="causal & window:8"), "cpu").startswith("a mask that is causal or full")
