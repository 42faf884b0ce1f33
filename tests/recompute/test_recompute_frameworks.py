"""Recompute policies under transformers' and DeepSpeed's checkpointing."""

import pytest
import torch
from kernel_calls import rows_of_kernel_calls
from ranks import processes

from burst_mcore import BurstConfig, Mask, Topology, burst_attention
from burst_mcore.checkpointing import Full, KeepAttention, Segment, recorded

N = 32


def _attend(q, k, v):
    config = BurstConfig(kernel="aten-cpu")
    return burst_attention(q, k, v, topology=Topology.single(), mask=Mask.causal(), config=config)


def _llama(rank, size, policy):
    from causal_lms import dataset, model_of
    from transformers import AttentionInterface

    def attention(module, q, k, v, attention_mask=None, **kwargs):
        return _attend(*(x.transpose(1, 2) for x in (q, k, v))), None

    AttentionInterface.register("burst-test", attention)
    model, (sample,) = model_of(), dataset(1, N)
    model.set_attn_implementation("burst-test")
    rows, ids, found = rows_of_kernel_calls(), sample["input_ids"][None], []
    for checkpointed in (False, True):
        if checkpointed:
            options = {"use_reentrant": False, "context_fn": policy.contexts}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss
        rows.clear()
        loss.backward()
        found.append(([loss.detach(), *(p.grad.clone() for p in model.parameters())], list(rows)))
    (want, none), (got, recomputed) = found
    assert none == []
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    return recomputed


@pytest.mark.parametrize(
    ("policy", "rows"), [(Full(), [N, N]), (KeepAttention(), []), (Segment(0.5), [N // 2, N // 2])], ids=str
)
def test_transformers_gradient_checkpointing(policy, rows):
    pytest.importorskip("transformers")
    assert processes(1, _llama, policy) == [rows]


def _deepspeed(rank, size, policies):
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", verbose=False)
    deepspeed.checkpointing.configure(None, partition_activations=False)
    rows = rows_of_kernel_calls()
    return [_by_deepspeed(deepspeed.checkpointing.checkpoint, policy, rows) for policy in policies]


def _by_deepspeed(checkpoint, policy, rows):
    """The rows of kernel calls in backward."""
    layer = torch.nn.Linear(32, 96)

    def attend(x):
        return x + _attend(*layer(x).unflatten(-1, (3, 4, 8)).unbind(2)).flatten(2)

    inputs = [torch.randn(1, N, 32, requires_grad=True) for _ in range(2)]
    found = []
    for run in (
        lambda x: attend(x),
        lambda x: checkpoint(recorded(attend, policy), x),
    ):
        layer.zero_grad()
        for x in inputs:
            x.grad = None
        outs = [run(x) for x in inputs]
        rows.clear()
        for out in reversed(outs):
            out.square().sum().backward()
        found.append([layer.weight.grad.clone(), *(x.grad.clone() for x in inputs)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    return [*rows]


def test_deepspeeds_checkpointing(monkeypatch, tmp_path):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    policies = KeepAttention(), Segment(0.5)
    assert processes(1, _deepspeed, policies, start="spawn") == [[[], [N // 2] * 2]]
