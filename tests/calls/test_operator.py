"""burst_attention as an operator: opcheck, compiled whole, and what it keeps alive."""

import gc
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch._dynamo
import torch._functorch.aot_autograd  # both here once, for all that is forked
import torch.distributed as dist
from cells import crossed
from dense import problem
from ranks import on_ranks, processes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from burst_mcore import BurstConfig, Mask, burst_attention
from burst_mcore.attention import compiled
from burst_mcore.attention import request as request_module
from burst_mcore.attention.compiled import Keyed, attention_backward, attention_forward
from burst_mcore.attention.request import Options
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import shard
from burst_mcore.packages import refuse_capture

OPTIONS = Options(Topology.single(), Mask.causal(), BurstConfig())


def _checked(rank, size, options, sunk):
    # opcheck compares runs, which torch's switch that poisons memory would make it refuse to
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = (x.requires_grad_() for x in problem(0, 16, kv_heads=2, dtype=torch.float32)[:3])
    sinks = torch.randn(4, requires_grad=True) if sunk else None
    keyed = Keyed(OPTIONS._replace(**options))
    results = attention_forward(q, k, v, sinks, None, keyed.key, True)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if options.get("return_lse") and options.get("return_max_logit"):  # else they hold no numbers to compare
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(attention_forward, (q, k, v, sinks, None, keyed.key, True), test_utils=tests)
    out, lse, _, ticket = (x.detach() for x in results)
    inputs = [*(x.detach() for x in (q, k, v)), sinks, None]
    torch.library.opcheck(
        attention_backward,
        ([torch.ones_like(out), None], inputs, [out, lse, ticket], keyed.key),
        test_utils=["test_schema", "test_faketensor"],
    )
    return True


def test_the_operator_checks_what_a_graph_gives_it():
    q, k, v = problem(0, 16, dtype=torch.float32)[:3]
    for v_given, changes, words in (
        (v[:, :, :1], {}, "k and v must have the same number of heads"),
        (v, {"softmax_scale": -1.0}, "softmax_scale must be positive"),
        (v, {"softcap": -1.0}, "softcap must be"),
    ):
        keyed = Keyed(OPTIONS._replace(**changes))
        with pytest.raises(ValueError, match=words):
            attention_forward(q, k, v_given, None, None, keyed.key, True)


@pytest.mark.parametrize(
    ("sunk", "options"),
    crossed(
        (False, True),
        ({}, {"softmax_scale": 0.3, "softcap": 2.0, "return_lse": True, "return_max_logit": True}),
        quick=lambda sunk, options: sunk == bool(options),
    ),
    ids=str,
)
def test_opcheck_is_clean(sunk, options):
    assert all(processes(1, _checked, options, sunk))


def _compiled(rank, size, way, tokens):
    """Whether a compiled call, with its largest logits, gives what an eager one does."""
    topology = Topology.from_group(dist.group.WORLD) if size > 1 else Topology.single()
    options, got = {"topology": topology, "mask": Mask.causal(), "config": BurstConfig(**way)}, []

    def attend(q, k, v):
        return burst_attention(q, k, v, **options, return_max_logit=True)

    p = problem(0, tokens, dtype=torch.float32)
    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        mine = [shard(x, 1, rank=rank, size=size, layout="zigzag").requires_grad_() for x in p]
        out, largest = run(*mine[:3])
        assert not largest.requires_grad
        out.backward(mine[3])
        got.append([out, largest, *(x.grad for x in mine[:3])])
    return all(map(torch.equal, *got))


@pytest.mark.parametrize(
    ("size", "way", "tokens"),
    [(1, {}, 16), (2, {}, 32), (2, {"head_parallel": 2}, 32), (2, {"head_parallel": 2}, 37)],
    ids=str,
)
def test_a_call_compiles_into_one_graph(size, way, tokens):
    """Also where ranks of an uneven sequence share heads: a graph knows shapes of this rank alone."""
    assert all(processes(size, _compiled, way, tokens))


@pytest.mark.usefixtures("few_objects")
def test_compiled_calls_take_other_numbers_and_outlive_what_is_cached():
    topology, mask, p = Topology.single(), Mask.causal(), problem(0, 16, dtype=torch.float32)

    def attend(q, softmax_scale, softcap):
        options = {"softmax_scale": softmax_scale, "softcap": softcap}
        return burst_attention(q, p.k, p.v, topology=topology, mask=mask, **options)

    run = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for numbers in ((0.3, None), (0.4, 0), (0.5, 2.0), (None, 3.0), (1, 0.7), (0.3, None)):
        assert torch.equal(run(p.q, *numbers), attend(p.q, *numbers)), numbers
        request_module._LEGAL.clear()
        gc.collect()


def test_no_result_of_the_operators_is_on_another_device_than_q():
    """A tensor of the CPU among a graph's inputs or outputs turns CUDA graphs off."""
    keyed = Keyed(OPTIONS)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        sinks = torch.empty(4, device="cuda")
        out, lse, max_logit, ticket = attention_forward(q, k, v, sinks, None, keyed.key, True)
        inputs = [q, k, v, sinks, None]
        gradients = attention_backward([q, None], inputs, [out, lse, ticket], keyed.key)
    tensors = [out, lse, max_logit, ticket, *gradients]
    assert len(tensors) == 9 and {x.device.type for x in tensors} == {"cuda"}


