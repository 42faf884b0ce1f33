"""Hooks around the forward of a model whose ranks share sequences; whole outputs from those of shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, positions
from burst_mcore.loss.whole import Factor, WholeLoss, WholeTokens
from burst_mcore.recurrent.bound import awaits_mask, missing_calls, mixers_of
from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models import supported
from burst_mcore.transformers.models.attention import Sequence, running
from burst_mcore.transformers.models.randomness import noise_of_whole, own_draws
from burst_mcore.words import brief

KEEP = "logits_to_keep"
"""The argument of a forward: of how many of the last tokens, or of which tokens, it returns logits."""
Finish = Callable[[Any], Any]
"""Turns a forward's own output into the caller's."""
Forward = tuple[Sequence, dict[str, Any], Finish]
"""A forward of this rank: over which sequence, with which arguments, and what its output becomes."""
attached: WeakSet[SequenceParallel] = WeakSet()
"""The hooks of all models that are prepared."""


@dataclass(eq=False)
class SequenceParallel:
    """Hooks around a causal LM's forward, one object for each model.

    Before it the strategy says on which tokens this rank works. Behind it the loss of the whole sequence
    stands where the model's own was.
    """

    model: nn.Module
    """What is called: the model of transformers, or a wrapper of it."""
    inner: nn.Module
    """The model of transformers."""
    topology: Topology = field(init=False)
    group: dist.ProcessGroup | None = field(init=False)
    """The CP group; None for one rank."""
    config: BurstConfig = field(init=False)
    sharding: dict[str, Any] = field(init=False)
    """How batches are sharded: keyword arguments of `ShardedLoader`."""
    shares_towers: bool = field(init=False)
    """Whether the ranks share the images of a batch, of which each makes features of some."""
    batches: Any = field(init=False)
    """What the model does with its batches: of `strategies`, chosen by whoever prepares it."""
    loss_only: bool = False
    """Whether a whole batch of an evaluation returns no logits beside its loss."""
    factor: Factor | None = None
    """Of a rank's part of a gradient, where gradients are not the means of all ranks."""
    has_warned: bool = False
    """Whether a training forward without labels was warned of."""
    trusted: bool = False
    """Whether attention that does not come here is accepted: it is the caller's, and handles shards."""

    def __post_init__(self) -> None:
        attached.add(self)
        self.text: nn.Module | None = supported.text_tower(self.inner)
        """The text tower of a model that has others beside: batches are whole until they enter it."""
        self.types = supported.types_of(self.inner)
        """The column of a batch of which the model makes its masks, if any. It gets the whole column."""
        self.max_positions = supported.position_table(self.inner)
        """Positions that the model has embeddings for; None where positions are computed."""
        self.makes_loss = supported.makes_loss(self.inner)
        """Whether the model has a head that makes a loss; without one it gets no labels."""
        self._open: list[tuple[ExitStack, Sequence, Finish, bool]] = []
        """Of each forward that runs, last whether its caller asked for a tuple."""
        self._names = [*inspect.signature(self.model.forward).parameters]
        self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.model.register_forward_hook(self._behind, with_kwargs=True, always_call=True)

    def _before(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        as_tuple = arguments.get("return_dict", getattr(self.model.config, "return_dict", True)) is False
        arguments |= {"return_dict": True} if as_tuple else {}
        supports = getattr(self.model, "_supports_logits_to_keep", None)
        if KEEP in arguments and not (supports and supports()):
            del arguments[KEEP]  # the model ignores it in one process, too
        sequence, arguments, finish = self.batches.forward(arguments)
        stack = ExitStack()
        stack.enter_context(running(sequence))
        if awaits_mask(self.model) and self.text is None:
            arguments["attention_mask"] = sequence.mixing or arguments.get("attention_mask")
        if sequence.topology.size > 1:
            tokens = tokens_of(arguments)
            stack.enter_context(own_draws(sequence.topology.rank, tokens.device))
            stack.enter_context(noise_of_whole(self.model, tokens.shape[1] / sequence.tokens))
        self._open.append((stack, sequence, finish, as_tuple))
        return (), arguments

    def _behind(self, _: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if not self._open:  # the hook before it raised
            return out
        stack, sequence, finish, as_tuple = self._open.pop()
        stack.close()
        if out is None:  # the forward raised
            return None
        self._refuse_other_attention(sequence)
        out = finish(out)
        return out.to_tuple() if as_tuple and not isinstance(out, Tensor) else out

    def _refuse_other_attention(self, sequence: Sequence) -> None:
        """Raise UnsupportedError if attention did not come here: it saw this rank's shard alone."""
        if self.trusted or sequence.last is None:  # of whole sequences each rank may attend as it will
            return
        places = [
            f"{path} ({type(m).__name__})"
            for path, m in supported.attention_modules(self.model).items()
            if m not in sequence.reached
        ]
        if sequence.mixing is not None:
            places += missing_calls(self.model, sequence.mixing)
        if places or not (sequence.reached or mixers_of(self.model)):
            elsewhere = "attends, or mixes tokens, elsewhere than by transformers' interface"
            where = ", ".join(places[:3]) or "no attention module was found"
            raise UnsupportedError("model", f"{type(self.model).__name__} {elsewhere}: {where}")

    def with_whole_loss(self, out: Any) -> Any:
        """Return the output of a shard's forward with the loss of the whole sequence."""
        if isinstance(out, Tensor):  # numbers of tokens, in the place of an output
            return out
        out["loss"] = WholeLoss.apply(out["loss"], self.group, self.factor)  # type: ignore[no-untyped-call]
        return out

    def with_whole_tokens(self, out: Any, local: int, end: int | None = None) -> Any:
        """Return the output of TRL's head with numbers of whole sequences to `end`, not of `local` tokens."""
        out = self.with_whole_loss(out)
        return out if self.group is None else self.with_whole_outputs(out, local, end, None)

    def with_whole_outputs(self, out: Any, local: int, tokens: int | None, is_local: Tensor | None) -> Any:
        """Return the output of a shard's forward over `local` tokens as that of the whole sequence.

        is_local: of `choose`.
        """
        for name, x in [(name, x) for name, x in out.items() if x is not None]:
            if name == "logits" and is_local is not None:
                part = x.where(is_local.to(x.device)[:, None], 0)
                out[name] = WholeLoss.apply(part, self.group, self.factor)  # type: ignore[no-untyped-call]
            elif isinstance(x, tuple):
                out[name] = tuple(y if y is None else self._gathered(y)[:, :tokens] for y in x)
            elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == local:
                out[name] = self._gathered(x)[:, :tokens]
        return out

    def _gathered(self, x: Tensor) -> Tensor:
        """Return [rows, tokens, ...] of the whole sequence."""
        if self.group is None:
            return x
        sequence: Tensor = WholeTokens.apply(x, self.group, self.config.layout, self.factor)  # type: ignore[no-untyped-call]
        return sequence

    def choose(self, keep: Tensor | None, tokens: int, arguments: dict[str, Any]) -> Tensor | None:
        """Have a forward over a shard make the logits of tokens that are chosen among all.

        Every rank makes as many; those of another rank's tokens are left out behind the forward.

        Args:
            keep: of `kept`, the same on all ranks.
            tokens: of the whole sequence, without padding for the layout.

        Returns:
            Which of the chosen tokens are this rank's; None where all tokens of the shard are kept.
        """
        if keep is None:
            return None
        try:
            indices = torch.arange(tokens)[keep if keep.dim() else slice(-int(keep), None)]
        except IndexError:
            indices = keep[None]
        if indices.dim() > 1:
            text = f"it must be a number of last tokens, or indices [chosen] of {tokens} tokens"
            raise UnsupportedError(KEEP, f"{text}, got {brief(keep.tolist())}")
        layout, size = Layout.of(self.config.layout), self.topology.size
        shard = positions(layout.padded(tokens, size), rank=self.topology.rank, size=size, layout=layout)
        rows = torch.full((len(shard) * size,), -1).scatter(0, shard, torch.arange(len(shard)))[indices]
        arguments[KEEP] = rows.clamp(min=0)
        return rows >= 0


def evaluates() -> bool:
    """Return whether none of the prepared models is training."""
    return not any(sequence.model.training for sequence in attached)


def kept(arguments: dict[str, Any]) -> Tensor | None:
    """Return the tokens whose logits are asked for: a number of the last, or indices; None for all."""
    keep = arguments.get(KEEP)
    return None if isinstance(keep, int | None) and not keep else torch.as_tensor(keep).cpu()


def tokens_of(arguments: dict[str, Any]) -> Any:
    """Return input_ids, or the embeddings in their place."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids
