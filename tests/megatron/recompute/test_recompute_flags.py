"""The flags of recompute: which policy they make, and what they refuse."""

import argparse

import pytest

from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment
from burst_mcore.megatron.arguments import add_arguments, recompute_policy
from burst_mcore.megatron.patched.hooks import EVERY_LAYER, checkpoint_every_layer

BURST = ["--context-parallel-attention-backend", "burst"]
FULL = ["--recompute-granularity", "full"]
SELECTIVE = ["--recompute-granularity", "selective"]
SEGMENT = ["--burst-recompute", "segment"]
ATTENTION = ["--burst-recompute", "attention"]
KEEP = ["--burst-recompute-keep", "0.5"]
AUTO = ["--burst-recompute-keep", "auto"]
MEMORY = ["--burst-recompute-memory-gb", "2"]
OFFLOAD = ["--burst-recompute-offload"]


def parsed(*flags):
    """Our flags, and those of Megatron's that matter."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--recompute-granularity")
    parser.add_argument("--recompute-modules", nargs="*")
    parser.add_argument("--spec", nargs="*")
    return add_arguments(parser).parse_args(flags)


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ([], Full()),
        ([*BURST, *FULL], Full()),
        (["--burst-recompute", "full", *FULL], Full()),
        ([*BURST, *FULL, *ATTENTION], KeepAttention()),
        ([*BURST, *SELECTIVE, *ATTENTION], KeepAttention()),
        ([*BURST, *SELECTIVE, "--recompute-modules", "mlp", "core_attn", *ATTENTION], KeepAttention()),
        ([*BURST, *FULL, *SEGMENT, *KEEP], Segment(0.5)),
        ([*BURST, *FULL, *SEGMENT, *AUTO, *MEMORY], Segment("auto", 2.0)),
        ([*BURST, *FULL, *SEGMENT, *KEEP, *OFFLOAD], Offload(Segment(0.5))),
        (["--spec", "burst_mcore.megatron.spec", "x", *FULL, *ATTENTION], KeepAttention()),
    ],
)
def test_flags_make_a_policy(flags, policy):
    assert recompute_policy(parsed(*flags)) == policy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([*BURST, *FULL, *SEGMENT], "--burst-recompute segment and --burst-recompute-keep F go together"),
        ([*BURST, *FULL, *ATTENTION, *KEEP], "go together, got --burst-recompute attention.* 0.5"),
        ([*BURST, *FULL, *SEGMENT, *AUTO], "auto and --burst-recompute-memory-gb GB go together"),
        ([*BURST, *FULL, *SEGMENT, *KEEP, *MEMORY], "go together, got --burst-recompute-keep 0.5.* 2.0"),
        ([*BURST, *FULL, *OFFLOAD], "--burst-recompute-offload is for .* attention or segment"),
        ([*BURST, *FULL, *SEGMENT, *AUTO, f"{MEMORY[0]}=-1"], "memory_gb.* above 0; got -1"),
        ([*FULL, *ATTENTION], "needs --context-parallel-attention-backend burst"),
        ([*BURST, *SELECTIVE, "--recompute-modules", "mlp", *ATTENTION], "no effect.*core_attn"),
        ([*BURST, *ATTENTION], "no effect: without --recompute-granularity"),
    ],
)
def test_flags_that_contradict_each_other_are_named(flags, words):
    with pytest.raises(ValueError, match=words):
        recompute_policy(parsed(*flags))


def test_a_policy_checkpoints_every_layer_unless_megatron_is_told_what_to():
    def chosen(**flags):
        given = dict.fromkeys(EVERY_LAYER) | {"recompute_activations": False} | flags
        arguments = argparse.Namespace(**given)
        checkpoint_every_layer(arguments)
        return {name: value for name, value in vars(arguments).items() if value != given[name]}

    assert chosen() == EVERY_LAYER
    assert chosen(recompute_num_layers=2) == {
        k: v for k, v in EVERY_LAYER.items() if not k.endswith("layers")
    }
    for flags in ({"recompute_granularity": "selective"}, {"recompute_activations": True}):
        assert chosen(**flags) == {}