def _moved(rank, size, config):
    """The gradients of a compiled call whose saved tensors a hook has copied, and of an eager call."""
    topology, mask = Topology.from_group(dist.group.WORLD), Mask.causal()
    p, got = problem(0, 32, dtype=torch.float32), []

    def attend(q, k, v):
        return burst_attention(q, k, v, topology=topology, mask=mask, config=config)

    for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        mine = [shard(x, 1, rank=rank, size=size, layout="zigzag").requires_grad_() for x in p]
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            out = run(*mine[:3])
        out.backward(mine[3])
        got.append([x.grad for x in mine[:3]])
    return all(map(torch.equal, *got))


@on_ranks(1)
def test_fakes_of_gradients_have_the_dtypes_and_strides_of_gradients(rank, size):
    """opcheck of backward for sinks of another dtype than q, and for weights of a latent that are a view."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v = problem(0, 16, dtype=torch.bfloat16)[:3]
    heads, dim = q.shape[2:]
    up = torch.randn(heads, dim + v.shape[3] - 4, 12, dtype=torch.bfloat16).transpose(1, 2)
    compressed, rope_key = torch.randn(*q.shape[:2], 1, 12), torch.randn(*q.shape[:2], 1, 4)
    latent = compressed.bfloat16(), rope_key.bfloat16()
    for tensors in ((q, k, v, torch.ones(heads), None), (q, *latent, None, up)):
        keyed = Keyed(OPTIONS)
        out, lse, _, ticket = attention_forward(*tensors, keyed.key, True)
        arguments = [torch.ones_like(out), None], tensors, [out, lse, ticket], keyed.key
        torch.library.opcheck(attention_backward, arguments, test_utils="test_faketensor")


def test_options_that_are_gone_are_said_to_be():
    p, key = problem(0, 16, dtype=torch.float32), Keyed(OPTIONS).key
    gc.collect()
    with pytest.raises(RuntimeError, match="a traced call's options are gone: trace by torch.compile"):
        attention_forward(*p[:3], None, None, key, True)


class Wrapped(torch.Tensor):
    """A tensor whose numbers the dispatcher alone finds, as those of collectives that are under way."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_subclasses_of_tensors_are_unwrapped():
    p = problem(0, 16, dtype=torch.float32)
    options = {"topology": Topology.single(), "mask": Mask.causal()}
    out = burst_attention(*map(Wrapped, p[:3]), **options)
    assert type(out) is torch.Tensor and torch.equal(out, burst_attention(*p[:3], **options))


def test_hooks_may_move_what_a_compiled_call_saves():
    assert all(processes(2, _moved, BurstConfig()))


@on_ranks(2)
def test_hooks_may_not_move_them_where_ranks_share_heads(rank, size):
    with pytest.raises(Exception, match="a hook has moved the saved tensors of a compiled call"):
        _moved(rank, size, BurstConfig(head_parallel=2))


def test_the_saved_state_ends_with_its_ticket():
    keyed, p = Keyed(OPTIONS), problem(0, 16, dtype=torch.float32)
    ticket = attention_forward(*p[:3], None, None, keyed.key, True)[3]
    state = ticket.untyped_storage().kept = {*ticket.untyped_storage().kept}
    state, ticket = weakref.ref(state), ticket.detach()
    gc.collect()
    assert ticket.untyped_storage().kept is state()
    del ticket
    assert state() is None


@on_ranks(1)
def test_the_host_reads_no_ticket(rank, size):
    """Also where a checkpoint keeps a detached ticket, or a policy keeps the results of the operator."""
    del compiled.Agreed  # made of a ticket's values
    topology, mask, p = Topology.single(), Mask.causal(), problem(0, 16, dtype=torch.float32)
    must, other = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    operator = torch.ops.burst_mcore.attention_forward.default
    contexts = partial(
        create_selective_checkpoint_contexts, lambda _, op, *args, **kwargs: must if op is operator else other
    )

    def attend(q, k, v):
        return burst_attention(q.sin(), k, v, topology=topology, mask=mask)

    def gradients(run):
        mine = [x.detach().clone().requires_grad_() for x in p[:3]]
        run(*mine).backward(p[3])
        return [x.grad for x in mine]

    want = gradients(attend)
    for run in (attend, torch.compile(attend, backend="aot_eager")):
        checkpointed = partial(checkpoint, run, use_reentrant=False)
        for each in (run, checkpointed, partial(checkpointed, context_fn=contexts)):
            assert all(map(torch.equal, gradients(each), want))


def test_captures_in_cuda_graphs_are_refused(monkeypatch):
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        with pytest.raises(RuntimeError, match="^x cannot be captured") if capturing else nullcontext():
            refuse_capture("x")
    assert torch.Tag.cudagraph_unsafe in torch.ops.burst_mcore.attention_forward.default.tags
    assert torch.Tag.cudagraph_unsafe in torch.ops.burst_mcore.attention_backward.default.tags
