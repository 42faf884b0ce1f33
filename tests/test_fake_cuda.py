"""The control flow on CUDA, run on devices that are not there: every route, and faults that must be found."""

import functools
import gc
import importlib.util
import itertools
import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")  # its kernels' arguments are what the stand-ins are given

from fake_cuda import cases, ranks
from fake_cuda.clocks import CHECKER
from fake_cuda.faults import FAULTS
from fake_cuda.planting import planted

from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment

DOUBLE = {"intra": 2, "ring": "double"}
CASES = {
    "ring": (cases.attention, 3, {"backward": "query"}),
    "ring, keys": (cases.attention, 3, {"backward": "kv"}),
    "ring of few rows": (cases.attention, 3, {"mask": "window", "ring": "flat", "backward": "query"}),
    "stock kernel": (cases.attention, 3, {"kernel": "aten-flash"}),
    "stock kernel, keys": (cases.attention, 2, {"kernel": "cudnn", "backward": "kv"}),
    "lse": (cases.attention, 2, {"kernel": "flash4", "lse": True}),
    "no overlap": (cases.attention, 2, {"overlap": False}),
    "documents": (cases.attention, 2, {"kernel": "flash2", "mask": "documents"}),
    "documents by cuDNN": (cases.attention, 2, {"kernel": "te", "mask": "documents"}),
    "blocks": (cases.attention, 2, {"mask": "documents", "layout": "striped"}),
    "dilated": (cases.attention, 2, {"mask": "dilated"}),
    "direct": (cases.attention, 3, {"ring": "direct", "kernel": "flash3"}),
    "double ring": (cases.attention, 4, DOUBLE),
    "double ring, keys": (cases.attention, 4, {**DOUBLE, "backward": "kv"}),
    "heads": (cases.attention, 4, {"head_parallel": 4, "backward": "kv"}),
    "heads and ring": (cases.attention, 4, {"head_parallel": 2}),
    "mesh": (cases.attention, 4, {"mesh": "2x2"}),
    "mesh, keys": (cases.attention, 4, {"mesh": "2x2", "backward": "kv", "kernel": "aten-flash"}),
    "mesh of three": (cases.attention, 3, {"mesh": "3x1"}),
    "latent": (cases.attention, 2, {"latent": "on"}),
    "part of the world": (cases.attention, 2, {"world": 3, "bound": True}),
    "recompute": (cases.recompute, 2, {"policy": Full, "again": True}),
    "keep": (cases.recompute, 2, {"policy": KeepAttention, "again": False}),
    "segment": (cases.recompute, 2, {"policy": lambda: Segment(0.5), "again": True}),
    "offload": (cases.recompute, 2, {"policy": lambda: Offload(KeepAttention()), "again": False}),
    "offload of a part": (cases.recompute, 2, {"policy": lambda: Offload(Segment(0.5)), "again": True}),
    "loss": (cases.loss, 1, {"waits": 1}),
    "loss, tp": (cases.loss, 2, {"tp": True, "waits": 6}),
    "loss, sequence parallel": (cases.loss, 2, {"tp": True, "sequence_parallel": True, "waits": 6}),
    "loss, cp": (cases.loss, 2, {"cp": True, "waits": 3}),
    "loss of tokens": (cases.loss, 2, {"tp": True, "reduction": "none", "waits": 9}),
}
"""By name: a function, ranks, and what the ranks do."""


@pytest.fixture(autouse=True, scope="module")
def _no_device():
    """The device instead of none, for this file alone: nobody else may find its kernels, rates or streams."""
    with pytest.MonkeyPatch.context() as patch:
        _forget()
        ranks.install(patch)
        yield
    _forget()


def _forget():
    for each in _caches(sum(name.startswith("burst_mcore") for name in sys.modules)):
        each.cache_clear()


@functools.lru_cache
def _caches(modules):
    """The caches of the package, which has so many modules now; to look for them takes a while."""
    caches = [x for x in gc.get_objects() if type(x) is functools._lru_cache_wrapper]
    return [each for each in caches if str(each.__module__).startswith("burst_mcore")]


def _run(name):
    function, size, options = CASES[name]
    return function(size, **options)


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_found(name):
    assert not _run(name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault):
    _forget()  # what plans keep was made without it
    with planted(fault.file, fault.old, fault.new):
        found = _run(fault.case)
    kinds = {text.split(":")[0] for text in found}
    assert kinds & fault.kinds, found


ROUTES = (
    (2, {}),
    (3, {"ring": "direct"}),
    (4, {}),
    (4, DOUBLE),
    (4, {"intra": 2, "ring": "flat"}),
    (4, {"intra": 2, "ring": "direct"}),
    (4, {"head_parallel": 2}),
    (4, {"head_parallel": 2, "intra": 2, "head_placement": "outer"}),
    (4, {"head_parallel": 4}),
    (4, {"mesh": "2x2"}),
    (4, {"mesh": "2x2", "intra": 2}),
    (4, {"mesh": "2x1", "head_parallel": 2}),
)
KERNELS = "triton", "aten-flash", "cudnn", "flash2", "flash3", "flash4", "te"
GRID = [*itertools.product(ROUTES, KERNELS, cases.MASKS, ("zigzag", "striped"), ("query", "kv"))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_found_on_any_route_with_any_kernel_mask_and_layout(seed):
    for (size, route), kernel, mask, layout, direction in random.Random(seed).sample(GRID, 20):
        if kernel == "cudnn" and mask == "documents":
            continue  # it does not take them
        more = {"backward": direction, "layout": layout, **route}
        assert not cases.attention(size, kernel, mask, **more), (size, kernel, mask, more)


def _of_gpus(name):
    """A file of the tests that need a GPU: what they do runs here, with fewer tokens."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("gpu") / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", ["device", "host"])
def test_the_streams_of_virtual_ranks_as_tests_on_gpus_run_them(source, monkeypatch):
    module = _of_gpus("test_rings_on_gpu")
    few = module._shard(32, 2)
    monkeypatch.setattr(module, "_shard", lambda tokens, heads: few)
    ranks.run(1, lambda rank: module.test_a_virtual_rank_gives_the_same_every_time(source))
    assert not CHECKER.findings


@pytest.mark.parametrize("policy", ["keep", "segment, offloaded"])
def test_recompute_as_tests_on_gpus_run_it(policy):
    module = _of_gpus("test_recompute_on_gpu")
    module.N, module.HEADS, module.DIM = 64, 2, 16
    ranks.run(1, lambda rank: module.test_gradients_are_those_without(policy))
    assert not CHECKER.findings


@pytest.mark.parametrize("name", ["plain", "all", "sum", "none"])
def test_the_loss_as_tests_on_gpus_run_it(name):
    module = _of_gpus("test_loss_on_gpu")
    module._draw = functools.partial(module._draw, tokens=60, d=16, v=53)
    ranks.run(1, lambda rank: module.test_against_float64(torch.bfloat16, name, "any"))
    assert not CHECKER.findings


def test_memory_that_policies_keep_as_tests_on_gpus_count_it():
    module = _of_gpus("test_recompute_on_gpu")
    module.N, module.HEADS, module.DIM = 64, 2, 16
    ranks.run(1, lambda rank: module.test_memory_kept())
    assert not CHECKER.findings


@pytest.mark.parametrize(("kernel", "made"), [("aten-flash", "zeros"), ("te", "arange"), ("te", "zeros")])
def test_lengths_and_seeds_are_made_once_not_for_every_tile(kernel, made):
    assert not cases.attention(2, kernel)
    assert cases.FORWARD[0][0][made] == cases.BACKWARD[0][0][made] == 0


def test_rows_that_are_sent_are_not_copied_where_they_are_neighbours():
    assert not cases.attention(3, "flash3", "window", ring="direct", backward="kv")
    launches, _ = cases.FORWARD[1]
    assert launches["messages"] == 2 and launches["copy_"] == launches["clone"] == 0


PASSES = {
    "ring": ({"backward": "query", "kv_heads": 4}, (10, 11.5), (22, 15.14)),
    "ring, keys": ({"backward": "kv"}, (10, 9.5), (23, 12.27)),
    "own kernel, keys": ({"kernel": "triton", "backward": "kv"}, (9, 6.62), (30, 6.63)),
    "double ring": ({**DOUBLE, "backward": "query", "kv_heads": 4}, (10, 12.5), (26, 19.27)),
    "direct, keys": ({"ring": "direct", "backward": "kv"}, (10, 9.5), (33, 14.27)),
    "heads": ({"head_parallel": 4}, (76, 14.39), (78, 30.7)),
    "mesh": ({"mesh": "2x2"}, (11, 11.06), (25, 19.95)),
}
"""By route of 4 ranks and 4 heads: most launches, and most memory over Q's, in forward and backward."""


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_takes_no_more_launches_and_memory_than_it_did(name):
    options, *most = PASSES[name]
    assert not cases.attention(4, **{"kernel": "flash3", **options})
    size = cases.TOKENS * 4 * 16 * (4 if options.get("kernel") == "triton" else 2)
    for pass_, (launches, of_q) in zip((cases.FORWARD, cases.BACKWARD), most, strict=True):
        taken, peak = pass_[1]
        assert taken.total() <= launches and peak / size <= of_q + 0.01, (taken, peak / size)
