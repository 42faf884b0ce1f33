"""Runs an unmodified Megatron training script with our flags: no fork, no edit.

Six kinds of functions of Megatron are wrapped here, since Megatron has no official hook:

* its argument parser: a script has only one `extra_args_provider`, which it may need itself;
* its check of the arguments, followed by ours: an error is one line, and exit status 2;
* the constructors of GPTModel and HybridModel: with the flag their specs pass through
  `with_burst_attention`; a remaining stock self-attention raises;
* the constructor of its local attention: without context parallelism there, the error is one line;
* its builder of models: a model with only stock self-attentions raises; a vision tower beside a language
  model, or a teacher, keeps its own attention.

They can go when Megatron registers attention backends by name. The patches for other layouts than zigzag
are in `layouts`.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from burst_mcore.scripts import script_of
from burst_mcore.wrap import around, while_set

USAGE = """usage: python -m burst_mcore.megatron SCRIPT ARGS...
       python -m burst_mcore.megatron -m MODULE ARGS...

Runs a Megatron training script, such as Megatron-LM's pretrain_gpt.py, with its own arguments and ours:

{flags}

One process for each rank: start it with torchrun, as in
  torchrun --nproc-per-node 4 -m burst_mcore.megatron pretrain_gpt.py --context-parallel-size 4 ..."""


def usage() -> str:
    """Return the usage of the launcher, with all its flags."""
    from burst_mcore.megatron.arguments import add_arguments

    parser = add_arguments(argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS))
    return USAGE.format(flags=parser.format_help().strip())


def launch(command: Sequence[str]) -> None:
    """Run `command`, a script or `-m` and a module, with its arguments, in this process.

    Exits with a message if the script or module, or Megatron, is missing.
    """
    run = script_of(command, "burst_mcore.megatron", usage())
    import torch

    from burst_mcore.megatron.patched.hooks import refuse_lost_flags

    refuse_lost_flags(sys.argv[1:])

    if not torch.cuda.is_available():
        _run_on_cpu()
    install()
    run()


def _run_on_cpu() -> None:
    from burst_mcore.megatron import cpu
    from burst_mcore.megatron.patched.hooks import refuse

    os.environ.setdefault("RANK", "0")
    flags = {word.split("=")[0] for word in sys.argv}
    for flag in ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2"):
        if flag in flags:
            refuse(f"{flag} needs CUDA: on the CPU use --use-distributed-optimizer")
    cpu.enable_training()
    sys.argv += _not_given(cpu.CPU_ARGUMENTS, sys.argv)


def _not_given(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return the `flags`, each with its value, that `argv` does not set."""
    present = {argument.split("=")[0] for argument in argv}
    absent: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            keep = flag not in present
        absent += [flag] if keep else []
    return absent


def install() -> None:
    """Wrap Megatron's functions, once. Exits with a message if megatron.training cannot be imported."""
    try:
        from megatron.training import arguments, training
    except ImportError as error:
        sys.exit(
            f"burst_mcore.megatron: megatron.training cannot be imported ({error}). It comes with "
            f"megatron-core from 0.19 on; before, put a Megatron-LM checkout on PYTHONPATH."
        )
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from burst_mcore.megatron.layouts import language_models
    from burst_mcore.wrap import wrap, wrap_everywhere

    wrap(arguments, "add_megatron_arguments", _with_our_flags)
    wrap_everywhere(arguments, "validate_args", _with_our_checks)
    wrap(DotProductAttention, "__init__", _naming_our_flag)
    if not is_patched():
        wrap_everywhere(training, "get_model", _refusing_stock_attention_alone)
        for model in language_models():
            wrap(model, "__init__", _with_burst_specs)


