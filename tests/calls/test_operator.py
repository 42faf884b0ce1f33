"""burst_attention as an operator: opcheck, compiled whole, and what it keeps alive."""

import gc
import pickle
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import limits
import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd  # both here once, for all that is forked
import torch.distributed as dist
from cells import crossed
from dense import dense, error, problem
from ranks import processes
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention import request as request_module
from burst_mcore.attention.autotune import question
from burst_mcore.attention.geometry.plan import plan_of
from burst_mcore.attention.operator.ops import attention_backward, attention_forward
from burst_mcore.attention.operator.schema import BackwardArgs, ForwardArgs, ForwardResults, Saved
from burst_mcore.attention.prepare import call_of
from burst_mcore.attention.request import Options
from burst_mcore.attention.runtime import record as records
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.capture import refuse_capture
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
        assert 15 < len(files) <= 22 and 60 < len(functions) <= 110, sorted(functions)


def _args(q, k, v, topology, mask, config, options=(), **changes):
    handle = Options.of(topology, mask, config, *options).handle
    return ForwardArgs(q, k, v, None, handle, needs_gradient=True)._replace(**changes)


def _checked(rank, size, options, sunk):
    # opcheck compares runs, which torch's switch that poisons memory would make it refuse to
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (x.requires_grad_() for x in problem(0, 16, kv_heads=2, dtype=torch.float32)[:3])
    topology, mask, config = Topology.single(), Mask.causal(), BurstConfig()
    sinks = torch.randn(4, requires_grad=True) if sunk else None
    for keep in (0.0, 0.5, 1.0):
        args = _args(q, k, v, topology, mask, config, options, sinks=sinks, keep=keep)
        torch.library.opcheck(attention_forward, args)
        results = ForwardResults(*attention_forward(*args))
        if results.tail:  # the recomputation
            tail, cut = [x.detach() for x in results.tail], records.unpack(results.record).cut
            torch.library.opcheck(attention_forward, args._replace(keep=0.0, tail=tail, cut=cut))
    return True


def test_what_a_call_is_asked_for_is_one_argument_of_its_operators():
    assert len(ForwardArgs._fields) <= 11 and len(BackwardArgs._fields) <= 14


def test_arguments_are_validated_once(monkeypatch):
    validated, check = [], request_module.check_tensors
    monkeypatch.setattr(
        request_module, "check_tensors", lambda *args, **kw: validated.append(args) or check(*args, **kw)
    )
    q, k, v = (x.requires_grad_() for x in problem(0, 16, dtype=torch.float32)[:3])
    topology, mask = Topology.single(), Mask.causal()
    burst_attention(q, k, v, topology=topology, mask=mask).sum().backward()
    assert len(validated) == 1
    attention_forward(*_args(q, k, v, topology, mask, BurstConfig()))
    assert len(validated) == 2
    with pytest.raises(ValueError, match="k and v must have the same number of heads"):
        attention_forward(*_args(q, k, v[:, :, :1], topology, mask, BurstConfig()))
    for illegal, words in (((-1.0,), "softmax_scale must be positive"), ((None, -1.0), "softcap must be")):
        args = _args(q, k, v, topology, mask, BurstConfig())
        handles = topology.handle, mask.handle, BurstConfig().handle
        handle = request_module.handle_of(handles, *(*illegal, None)[:2], False, False, "off")
        with pytest.raises(ValueError, match=words):
            attention_forward(*args._replace(options=handle))


