"""The flags that the launcher adds to Megatron's arguments, and their configuration."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import math
from argparse import SUPPRESS
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Never

from burst_mcore.attention.geometry.cuts import check_keep
from burst_mcore.attention.kernels.table import KERNELS
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Policy, Segment
from burst_mcore.config import SETTINGS, BurstConfig
from burst_mcore.megatron.rules import Settings, judge, of_recompute
from burst_mcore.rates import Rates
from burst_mcore.words import REMOVED


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "burst attention" to Megatron's parser, without flags that a patched Megatron has."""
    flags = parser._option_string_actions
    if "--burst-recompute" in flags:
        return parser
    parser.error = partial(_error, parser.error, flags)  # type: ignore[method-assign]
    group = parser.add_argument_group(title="burst attention")
    if "--context-parallel-attention-backend" not in flags:
        group.add_argument(
            "--context-parallel-attention-backend",
            choices=("default", "burst"),
            default="default",
            help="Core attention under context parallelism: Megatron's own, or BurstAttention.",
        )
    for name in SETTINGS:
        group.add_argument(flag_of(name), **_argument(name))
    for name in REMOVED:
        group.add_argument(flag_of(name), type=partial(_removed, name), default=SUPPRESS, help=SUPPRESS)
    group.add_argument(
        "--burst-rates",
        nargs=3,
        type=_rate,
        metavar=("INTRA", "INTER", "TFLOPS"),
        help="For auto: GB/s that a rank sends within its node and to others, TFLOP/s of the kernel.",
    )
    group.add_argument(
        "--burst-mla-latent",
        choices=("off", "on", "auto"),
        help="Under multi-latent attention the latent rotates between ranks, and not K and V; auto: where "
        "the cost model predicts a gain. Default: off.",
    )
    group.add_argument(
        "--burst-fused-loss",
        action="store_true",
        help="Fuse the LM head with its loss: no logits in training, gradients in one pass.",
    )
    group.add_argument(
        "--burst-recompute",
        choices=("full", "attention", "segment"),
        help="What checkpointed layers keep of attention: nothing (full), all (attention), or the end of the "
        "sequence (segment). Without --recompute-granularity, checkpoints every layer.",
    )
    group.add_argument(
        "--burst-recompute-keep",
        type=_share,
        metavar="F",
        help="For segment: the share of the sequence to keep, from 0 to 1, or auto.",
    )
    group.add_argument(
        "--burst-recompute-memory-gb",
        type=float,
        metavar="GB",
        help="For --burst-recompute-keep auto: GB of a rank that may be kept at once.",
    )
    group.add_argument(
        "--burst-recompute-offload", action="store_true", help="Keep it in pinned host memory."
    )
    return parser


def _error(error: Callable[[str], Never], flags: Collection[str], message: str) -> Never:
    """Report an error of the command line; beside an unknown flag of ours, the nearest flag."""
    unknown = [word for word in message.split() if word.startswith("--burst-") and "unrecognized" in message]
    nearest = [flag for word in unknown for flag in difflib.get_close_matches(word, flags, n=1)]
    error(f"{message}; did you mean {', '.join(nearest)}?" if nearest else message)


def recompute_policy(arguments: argparse.Namespace) -> Policy:
    """Return the recompute policy of the flags; `Full()` without such flags.

    Raises:
        ValueError: flags that contradict each other, or that have no effect beside Megatron's flags.
    """
    judge(of_recompute(Settings(arguments, uses_burst=uses_burst(arguments))))
    name, keep = (getattr(arguments, f"burst_{x}", None) for x in ("recompute", "recompute_keep"))
    if name in (None, "full"):
        return Full()
    policy = KeepAttention() if keep is None else Segment(keep, arguments.burst_recompute_memory_gb)
    return Offload(policy) if arguments.burst_recompute_offload else policy


def burst_config(arguments: argparse.Namespace) -> BurstConfig:
    """Return the configuration of the flags. Raises ValueError as `BurstConfig`."""
    return BurstConfig(**{name: setting(arguments, name) for name in SETTINGS})


