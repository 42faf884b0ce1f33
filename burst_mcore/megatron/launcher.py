"""Runs an unmodified Megatron training script with our flags: no fork, no edit.

Four kinds of functions of Megatron are wrapped here, each because there is no official door:

* its argument parser, to which a script's own `extra_args_provider` may be the only other addition;
* the constructors of GPTModel and HybridModel, which every builder ends at: their specs pass through
  `with_burst_attention` where the flag asks for it, and the models through `fuse_loss`; those of other
  language models refuse to be built beside --burst-fused-loss;
* the constructors of the stock core attentions, which refuse to be built beside the flag, so that a model of
  another class cannot train with another attention unnoticed;
* its builder of data loaders, whose packed batches are planned one ahead.

They can go when Megatron registers attention backends by name. What another layout than zigzag needs is in
`layouts`.
"""

from __future__ import annotations

import inspect
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

USAGE = """usage: python -m burst_mcore.megatron SCRIPT ARGS...

Runs a Megatron training script, such as Megatron-LM's pretrain_gpt.py, with its own arguments and
  --context-parallel-attention-backend {default,burst}   --burst-layout   --burst-backward   --burst-kernel
  --burst-fused-loss   --burst-recompute {full,attention,segment}   --burst-recompute-keep F
One process for each rank: start it with torchrun, as in
  torchrun --nproc-per-node 4 -m burst_mcore.megatron pretrain_gpt.py --context-parallel-size 4 ..."""


def launch(command: Sequence[str]) -> None:
    """Run `command`, a script and its arguments, in this process.

    Exits with a message if there is no script, or no Megatron to run it with.
    """
    if not command or command[0] in ("-h", "--help"):
        sys.exit(USAGE)
    script = Path(command[0])
    if not script.is_file():
        sys.exit(f"burst_mcore.megatron: no such script: {script}\n{USAGE}")
    sys.argv = [str(script), *command[1:]]
    sys.path.insert(0, str(script.resolve().parent))  # as python does for a script; Megatron may lie there
    import torch

    if not torch.cuda.is_available():
        _run_on_cpu()
    sys.argv += _checkpointing(sys.argv)
    install()
    runpy.run_path(str(script), run_name="__main__")


def _run_on_cpu() -> None:
    from burst_mcore.megatron import cpu

    os.environ.setdefault("RANK", "0")
    cpu.enable_training()
    sys.argv += _not_given(cpu.CPU_ARGUMENTS, sys.argv)


def _checkpointing(argv: Sequence[str]) -> list[str]:
    """Megatron's flags that checkpoint every layer, where ours asks for a policy and no other does."""
    given = {argument.split("=")[0] for argument in argv}
    if "--burst-recompute" not in given or given & {"--recompute-granularity", "--recompute-activations"}:
        return []
    every = [
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "1",
    ]
    return _not_given(every, argv)


