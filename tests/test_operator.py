"""burst_attention as an operator: opcheck, compiled whole, and what it keeps alive."""

import gc
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd  # both here once, for all that is forked
import torch.distributed as dist
from dense import dense, error, problem
from ranks import processes

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention import request as request_module
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.operator import CallRecord, ForwardArgs, ForwardResults, attention_forward
from burst_mcore.attention.prepare import call_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import shard
from burst_mcore.mask import mask as mask_module
from burst_mcore.registry import Registered, lookup, register

PACKAGE = Path(request_module.__file__).parents[1]


def _functions_of_a_warm_forward(rank, size):
    """Return the (file, function) pairs of this package that the third forward of a ring runs."""
    topology, mask, config = Topology.from_group(dist.group.WORLD), Mask.causal(), BurstConfig()
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    functions = set()

    def note(frame, event, arg):
        if event == "call" and str(PACKAGE) in frame.f_code.co_filename:
            functions.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    for profile in (None, None, note):
        sys.setprofile(profile)
        burst_attention(q, k, v, topology=topology, mask=mask, config=config)
    sys.setprofile(None)
    return functions


def test_a_warm_forward_runs_few_functions_of_few_files():
    for functions in processes(2, _functions_of_a_warm_forward):
        files = {file for file, _ in functions}
        assert 15 < len(files) <= 22 and 60 < len(functions) <= 120, sorted(functions)


def _checked(rank, size, options, sunk):
    # opcheck compares runs, which torch's switch that poisons memory would make it refuse to
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (x.requires_grad_() for x in problem(0, 16, kv_heads=2, dtype=torch.float32)[:3])
    topology, mask, config = Topology.single(), Mask.causal(), BurstConfig()
    sinks = torch.randn(4, requires_grad=True) if sunk else None
    softmax_scale, softcap, return_lse = options
    for keep in (0.0, 0.5, 1.0):
        args = ForwardArgs(
            q=q,
            k=k,
            v=v,
            sinks=sinks,
            topology=topology.handle,
            mask=mask.handle,
            config=config.handle,
            softmax_scale=softmax_scale,
            softcap=softcap,
            return_lse=return_lse,
            needs_gradient=True,
            keep=keep,
            at_most=False,
            tail=[],
            cut=0,
        )
        torch.library.opcheck(attention_forward, args)
        results = ForwardResults(*attention_forward(*args))
        if results.tail:  # the recomputation
            tail, cut = [x.detach() for x in results.tail], CallRecord.unpack(results.record).cut
            torch.library.opcheck(attention_forward, args._replace(keep=0.0, tail=tail, cut=cut))
    return True


@pytest.mark.parametrize("options", [(None, None, False), (0.3, 2.0, True)], ids=["plain", "all"])
@pytest.mark.parametrize("sunk", [False, True])
def test_opcheck_is_clean(options, sunk):
    assert all(processes(1, _checked, options, sunk))


class Layer(torch.nn.Module):
    """As a model has it: projections around the ring."""

    def __init__(self, topology, config=None):
        super().__init__()
        self.topology, self.mask = topology, Mask.causal() & Mask.window(20, 0)
        self.config = config or BurstConfig()
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        attended = burst_attention(q, k, v, topology=self.topology, mask=self.mask, config=self.config)
        return x + self.out(attended.flatten(2))


def _compiled(rank, size, config):
    torch.manual_seed(0)
    topology = Topology.from_group(torch.distributed.group.WORLD) if size > 1 else Topology.single()
    layer, x = Layer(topology, config), torch.randn(2, 32 * size, 32)
    x = shard(x, 1, rank=rank, size=size, layout="zigzag")
    got = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad()
        mine = x.clone().requires_grad_()
        out = run(mine)
        out.square().sum().backward()
        got.append([out, mine.grad, *(p.grad.clone() for p in layer.parameters())])
    for eager, compiled in zip(*got, strict=True):
        torch.testing.assert_close(compiled, eager)
    return True


@pytest.mark.parametrize(("size", "degree"), [(1, 1), (2, 1), (2, 2)])
def test_a_layer_compiles_into_one_graph(size, degree):
    assert all(processes(size, _compiled, BurstConfig(head_parallel=degree)))


def test_gradients_outlive_the_mask():
    p = problem(1, 16)
    q, k, v = (x.requires_grad_() for x in p[:3])
    mask = Mask.causal() & Mask.documents([0, 5, 16])
    want = dense(p, mask)
    out = burst_attention(q, k, v, topology=Topology.single(), mask=mask)
    del mask
    for cache in (
        plan_for,
        call_of,
        request_module._request,
        request_module.choose_route,
        mask_module._bands,
    ):  # they hold masks as well
        cache.cache_clear()
    gc.collect()
    out.backward(p.dout)
    assert error(q.grad, want.dq) < 1e-12


class Thing(Registered):
    def __init__(self):
        register(self, "a thing")


def test_what_is_gone_is_said_to_be():
    thing = Thing()
    assert lookup("a thing") is thing
    del thing
    gc.collect()
    with pytest.raises(RuntimeError, match="keep the topology, the mask and the config"):
        lookup("a thing")


def test_what_was_unpickled_can_be_found():
    mask = Mask.window(77, 0)
    words, handle = pickle.dumps(mask), mask.handle
    del mask
    gc.collect()
    again = pickle.loads(words)
    assert lookup(handle) is again


def test_equal_values_keep_each_other_findable():
    first, second = Mask.window(123, 0), Mask.window(123, 0)
    handle = first.handle
    assert second.handle == handle
    del first
    gc.collect()
    assert lookup(handle) == second