def setting(arguments: argparse.Namespace, name: str) -> Any:
    """Return the value of the flag of a field of BurstConfig; the default without the flag."""
    value = getattr(arguments, f"burst_{name}", None)
    return SETTINGS[name].default if value is None else value


def in_effect(arguments: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments for a list of them: without a flag, a setting has its default."""
    values = {f"burst_{name}": setting(arguments, name) for name in SETTINGS}
    return argparse.Namespace(**vars(arguments) | values | {"burst_mla_latent": mla_latent(arguments)})


def mla_latent(arguments: argparse.Namespace) -> str:
    """Return whether the latent of MLA layers rotates: "on", "off", or "auto"."""
    return getattr(arguments, "burst_mla_latent", None) or "off"


def given_flags(arguments: argparse.Namespace, *names: str) -> list[str]:
    """Return the flags of these options on the command line, with any value."""
    return [flag_of(name) for name in names if getattr(arguments, f"burst_{name}", None) is not None]


def uses_burst(arguments: argparse.Namespace) -> bool:
    """Return whether the flag, or a spec of this package, chooses burst attention."""
    spec: list[str] = getattr(arguments, "spec", None) or [""]
    return burst_asked_for(arguments) or str(spec[0]).startswith("burst_mcore")


def burst_asked_for(arguments: argparse.Namespace) -> bool:
    """Return whether the flag chooses burst attention."""
    return getattr(arguments, "context_parallel_attention_backend", "default") == "burst"


def rates_of(arguments: argparse.Namespace) -> Rates | None:
    """Return the rates of --burst-rates. Raises ValueError as `Rates`."""
    values = getattr(arguments, "burst_rates", None)
    if values is None:
        return None
    intra, inter, teraflops = values
    return Rates(intra=intra * 1e9, inter=inter * 1e9, compute=teraflops * 1e12)


def _rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")


def _share(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        return check_keep(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, or auto, got {text!r}") from None


def flag_of(name: str) -> str:
    """Return the flag of a field of BurstConfig or another option; --burst-no-... if it is on by default."""
    off = name in SETTINGS and SETTINGS[name].default is True
    return f"--burst-{'no-' * off}{name.replace('_', '-')}"


def _argument(name: str) -> dict[str, Any]:
    default, legal, meaning = SETTINGS[name]
    options = {"dest": f"burst_{name}", "default": None, "help": f"{meaning} Default: {default}."}
    if default is False:
        return {**options, "action": "store_true"}
    if default is True:
        return {**options, "action": "store_false", "help": f"Turns off: {meaning[0].lower()}{meaning[1:]}"}
    legal = ("auto", *KERNELS) if name == "kernel" else legal
    words = ", ".join(legal) if isinstance(legal, tuple) else legal
    options["help"] = f"{meaning} Legal: {words}. Default: {default}."
    return {**options, "metavar": name.upper(), "type": partial(_value, name)}


def _removed(name: str, text: str) -> Never:
    raise argparse.ArgumentTypeError(REMOVED[name])


def _value(name: str, text: str) -> Any:
    """Convert the text of a flag to a value of BurstConfig."""
    value: Any = int(text) if isinstance(SETTINGS[name].default, int) and text.isdigit() else text
    try:
        BurstConfig(**{name: value})
        if name == "kernel" and value not in ("auto", *KERNELS):
            raise ValueError(f"unknown kernel {value!r}; legal: auto, {', '.join(KERNELS)}")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return value


def packed_of(arguments: argparse.Namespace) -> str:
    """Return the sharding of packed batches: "whole" if documents may end at any token, else "documents"."""
    at_any_token = getattr(arguments, "dataloader_inter_document_masking", False)
    each_alone = getattr(arguments, "sft", False)
    return "whole" if at_any_token and not each_alone else "documents"


def command_line() -> Any:
    """Return Megatron's parsed arguments; an empty Namespace, of which all is default, if there are none."""
    try:
        from megatron.training import global_vars
    except ImportError:
        return argparse.Namespace()
    return global_vars._GLOBAL_ARGS or argparse.Namespace()