class Watch(TorchDispatchMode):
    """Notes the operators of this package, as a policy of selective checkpointing sees them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [func.name()] * (func.namespace == "burst_mcore")
        return func(*args, **(kwargs or {}))


def test_operators_are_there_for_whoever_watches_and_cost_others_nothing():
    p, runs = problem(0, 16, kv_heads=2, dtype=torch.float32), []
    for watch in (nullcontext(), Watch()):
        leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
        with watch:
            out = burst_attention(*leaves, topology=Topology.single(), mask=Mask.causal())
            out.backward(p.dout)
        runs.append((out.grad_fn.name(), [out, *(x.grad for x in leaves)]))
    (plain, numbers), (watched, same) = runs
    assert watch.seen == ["burst_mcore::attention_forward", "burst_mcore::attention_backward"]
    assert plain == "BurstAttentionBackward" and "burst_mcore_attention_forward" in watched
    assert all(map(torch.equal, numbers, same))


@pytest.mark.parametrize(
    ("sunk", "options"),
    crossed(
        (False, True),
        ((None, None, False), (0.3, 2.0, True)),
        quick=lambda sunk, options: sunk != options[2],
    ),
    ids=str,
)
def test_opcheck_is_clean(sunk, options):
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


@pytest.mark.parametrize(
    ("size", "way"),
    [(1, {}), (2, {}), (2, {"head_parallel": 2}), pytest.param(4, {"mesh": (2, 2)}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_layer_compiles_into_one_graph(size, way):
    assert all(processes(size, _compiled, BurstConfig(**way)))


@pytest.mark.parametrize(
    "options",
    [{}, {"return_lse": True, "return_max_logit": True}, {"softmax_scale": 0.5, "sinks": True}],
    ids=lambda x: ",".join(x) or "none",
)
def test_a_call_without_a_config_compiles_into_one_graph(options):
    topology, mask = Topology.single(), Mask.causal()
    p = problem(0, 16, dtype=torch.float32)
    options = options | ({"sinks": torch.ones(p.q.shape[2])} if "sinks" in options else {})

    def attend(q, k, v):
        return burst_attention(q, k, v, topology=topology, mask=mask, **options)

    got, want = torch.compile(attend, fullgraph=True, backend="aot_eager")(*p[:3]), attend(*p[:3])
    for x, y in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert torch.equal(x, y)


def _compiled_with_largest_logits(rank, size, way):
    topology = Topology.from_group(dist.group.WORLD) if size > 1 else Topology.single()
    options, got = {"topology": topology, "mask": Mask.causal(), "config": BurstConfig(**way)}, []

    def attend(q, k, v):
        return burst_attention(q, k, v, **options, return_max_logit=True)

    p = problem(0, 16 * size, dtype=torch.float32)
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        mine = [shard(x, 1, rank=rank, size=size, layout="zigzag").requires_grad_() for x in p]
        out, largest = run(*mine[:3])
        assert not largest.requires_grad
        out.backward(mine[3])
        got.append([out, largest, *(x.grad for x in mine[:3])])
    return all(map(torch.equal, *got))


@pytest.mark.parametrize(("size", "way"), [(1, {}), (2, {}), (2, {"head_parallel": 2})], ids=str)
def test_attention_and_its_largest_logits_compile_into_one_graph(size, way):
    assert all(processes(size, _compiled_with_largest_logits, way))


@pytest.mark.usefixtures("few_objects")
def test_compiled_calls_take_other_numbers_and_outlive_what_is_cached():
    topology, mask, p = Topology.single(), Mask.causal(), problem(0, 16, dtype=torch.float32)

    def attend(q, softmax_scale, softcap):
        options = {"softmax_scale": softmax_scale, "softcap": softcap}
        return burst_attention(q, p.k, p.v, topology=topology, mask=mask, **options)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for numbers in ((0.3, None), (0.4, 0), (0.5, 2.0), (None, 3.0), (1, 0.7), (0.3, None)):
        assert torch.equal(run(p.q, *numbers), attend(p.q, *numbers)), numbers
        request_module.options_of.cache_clear()
        gc.collect()


def _a_trace_fails(rank, size):
    """Compiled with heads shared, rank 0 of an uneven sequence cannot be traced; the ring goes on."""
    group = dist.new_group(timeout=limits.OF_A_GROUP)
    topology, mask = Topology.from_group(group, intra_size=size), Mask.causal()
    config = BurstConfig(head_parallel=2)

    def attend(x):
        return burst_attention(x, x, x, topology=topology, mask=mask, config=config)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    start = time.monotonic()
    with pytest.raises(Exception, match="takes for granted that every rank holds 57 tokens") as caught:
        compiled(torch.ones(1, 57 + rank, 2, 8))
    seconds = time.monotonic() - start
    torch.testing.assert_close(compiled(torch.ones(1, 64, 2, 8)), attend(torch.ones(1, 64, 2, 8)))
    return str(caught.value), seconds


def test_a_rank_whose_trace_fails_tells_the_others():
    (_, _), (told, seconds) = processes(2, _a_trace_fails)
    assert "rank 0 of the ring refused this call: ValueError" in told
    assert seconds < limits.AT_ONCE, "an error that came by the limit of the group"


def _devices_of_results(rank, size):
    """The devices of all that the operators return and save, of tensors on CUDA without data."""
    values = Topology.single(), Mask.causal(), BurstConfig()
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        args = _args(q, k, v, *values, (None, None, True), sinks=torch.empty(4, device="cuda"))
        results = ForwardResults(*attention_forward(*args))
        saved = Saved.of(args, results)._asdict()
        gradients = attention_backward(
            *BackwardArgs(q, results.lse, kv_heads=4, options=args.options, **saved)
        )
    leaves = tree_leaves([list(results), list(saved.values()), list(gradients)])
    tensors = [x for x in leaves if x is not None]  # there is no latent
    assert len(tensors) == 4 + 8 + 5
    return {x.device.type for x in tensors}


def test_no_result_of_the_operators_is_on_another_device_than_q():
    """A tensor of the CPU among a graph's inputs or outputs turns CUDA graphs off."""
    assert processes(1, _devices_of_results) == [{"cuda"}]


