"""Recompute policies under Megatron's own pipeline schedules, several microbatches in flight."""

import zlib
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from counting import count_pairs
from models import (
    BATCH,
    VERSION,
    VOCAB,
    Case,
    N,
    assert_same_gradients,
    build,
    on_this_cp_rank,
    start_megatron,
)
from ranks import processes

from burst_mcore.checkpointing import KeepAttention, Segment
from burst_mcore.megatron.recompute import use_recompute

MICROBATCHES, LAYERS = 4, 4
POLICIES = [KeepAttention(), Segment(0.5)]


class Trained(NamedTuple):
    """What a rank has of two steps and an evaluation between them."""

    losses: list[list[float]]
    """Of each microbatch, on the last stage."""
    gradients: dict[str, torch.Tensor]
    """By the parameter's name in the whole model."""
    recomputed: int


def _trained(rank, size, chunks, cp=2, attention="burst"):
    """Without checkpointing, and with full recompute and each policy; chunks: of the model, on each rank."""
    virtual = chunks if chunks > 1 else None
    start_megatron(
        pipeline_model_parallel_size=size // cp,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=cp,
    )
    fields = (
        ("num_layers", LAYERS),
        ("pipeline_model_parallel_size", size // cp),
        ("virtual_pipeline_model_parallel_size", virtual),
        ("pipeline_dtype", torch.float32),
        # As Megatron trains; before 0.19 it frees outputs that are still being sent, if sends overlap.
        ("deallocate_pipeline_outputs", VERSION >= (0, 19) or virtual is None),
        # Of two stages that are each other's next and previous one, batched messages would be mistaken.
        ("overlap_p2p_comm", virtual is not None),
        ("batch_p2p_comm", virtual is None),
    )
    plain = Case(cp=cp, fields=fields, attention=attention)
    policies = POLICIES if attention == "burst" else []
    pairs, found = count_pairs(), []
    for case in plain, *(plain._replace(recompute="full", policy=policy) for policy in policies):
        use_recompute(case.policy)
        pairs.clear()
        stages = [_stage(case, virtual, i) for i in range(chunks)]
        losses = [_run(stages, seed, evaluates) for seed, evaluates in enumerate([False, True, False])]
        gradients = {name: x.grad for stage in stages for name, x in _named(stage).items()}
        found.append(Trained(losses, gradients, pairs["backward"]))
    return found


def _stage(case, virtual, i):
    """A part of the model, whose weights are those of the whole however it is cut."""
    from megatron.core import parallel_state

    at = {"ignore_virtual": False, "vp_stage": i if virtual else None}
    stage = build(
        case,
        pre_process=parallel_state.is_pipeline_first_stage(**at),
        post_process=parallel_state.is_pipeline_last_stage(**at),
        vp_stage=at["vp_stage"],
    )
    for name, parameter in _named(stage).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator) / 10
        parameter.data.copy_(1 + drawn if parameter.dim() == 1 else drawn)
    return stage


def _named(stage):
    """Its parameters by their names in the whole model."""
    found = {}
    for name, parameter in stage.named_parameters():
        before, layers, after = name.partition("decoder.layers.")
        if layers:
            number, _, after = after.partition(".")
            after = f"{stage.decoder.layers[int(number)].layer_number}.{after}"
        found[before + layers + after] = parameter
    return found


def _run(stages, seed, evaluates):
    """Megatron's schedule, forwards alone or with their backwards; the losses."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    group = parallel_state.get_context_parallel_group()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (MICROBATCHES, BATCH, N + 1), generator=generator)
    at = torch.arange(N).expand(BATCH, N)
    batches = [
        on_this_cp_rank({"input_ids": t[:, :-1], "labels": t[:, 1:], "position_ids": at}, group)
        for t in tokens
    ]

    def loss_of(output):
        count = torch.tensor(output.numel(), dtype=torch.int)
        return output.sum() / (MICROBATCHES * BATCH * N), count, output.detach().sum().item()

    def forward(batches, model):
        return model(**next(batches), attention_mask=None), loss_of

    for stage in stages:
        stage.train(not evaluates)
    with torch.set_grad_enabled(not evaluates):
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in stages],
            model=stages,
            num_microbatches=MICROBATCHES,
            seq_length=N,
            micro_batch_size=BATCH,
            forward_only=evaluates,
        )


@pytest.fixture(scope="module")
def alone():
    """One process, with Megatron's own attention."""
    ((found,),) = processes(1, _trained, 1, 1, "default")
    assert [len(step) for step in found.losses] == [MICROBATCHES] * 3
    return found


def assert_equal_in_sum(ranks, alone):
    """Losses and gradients of context-parallel ranks add up to those of one process."""
    losses = torch.tensor([one.losses for one in ranks if one.losses[0]], dtype=torch.float64).sum(0)
    torch.testing.assert_close(losses, torch.tensor(alone.losses, dtype=torch.float64), rtol=1e-6, atol=0)
    gradients = defaultdict(lambda: 0)
    for one in ranks:
        for name, gradient in one.gradients.items():
            gradients[name] = gradients[name] + gradient.double()
    assert gradients.keys() == alone.gradients.keys()
    for name, gradient in alone.gradients.items():
        assert (gradients[name] - gradient).norm() < 2e-5 * gradient.norm(), name


@pytest.mark.proves("recompute policies, compared with no recompute", "PP 2 x CP 2, 1F1B and interleaved")
@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["1F1B", "interleaved"])
def test_two_steps_and_an_evaluation_between_them(chunks, alone):
    ranks = processes(4, _trained, chunks)
    plain = [found[0] for found in ranks]
    assert_equal_in_sum(plain, alone)
    assert not any(one.recomputed for one in plain)
    for number, policy in enumerate(POLICIES, start=1):
        got = [found[number] for found in ranks]
        assert_same_gradients(got, plain, policy)
        assert [one.losses for one in got] == [one.losses for one in plain]
        front = N - round(policy.share(0)[0] * N)
        calls = 2 * MICROBATCHES * BATCH * LAYERS
        assert sum(one.recomputed for one in got) == calls * front * (front + 1) // 2
