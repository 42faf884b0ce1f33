"""Training with pictures on DeepSpeed, FSDP2, DDP and TRL, held to one process."""

import pytest
import sft
import steps
from causal_lms import worst
from ranks import processes


def check(found, want):
    for losses, weights in found:
        assert losses == pytest.approx(want[0], rel=1e-5)
        assert worst(weights, want[1]) < 1e-6


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(stage):
    pytest.importorskip("deepspeed")
    check(processes(2, steps.on_deepspeed, "qwen3_vl", stage, 2), steps.one_process("qwen3_vl"))


def test_deepspeed_on_two_groups():
    pytest.importorskip("deepspeed")
    check(processes(4, steps.on_deepspeed, "gemma3", 3, 2), steps.one_process("gemma3", 2))


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_loops_by_hand(wrapper):
    check(processes(2, steps.by_hand, "qwen3_vl", wrapper, 2), steps.one_process("qwen3_vl"))


def test_a_loop_on_two_groups():
    check(processes(4, steps.by_hand, "gemma3", "fsdp", 2), steps.one_process("gemma3", 2))


def test_trl_with_two_images_a_row(tmp_path):
    pytest.importorskip("deepspeed")
    pytest.importorskip("trl")
    (want,) = processes(1, sft.over_ranks, "alone", str(tmp_path))
    check(processes(2, sft.over_ranks, "sp", str(tmp_path)), want)
