"""Runs an unmodified Megatron training script with our flags: no fork, no edit.

Four kinds of functions of Megatron are wrapped here, since Megatron has no official hook:

* its argument parser: a script has only one `extra_args_provider`, which it may need itself;
* its check of the arguments, followed by ours: an error is one line, and exit status 2;
* the constructors of its attention modules: with the flag, core attention becomes ours, as in the patches;
* the constructors of its core attentions: under context parallelism without the flag, or past the flag,
  the error says what to do.

They can go when Megatron registers attention backends by name. The patches for other layouts than zigzag
are in `layouts`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from burst_mcore.megatron.arguments import add_arguments, burst_asked_for, command_line, in_effect, uses_burst
from burst_mcore.megatron.patched.hooks import checkpoint_every_layer, refuse, refuse_lost_flags, use_options
from burst_mcore.scripts import script_of
from burst_mcore.wrap import around, while_set, wrap, wrap_everywhere

USAGE = """usage: python -m burst_mcore.megatron SCRIPT ARGS...
       python -m burst_mcore.megatron -m MODULE ARGS...

Runs a Megatron training script, such as Megatron-LM's pretrain_gpt.py, with its own arguments and ours:

{flags}

One process for each rank: start it with torchrun, as in
  torchrun --nproc-per-node 4 -m burst_mcore.megatron pretrain_gpt.py --context-parallel-size 4 ..."""


def usage() -> str:
    """Return the usage of the launcher, with all its flags."""
    parser = add_arguments(argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS))
    return USAGE.format(flags=parser.format_help().strip())


def launch(command: Sequence[str]) -> None:
    """Run `command`, a script or `-m` and a module, with its arguments, in this process.

    Exits with a message if the script or module, or Megatron, is missing.
    """
    run = script_of(command, "burst_mcore.megatron", usage())
    import torch

    refuse_lost_flags(sys.argv[1:])
    if not torch.cuda.is_available():
        _run_on_cpu()
    install()
    run()


def _run_on_cpu() -> None:
    from burst_mcore.megatron import cpu

    os.environ.setdefault("RANK", "0")
    flags = {word.split("=")[0] for word in sys.argv}
    for flag in flags & {"--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"}:
        refuse(f"{flag} needs CUDA: on the CPU use --use-distributed-optimizer")
    cpu.enable_training()
    sys.argv[1:1] = cpu.CPU_ARGUMENTS  # the last of a flag's values counts: yours


def install() -> None:
    """Wrap Megatron's functions, once. Exits with a message if megatron.training cannot be imported."""
    try:
        from megatron.training import arguments
    except ImportError as error:
        sys.exit(
            f"burst_mcore.megatron: megatron.training cannot be imported ({error}). It comes with "
            f"megatron-core from 0.19 on; before, put a Megatron-LM checkout on PYTHONPATH."
        )
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

    from burst_mcore.megatron.spec import STOCK

    wrap(arguments, "add_megatron_arguments", _with_our_flags)
    wrap_everywhere(arguments, "validate_args", _with_our_checks)
    for attention in (Attention, MultiLatentAttention):
        wrap(attention, "__init__", _with_burst_attention)
    for stock in STOCK:
        if isinstance(stock, type):  # without TransformerEngine one is a mock
            wrap(stock, "__init__", _naming_our_flag)


def _with_our_flags(add_megatron_arguments: Callable) -> Callable:
    return lambda parser: add_arguments(add_megatron_arguments(parser))


@around
def _with_our_checks(validate: Callable, args: Any, *defaults: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's check of its arguments: ours follows, and puts the options in effect.

    For max logits it demands TransformerEngine 2.9, which burst attention does not need. The arguments that
    it prints have our defaults.
    """
    from megatron.training import arguments

    if getattr(args, "burst_recompute", None):
        checkpoint_every_layer(args)
    is_min_version, print_args = arguments.is_te_min_version, arguments._print_args
    versions = ("2.9.0",) if uses_burst(args) else ()
    replacements = {
        "is_te_min_version": lambda x, *how: x in versions or is_min_version(x, *how),
        "_print_args": lambda title, x: print_args(title, in_effect(x)),
    }
    with while_set(arguments, **replacements):
        result = validate(args, *defaults, **kwargs)
    use_options(args)
    return result


@around
def _with_burst_attention(
    init: Callable, self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap the constructor of an attention module: with the flag, Megatron's core attention becomes ours.

    A vision tower, whose layers are at context parallelism 1 beside a language model, keeps Megatron's.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    from burst_mcore.megatron.spec import STOCK, with_burst_attention

    core = submodules.core_attention
    kind = core.module if isinstance(core, ModuleSpec) else core
    is_tower = config.context_parallel_size < getattr(command_line(), "context_parallel_size", 1)
    if burst_asked_for(command_line()) and not is_tower and kind in STOCK:
        submodules = with_burst_attention(submodules)
    init(self, config, submodules, *args, **kwargs)


@around
def _naming_our_flag(init: Callable, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of Megatron's core attentions: errors under context parallelism name our flag."""
    from burst_mcore.megatron.spec import STOCK

    flag, size = "--context-parallel-attention-backend burst", config.context_parallel_size
    if size > 1 and burst_asked_for(command_line()):
        raise ValueError(
            f"{flag} was asked for, but a module that is none of Megatron's attention builds "
            f"{type(self).__name__}: put burst_mcore.megatron.spec.core_attention_spec() there"
        )
    try:
        init(self, config, *args, **kwargs)
    except (AssertionError, ValueError) as error:
        if size == 1 or not isinstance(self, STOCK[0]):  # TransformerEngine's errors are of other causes
            raise
        refuse(f"--context-parallel-size {size}: {str(error).rstrip('!')}: add {flag}")