def is_patched() -> bool:
    """Return whether Megatron is patched (folder patches/): its configuration chooses core attention."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    return hasattr(ModelParallelConfig, "context_parallel_attention_backend")


def burst_is_chosen() -> bool:
    """Return whether the command line chooses burst attention."""
    from burst_mcore.megatron.arguments import burst_asked_for, from_command_line

    return from_command_line(burst_asked_for, otherwise=False)


def _with_our_flags(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    from burst_mcore.megatron.arguments import add_arguments

    return lambda parser: add_arguments(add_megatron_arguments(parser))


@around
def _with_our_checks(validate: Callable[..., Any], args: Any, *others: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's check of its arguments: ours follows, and puts the options in effect.

    For max logits Megatron's check demands TransformerEngine 2.9, which burst attention does not need.
    """
    from megatron.training import arguments

    from burst_mcore.megatron.arguments import uses_burst
    from burst_mcore.megatron.patched.hooks import checkpoint_every_layer, use_options

    if getattr(args, "burst_recompute", None):
        checkpoint_every_layer(args)
    is_min_version = arguments.is_te_min_version
    accepted = ("2.9.0",) if uses_burst(args) else ()
    with while_set(arguments, is_te_min_version=lambda x, *how: x in accepted or is_min_version(x, *how)):
        result = validate(args, *others, **kwargs)
    use_options(args)
    return result


def _with_burst_specs(init: Callable[..., None]) -> Callable[..., None]:
    from burst_mcore.megatron.spec import with_burst_attention

    signature = inspect.signature(init)

    def wrapped(*args: Any, **kwargs: Any) -> None:
        if burst_is_chosen():
            bound = signature.bind(*args, **kwargs)
            for name in ("transformer_layer_spec", "mtp_block_spec", "hybrid_stack_spec", "mamba_stack_spec"):
                if bound.arguments.get(name) is not None:
                    bound.arguments[name] = with_burst_attention(bound.arguments[name])
            args, kwargs = bound.args, bound.kwargs
        init(*args, **kwargs)
        if burst_is_chosen() and (stock := _stock_self_attentions([args[0]])):
            raise ValueError(
                f"--context-parallel-attention-backend burst was asked for, but {type(args[0]).__name__} "
                f"keeps {type(stock[0]).__name__}, which its spec builds by a way of its own: put "
                "burst_mcore.megatron.spec.core_attention_spec() there"
            )

    return wrapped


@around
def _naming_our_flag(init: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap the constructor of Megatron's local attention: its error under CP becomes one line."""
    from burst_mcore.megatron.patched.hooks import refuse

    try:
        init(self, config, *args, **kwargs)
    except (AssertionError, ValueError) as error:
        if config.context_parallel_size == 1 or burst_is_chosen():
            raise
        reason = str(error).rstrip("!")
        refuse(
            f"--context-parallel-size {config.context_parallel_size}: {reason}: add "
            "--context-parallel-attention-backend burst"
        )


@around
def _refusing_stock_attention_alone(get_model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap Megatron's builder of models: a model without any burst attention raises."""
    from burst_mcore.megatron.core_attention import BurstCoreAttention

    models = get_model(*args, **kwargs)
    parts = models if isinstance(models, list) else [models]
    if burst_is_chosen() and (stock := _stock_self_attentions(parts)):
        modules = [module for part in parts for module in part.modules()]
        reached = any(isinstance(module, BurstCoreAttention) for module in modules)
        roots = {id(root) for part in parts for root in _unwrapped(part)}
        inner = (m for m in modules if id(m) not in roots)  # a vision tower is not a root
        vision = any(base.__name__ == "VisionModule" for m in inner for base in type(m).__mro__)
        if not reached and not vision:
            raise ValueError(
                "--context-parallel-attention-backend burst was asked for, but this model has "
                f"{type(stock[0]).__name__} alone: the flag supports GPTModel and HybridModel; for others "
                "put burst_mcore.megatron.spec.core_attention_spec() into the model's spec"
            )
    return models


def _unwrapped(model: Any) -> Iterator[Any]:
    """Yield a model, and the models within its wrappers (DDP, Float16Module)."""
    while model is not None:
        yield model
        model = getattr(model, "module", None)


def _stock_self_attentions(models: Sequence[Any]) -> list[Any]:
    """Return Megatron's own core attentions in these models, except cross attention."""
    from burst_mcore.megatron.spec import STOCK

    stock = tuple(kind for kind in STOCK if isinstance(kind, type))  # without TransformerEngine one is a mock
    modules = [module for model in models for module in model.modules() if isinstance(module, stock)]
    return [module for module in modules if getattr(module, "attention_type", "self") == "self"]
