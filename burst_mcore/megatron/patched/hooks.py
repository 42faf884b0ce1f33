"""Functions for patched lines of Megatron (see the folder patches/) and for the launcher.

Their names are a contract with patched checkouts: keep them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from burst_mcore.checkpointing import Full
from burst_mcore.megatron import arguments as flags
from burst_mcore.wrap import around, wrap

EVERY_LAYER = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Megatron's arguments that checkpoint every layer."""


def with_burst_attention(submodules: Any) -> Any:
    """Return a copy of the submodules of an attention module, with burst attention."""
    from burst_mcore.megatron import spec  # it imports Megatron's layers

    return spec.with_burst_attention(submodules)


def add_options(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options of burst attention to Megatron's parser."""
    refuse_lost_flags(sys.argv[1:])
    return flags.add_arguments(parser)


def checkpoint_every_layer(arguments: argparse.Namespace) -> None:
    """Let Megatron checkpoint every layer, unless a flag chooses the layers."""
    if arguments.recompute_granularity is None and not arguments.recompute_activations:
        vars(arguments).update({name: x for name, x in EVERY_LAYER.items() if vars(arguments)[name] is None})


def use_options(arguments: argparse.Namespace) -> None:
    """Check the options of burst attention, and put layout and recompute policy in effect.

    Illegal options end this process with one line and exit status 2, see `refuse`.
    """
    from megatron.core.models.common.language_module.language_module import LanguageModule

    from burst_mcore.megatron.checks import use_burst
    from burst_mcore.megatron.layouts import language_models
    from burst_mcore.megatron.recompute import use_recompute

    try:
        use_burst(arguments)
    except ValueError as error:
        refuse(str(error))
    for model in language_models():
        if model.__name__ == "HybridModel" and flags.uses_burst(arguments):  # from 0.19 on
            wrap(model, "__init__", _of_local_modules)
    policy = flags.recompute_policy(arguments)
    if policy != Full():  # else keep Megatron's, or the policy of a script's own use_recompute
        use_recompute(policy)
    if getattr(arguments, "burst_fused_loss", False):
        wrap(LanguageModule, "setup_embeddings_and_output_layer", _fused)


@around
def _of_local_modules(
    init: Callable, self: Any, config: Any, hybrid_stack_spec: Any, *args: Any, **kwargs: Any
) -> None:
    """Wrap HybridModel's constructor: scripts use TransformerEngine's modules, whatever the flags are."""
    from megatron.core.models.hybrid import hybrid_layer_specs

    from burst_mcore.megatron import spec

    if hybrid_stack_spec is hybrid_layer_specs.hybrid_stack_spec and config.transformer_impl == "local":
        hybrid_stack_spec = spec.hybrid_stack_spec(config)
    init(self, config, hybrid_stack_spec, *args, **kwargs)


@around
def _fused(set_up: Callable, self: Any) -> None:
    """Wrap the end of a language model's constructor: its loss is fused, or it raises as not supported."""
    if not _fuses(self):
        raise ValueError(f"--burst-fused-loss supports GPTModel and HybridModel, not {type(self).__name__}")
    set_up(self)
    fuse_losses([self])


def _fuses(module: Any) -> bool:
    return not {base.__name__ for base in type(module).__mro__}.isdisjoint({"GPTModel", "HybridModel"})


def fuse_losses(models: Sequence[Any]) -> None:
    """Fuse the LM head and loss of each GPTModel and HybridModel in `models`. ValueError as `fuse_loss`."""
    from burst_mcore.megatron.fused_loss import fuse_loss

    for module in filter(_fuses, [module for model in models for module in model.modules()]):
        fuse_loss(module)


def refuse_lost_flags(argv: Sequence[str]) -> None:
    """Raise an error if another flag of the command line overrides ours."""
    words = [word for word in argv if word.startswith(("--burst-", "--context-parallel-attention-backend"))]
    if words and any(word.split("=")[0] == "--yaml-cfg" for word in argv):
        refuse(f"--yaml-cfg replaces the command line, and {words[0]} with it: give flags alone")
    command = " ".join(argv).replace("=", " ")
    if "--context-parallel-attention-backend default" in command and "--spec burst_mcore" in command:
        refuse(
            "--spec burst_mcore... is of burst attention: drop --context-parallel-attention-backend default"
        )


def refuse(reason: str) -> NoReturn:
    """End this process with one line and exit status 2.

    Other ranks than 0 wait before they exit: torchrun ends all ranks after the first exit, and rank 0 may be
    slower. They print their reason, too, since flags of a node or a pipeline stage may concern one rank.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        time.sleep(5)
        reason = f"rank {rank}: {reason}"
    sys.stderr.write(f"burst_mcore.megatron: {reason}\n")
    sys.exit(2)