def _devices_of_graphs(rank, size):
    """The devices of all tensors in the graphs that Dynamo and AOTAutograd make of a layer on "meta"."""
    devices = {}

    def note(when):
        def compiler(graph, inputs):
            values = [x for node in graph.graph.nodes for x in tree_leaves(node.meta.get("val"))]
            devices[when] = {x.device.type for x in values if isinstance(x, torch.Tensor)}
            names = {str(node.target) for node in graph.graph.nodes}
            assert f"burst_mcore.attention_{when}.default" in names
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=note("forward"), bw_compiler=note("backward"))
    layer = Layer(Topology.single()).to("meta")
    x = torch.empty(2, 32, 32, device="meta", requires_grad=True)
    torch.compile(layer, fullgraph=True, backend=backend)(x).sum().backward()
    return devices


def test_a_compiled_layer_hands_its_backward_nothing_of_another_device():
    assert processes(1, _devices_of_graphs) == [{"forward": {"meta"}, "backward": {"meta"}}]


def _read(rank, size, packed, hooks):
    """Whether the values of a record's tensor were read by a backward."""
    topology, read, unpack = Topology.from_group(dist.group.WORLD), [], records.unpack
    p = problem(0, 32, dtype=torch.float32)
    q, k, v = (shard(x, 1, rank=rank, size=size, layout="zigzag").requires_grad_() for x in p[:3])
    run = torch.compile(_plain(topology), fullgraph=True, backend="aot_eager") if packed else _plain(topology)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if hooks else nullcontext():
        out = run(q, k, v)
    records.unpack = lambda packed: read.append(records.known(packed) is None) or unpack(packed)
    out.sum().backward()
    (was_read,) = read
    return was_read


def _plain(topology):
    mask, config = Mask.causal(), BurstConfig()
    return lambda q, k, v: burst_attention(q, k, v, topology=topology, mask=mask, config=config)


@pytest.mark.parametrize("packed", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
def test_the_values_of_a_record_are_read_only_where_a_compiled_call_has_moved_it(packed, hooks):
    assert processes(2, _read, packed, hooks) == [packed and hooks] * 2


def test_a_record_is_known_as_long_as_its_tensor_lives():
    record = records.CallRecord(7, 64, (30, 34))
    packed = records.pack(record, torch.device("cpu"))
    copy, address = packed.clone(), packed.data_ptr()
    packed.fill_(-1)  # nobody looks
    assert records.known(packed) is record and records.known(packed.view(2, 2)) is record
    assert records.known(copy) is None and records.unpack(copy) == record
    del packed
    storage, _ = records._BY_ADDRESS[address]
    assert storage.expired()
    for _ in range(2 * records.MANY):
        records.pack(record, torch.device("cpu"))
    assert len(records._BY_ADDRESS) <= records.MANY


def test_gradients_outlive_the_mask():
    p = problem(1, 16)
    q, k, v = (x.requires_grad_() for x in p[:3])
    mask = Mask.causal() & Mask.documents([0, 5, 16])
    want = dense(p, mask)
    out = burst_attention(q, k, v, topology=Topology.single(), mask=mask)
    del mask
    for cache in (
        plan_of,
        call_of,
        request_module._request,
        request_module.options_of,
        question._typical,
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


def test_captures_in_cuda_graphs_are_refused(monkeypatch):
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        with pytest.raises(RuntimeError, match="^x cannot be captured") if capturing else nullcontext():
            refuse_capture("x")
    assert torch.Tag.cudagraph_unsafe in torch.ops.burst_mcore.attention_forward.default.tags
    assert torch.Tag.cudagraph_unsafe in torch.ops.burst_mcore.attention_backward.default.tags