def _not_given(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Those of `flags`, each with the value that follows it, that `argv` does not set itself."""
    given = {argument.split("=")[0] for argument in argv}
    missing: list[str] = []
    for flag in flags:
        if flag.startswith("--"):
            keep = flag not in given
        missing += [flag] if keep else []
    return missing


def install() -> None:
    """Wrap Megatron's functions, once.

    Exits with a message where megatron.training cannot be imported.
    """
    try:
        from megatron.training import arguments, training
    except ImportError as error:
        sys.exit(
            f"burst_mcore.megatron: megatron.training cannot be imported ({error}). It comes with "
            f"megatron-core from 0.19 on; before, put a Megatron-LM checkout on PYTHONPATH."
        )
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.models.gpt.gpt_model import GPTModel

    from burst_mcore.megatron.patch import wrap
    from burst_mcore.megatron.spec import STOCK

    wrap(arguments, "add_megatron_arguments", _with_our_flags)
    wrap(training, "build_pretraining_data_loader", _planned_ahead)
    models = [GPTModel]
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        models.append(HybridModel)
    except ImportError:  # before 0.19
        pass
    for model in models:
        wrap(model, "__init__", _with_burst_specs)
        wrap(model, "__init__", _with_fused_loss)
    wrap(LanguageModule, "__init__", _refusing_a_fused_loss)
    for attention in STOCK:
        if isinstance(attention, type):  # without TransformerEngine, Megatron has a mock in its class's place
            wrap(attention, "__init__", _refusing_beside_burst)


def burst_is_chosen() -> bool:
    """Whether the command line asks for burst attention."""
    from burst_mcore.megatron.arguments import megatron_arguments

    try:
        arguments = megatron_arguments()
    except RuntimeError:
        return False
    return getattr(arguments, "context_parallel_attention_backend", "default") == "burst"


def fused_loss_is_chosen() -> bool:
    """Whether the command line asks for the fused loss."""
    from burst_mcore.megatron.arguments import megatron_arguments

    try:
        return bool(getattr(megatron_arguments(), "burst_fused_loss", False))
    except RuntimeError:
        return False


def _use_the_layout_of_the_command_line() -> None:
    """Called before a model is built, and so before its first batch."""
    from burst_mcore.megatron.arguments import megatron_arguments
    from burst_mcore.megatron.layouts import use_layout

    try:
        layout = getattr(megatron_arguments(), "burst_layout", "zigzag")
    except RuntimeError:
        return
    if layout != "zigzag":  # Megatron's own, or that of a script which called use_layout itself
        use_layout(layout)


def _use_the_recompute_of_the_command_line() -> None:
    from burst_mcore.checkpointing import Full
    from burst_mcore.megatron.arguments import megatron_arguments, recompute_policy
    from burst_mcore.megatron.recompute import use_recompute

    try:
        policy = recompute_policy(megatron_arguments())
    except RuntimeError:
        return
    if policy != Full():  # Megatron's own, or that of a script which called use_recompute itself
        use_recompute(policy)


def _with_our_flags(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    from burst_mcore.megatron.arguments import add_arguments

    return lambda parser: add_arguments(add_megatron_arguments(parser))


def _planned_ahead(build: Callable[..., Any]) -> Callable[..., Any]:
    """The builder of data loaders, whose batches are planned ahead where burst attention is asked for."""
    from burst_mcore.megatron.ahead import read_ahead

    def built(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        return read_ahead(loader) if burst_is_chosen() else loader

    return built


def _with_burst_specs(init: Callable[..., None]) -> Callable[..., None]:
    """A model's constructor, with burst attention in whatever specs it is given."""
    from burst_mcore.megatron.spec import with_burst_attention

    signature = inspect.signature(init)

    def wrapped(*args: Any, **kwargs: Any) -> None:
        _use_the_layout_of_the_command_line()
        _use_the_recompute_of_the_command_line()
        if burst_is_chosen():
            bound = signature.bind(*args, **kwargs)
            for name in ("transformer_layer_spec", "mtp_block_spec", "hybrid_stack_spec"):
                if bound.arguments.get(name) is not None:
                    bound.arguments[name] = with_burst_attention(bound.arguments[name])
            args, kwargs = bound.args, bound.kwargs
        init(*args, **kwargs)

    return wrapped


def _with_fused_loss(init: Callable[..., None]) -> Callable[..., None]:
    """A model's constructor, whose model fuses its loss where the flag asks for it."""
    from burst_mcore.megatron.fused_loss import fuse_loss

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if fused_loss_is_chosen():
            fuse_loss(self)

    return wrapped


def _refusing_a_fused_loss(init: Callable[..., None]) -> Callable[..., None]:
    """A language model's constructor, which refuses a loss that its class would not fuse."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        names = {base.__name__ for base in type(self).__mro__}
        if fused_loss_is_chosen() and names.isdisjoint({"GPTModel", "HybridModel"}):
            raise ValueError(f"--burst-fused-loss serves GPTModel and HybridModel, not {type(self).__name__}")
        init(self, *args, **kwargs)

    return wrapped


def _refusing_beside_burst(init: Callable[..., None]) -> Callable[..., None]:
    """A stock core attention's constructor, which refuses to be built where burst was asked for."""
    signature = inspect.signature(init)

    def wrapped(*args: Any, **kwargs: Any) -> None:
        attention_type = signature.bind(*args, **kwargs).arguments.get("attention_type")
        if attention_type == "self" and burst_is_chosen():
            raise ValueError(
                "--context-parallel-attention-backend burst was asked for, but this model builds "
                f"{type(args[0]).__name__}: the flag serves GPTModel and HybridModel; for others put "
                "burst_mcore.megatron.spec.core_attention_spec() into the model's spec"
            )
        init(*args, **kwargs)

    return wrapped
