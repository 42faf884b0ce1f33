"""Hooks around the forward of a model that sees a shard of each sequence."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst_mcore.agreement import Collective
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, positions, unshard
from burst_mcore.loss.whole import Factor, WholeLoss, WholeTokens
from burst_mcore.recurrent.bound import awaits_mask, missing_calls, mixers_of
from burst_mcore.rollouts.columns import IGNORED, TREE, WEIGHTS, Columns
from burst_mcore.transformers.agreement import meet
from burst_mcore.transformers.data.batches import digest_of_batch, documents, prepared
from burst_mcore.transformers.data.loader import shard_of_whole_batch
from burst_mcore.transformers.errors import RefusedError, refuse
from burst_mcore.transformers.models.attention import Sequence, running
from burst_mcore.transformers.models.prefill import Prefill, cache_name
from burst_mcore.transformers.models.randomness import noise_of_whole, own_draws
from burst_mcore.transformers.models.served import FEATURES, attention_modules, switched_attention
from burst_mcore.transformers.models.trl import asks_for_fused_head
from burst_mcore.words import brief

logger = logging.getLogger("burst_mcore")

KEEP = "logits_to_keep"
"""The argument of a forward: of how many of the last tokens, or of which tokens, it returns logits."""
OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments of a forward that a model without a loss does not get."""
Finish = Callable[[Any], Any]
"""Turns a forward's own output into the caller's."""
attached: WeakSet[SequenceParallel] = WeakSet()
"""The hooks of all models that are prepared."""


@dataclass(eq=False)
class SequenceParallel:
    """Hooks around a causal LM's forward, one object for each model.

    Before it: the ranks of the sequence group exchange positions and numbers of labels, a few bytes a token
    once a forward, from which every rank knows the documents of the whole sequence and by how many labels the
    loss is divided, where the caller (the Trainer) does not give `num_items_in_batch` itself. Behind it: the
    loss of the whole sequence stands where the model's own was.
    """

    model: nn.Module
    topology: Topology
    group: dist.ProcessGroup | None
    """The sequence group; None for one rank."""
    config: BurstConfig
    deals: bool = False
    """Whether batches are whole on every rank, and dealt here."""
    evaluations: set[int] = field(default_factory=set)
    """Iterations over whole batches that are open: what is not trained on is dealt here meanwhile."""
    loss_only: bool = False
    """Whether an evaluation's batch that is dealt here returns no logits beside its loss."""
    evaluates_whole: bool = False
    """Whether an evaluation batch without shift_labels is a whole one, of this rank alone."""
    most_positions: int | None = None
    """Positions that the model has embeddings for; None where positions are computed."""
    types: str | None = None
    """The column of a batch of which the model makes its masks: see `types_of`. It gets the whole column."""
    dealing: dict[str, Any] = field(default_factory=dict)
    """How batches are dealt: keyword arguments of `ShardedLoader`."""
    factor: Factor | None = None
    """Of a rank's part of a gradient, where gradients are not the means of all ranks."""
    _open: list[tuple[ExitStack, Sequence, Finish]] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _warned: bool = False
    trusted: bool = False
    """Whether attention that does not come here is accepted: it is the caller's, and handles shards."""
    makes_loss: bool = True
    """Whether the model has a head that makes a loss; without one it gets no labels."""

    def __post_init__(self) -> None:
        attached.add(self)
        self._names = [*inspect.signature(self.model.forward).parameters]
        self.model.register_forward_pre_hook(self._before, with_kwargs=True)
        self.model.register_forward_hook(self._behind, with_kwargs=True, always_call=True)

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        as_tuple = arguments.get("return_dict", getattr(self.model.config, "return_dict", True)) is False
        arguments |= {"return_dict": True} if as_tuple else {}
        supports = getattr(self.model, "_supports_logits_to_keep", None)
        if KEEP in arguments and not (supports and supports()):
            del arguments[KEEP]  # the model ignores it in one process, too
        finish: Finish = _unchanged
        lacks = {x for x in ("labels", "shift_labels", "position_ids") if arguments.get(x) is None}
        # An evaluation's loader gives whole batches with both kinds of labels; its iteration may have ended.
        evaluated = lacks == {"position_ids"} or bool(self.evaluations)
        deals = self.deals or (evaluated and not self.model.training)
        whole = self.group is not None and (deals or arguments.get("shift_labels") is None)
        # MiniMax makes its cache in its forward
        cached = cache_name(arguments) or (whole and arguments.get("use_cache") and mixers_of(self.model))
        if arguments.get(TREE) is not None and not deals:
            sequence, arguments, finish = self._sharded(arguments)
        elif whole and (asks_for_fused_head(arguments) or (deals and not cached)):
            sequence, arguments, finish = self._dealt_here(arguments)
        elif self.evaluates_whole and whole and not (deals or self.model.training):
            sequence = self._alone(arguments)
        elif cached:
            sequence, arguments, finish = self._generating(arguments)
        else:
            sequence, arguments, finish = self._sharded(arguments)
        stack = ExitStack()
        stack.enter_context(running(sequence))
        if awaits_mask(self.model):
            arguments["attention_mask"] = sequence.mixing or arguments.get("attention_mask")
        if sequence.topology.size > 1:
            tokens = _tokens(arguments)
            stack.enter_context(own_draws(sequence.topology.rank, tokens.device))
            stack.enter_context(noise_of_whole(self.model, tokens.shape[1] / sequence.tokens))
        self._open.append((stack, sequence, _tuple_of(finish) if as_tuple else finish))
        return (), arguments

    def _behind(self, _: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        if not self._open:  # the hook before it raised
            return out
        stack, sequence, finish = self._open.pop()
        stack.close()
        if out is None:  # the forward raised
            return None
        self._refuse_other_attention(sequence)
        return finish(out)

    def _with_whole_loss(self, out: Any) -> Any:
        """Return the output of a shard's forward with the loss of the whole sequence."""
        if isinstance(out, Tensor):  # numbers of tokens, in the place of an output
            return out
        out["loss"] = WholeLoss.apply(out["loss"], self.group, self.factor)  # type: ignore[no-untyped-call]
        return out

    def _with_whole_tokens(self, out: Any, local: int, end: int | None = None) -> Any:
        """Return the output of TRL's head with numbers of whole sequences to `end`, not of `local` tokens."""
        out = self._with_whole_loss(out)
        for name, x in out.items() if self.group is not None else ():
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == local:
                out[name] = self._gathered(x)[:, :end]
        return out

    def _gathered(self, x: Tensor) -> Tensor:
        """Return [rows, tokens, ...] of the whole sequence."""
        whole: Tensor = WholeTokens.apply(x, self.group, self.config.layout, self.factor)  # type: ignore[no-untyped-call]
        return whole

    def _with_whole_outputs(self, out: Any, local: int, tokens: int, mine: Tensor | None) -> Any:
        """Return the output of a shard's forward over `local` tokens as that of the whole sequence.

        mine: of `_choose`.
        """
        for name, x in [(name, x) for name, x in out.items() if x is not None]:
            if name == "logits" and mine is not None:
                part = x.where(mine.to(x.device)[:, None], 0)
                out[name] = WholeLoss.apply(part, self.group, self.factor)  # type: ignore[no-untyped-call]
            elif isinstance(x, tuple):
                out[name] = tuple(y if y is None else self._gathered(y)[:, :tokens] for y in x)
            elif isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == local:
                out[name] = self._gathered(x)[:, :tokens]
        return out

    def _dealt_here(self, arguments: dict[str, Any]) -> tuple[Sequence, dict[str, Any], Finish]:
        """Prepare a forward whose batch is whole on every rank, and deal it; what comes back is whole.

        In training with labels no logits come back: the loss is made.
        """
        assert self.group is not None
        labelled = any(arguments.get(name) is not None for name in ("labels", "shift_labels"))
        meet(self.topology, "a forward over whole batches")
        keep = _kept(arguments)
        part = shard_of_whole_batch({**arguments, KEEP: keep}, self.dealing, self.group)
        part.pop(KEEP, None)
        if labelled and keep is not None:
            raise RefusedError(KEEP, "a loss is of all tokens: leave it out, or the labels")
        tokens = _tokens(arguments).shape[1]
        fused = asks_for_fused_head(arguments)
        if not labelled and not fused:
            part.pop("shift_labels")
        sequence, part, finish = self._sharded(part)
        local, mine = _tokens(part).shape[1], self._choose(keep, tokens, part)
        if fused:  # of labels that are not shifted TRL expects one number fewer than tokens
            return sequence, part, lambda out: self._with_whole_tokens(out, local, tokens - 1)

        def whole(out: Any) -> Any:
            out = finish(out)
            if labelled and (self.model.training or self.loss_only):
                out["logits"] = None
            return self._with_whole_outputs(out, local, tokens, mine)

        return sequence, part, whole

    def _choose(self, keep: Tensor | None, tokens: int, arguments: dict[str, Any]) -> Tensor | None:
        """Have a forward over a shard make the logits of tokens that are chosen among all.

        Every rank makes as many; those of another rank's tokens are left out behind the forward.

        Args:
            keep: of `_kept`, the same on all ranks.
            tokens: of the whole sequence, without padding for the layout.

        Returns:
            Which of the chosen tokens are this rank's; None where all tokens of the shard are kept.
        """
        if keep is None:
            return None
        try:
            chosen = torch.arange(tokens)[keep if keep.dim() else slice(-int(keep), None)]
        except IndexError:
            chosen = keep[None]
        if chosen.dim() > 1:
            text = f"it must be a number of last tokens, or indices [chosen] of {tokens} tokens"
            raise RefusedError(KEEP, f"{text}, got {brief(keep.tolist())}")
        layout, size = Layout.of(self.config.layout), self.topology.size
        here = positions(layout.padded(tokens, size), rank=self.topology.rank, size=size, layout=layout)
        rows = torch.full((len(here) * size,), -1).scatter(0, here, torch.arange(len(here)))[chosen]
        arguments[KEEP] = rows.clamp(min=0)
        return rows >= 0

    def _refuse_other_attention(self, sequence: Sequence) -> None:
        """Raise RefusedError if attention did not come here: it saw this rank's shard alone."""
        if self.trusted or sequence.last is None:  # of whole sequences each rank may attend as it will
            return
        others = [
            f"{path} ({type(m).__name__})"
            for path, m in attention_modules(self.model).items()
            if m not in sequence.reached
        ]
        if sequence.mixing is not None:
            others += missing_calls(self.model, sequence.mixing)
        if others or not (sequence.reached or mixers_of(self.model)):
            raise RefusedError(
                "model",
                f"{type(self.model).__name__} attends, or mixes tokens, elsewhere than by transformers' "
                f"interface: {', '.join(others[:3]) or 'no attention module was found'}",
            )

    def _sharded(self, arguments: dict[str, Any]) -> tuple[Sequence, dict[str, Any], Finish]:
        """Prepare a forward over a shard, with labels (training, evaluation) or without."""
        problem: Exception | None = None
        if not self.makes_loss:
            arguments = {name: x for name, x in arguments.items() if name not in OF_LOSS}
        positions, valid, columns = None, 0, Columns.taken(arguments)
        beside = ("a cache", cache_name(arguments)), ("TRL's fused head", asks_for_fused_head(arguments))
        types = self._types(arguments)
        own = ("attention of the caller's own", self.trusted), ("a mask of types of tokens", types)
        try:
            refuse("tree", columns.why_not_served(self.model, *beside, *own))
            self._refuse_whole_answers(arguments)
            arguments, positions, valid = self._own(arguments)
            self._refuse_columns({WEIGHTS: columns.weights}, positions.shape)
        except Exception as error:  # of any kind: the others must not wait for this rank
            problem, columns = error, Columns()
        has_loss = arguments.get("shift_labels") is not None
        lengths, valid = self._exchange(problem, positions, valid, columns.number, has_loss, bool(types))
        assert positions is not None
        whole = self._whole(positions, lengths).cpu()
        arguments |= {name: self._whole(x, lengths) for name, x in types.items()}
        ends = () if columns.tree is not None else _packed(documents(whole))
        refuse("tree", columns.why_not_its_depths(whole))
        self._refuse_long(int(whole.max()))
        if has_loss:
            arguments["labels"] = arguments["shift_labels"]
            if arguments.get("num_items_in_batch") is None:
                arguments["num_items_in_batch"] = positions.new_tensor(max(valid, 1))
        if self.topology.size > 1 or has_loss:
            arguments["use_cache"] = self.topology.size == 1 and bool(arguments.get("use_cache"))
        n, last = whole.shape[1], int(whole.max())
        sequence = Sequence(self.topology, self.config, n, ends, last, columns)
        if not has_loss:
            self._warn_of_own_loss()
            return sequence, arguments, _unchanged
        if asks_for_fused_head(arguments):
            return sequence, arguments, lambda out: self._with_whole_tokens(out, positions.shape[1])
        return sequence, arguments, self._with_whole_loss

    def _warn_of_own_loss(self) -> None:
        """Say, once, how a loss is made of a shard's logits, where this forward seems to be for that."""
        trains = self.model.training and torch.is_grad_enabled() and self.group is not None and not self.deals
        if trains and not self._warned and dist.get_rank() == 0:
            logger.warning(
                "a training forward over shards has no labels: make its loss with burst.whole_loss or "
                "cp.whole_loss(sum of this rank's losses, number of its labels), or its gradient is wrong"
            )
        self._warned = self._warned or trains

    def _refuse_long(self, last: int) -> None:
        """Raise RefusedError, on all ranks alike, if the model has no embedding for the last position."""
        if self.most_positions is not None and last >= self.most_positions:
            raise RefusedError(
                "position_ids",
                f"{type(self.model).__name__} has embeddings of {self.most_positions} positions, the "
                f"sequence has {last + 1}: cut the sample, or pack shorter documents",
            )

    def _alone(self, arguments: dict[str, Any]) -> Sequence:
        """Prepare a forward of this rank alone over whole sequences; the loss is the model's own."""
        new = _tokens(arguments)
        before, positions = _cached(arguments), arguments.get("position_ids")
        mask = arguments.get("attention_mask")
        ends: tuple[tuple[int, ...], ...] = ()
        if not before:  # of a batch that is padded on the right, or packed
            real = {} if mask is None else {"attention_mask": mask}
            place = {} if positions is None else {"position_ids": positions.expand(new.shape[:2])}
            ids = torch.zeros(new.shape[:2], dtype=torch.int64)
            types = self._types(arguments)
            columns = {name: x.cpu() for name, x in {**real, **place, **types}.items()}
            whole = prepared({"input_ids": ids, **columns}, multiple=1, types=self.types)
            ends = documents(whole["position_ids"])
            arguments |= {name: whole[name].to(x.device) for name, x in types.items()}
            arguments["attention_mask"] = None
        return Sequence(Topology.single(), self.config, before + new.shape[1], _packed(ends))

    def _own(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor, int]:
        """Check this rank's part of a batch; return its arguments, positions and number of labels."""
        refuse("model", None if self.trusted else switched_attention(self.model))
        ids = _tokens(arguments)
        positions, labels, shifted = (arguments.get(x) for x in ("position_ids", "labels", "shift_labels"))
        if positions is None and isinstance(ids, Tensor) and self.topology.size == 1:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
            raise RefusedError(
                "position_ids",
                "a forward over sharded sequences needs input_ids (or inputs_embeds) and position_ids: "
                "without, every rank would count from 0. Wrap the loader (burst.shard_loader, cp.loader), or "
                "deal them with the ids",
            )
        if positions.dim() == 2 and len(positions) == 1:
            positions = positions.expand(ids.shape[0], -1)
        self._refuse_columns({**arguments, "position_ids": positions}, ids.shape[:2])
        if shifted is None and labels is not None:
            if self.topology.size > 1:
                raise RefusedError(
                    "labels",
                    "labels must be shifted before the sequence is dealt: give shift_labels "
                    "(burst.shard_loader and cp.loader do). Shifted in a shard each seam loses a token",
                )
            shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        # TRL counts tokens by the mask that the adapter dealt; the positions say what it says.
        mask = None if asks_for_fused_head(arguments) else arguments.get("attention_mask")
        if isinstance(mask, dict):
            raise RefusedError("attention_mask", "masks by kinds of layers are not served: give one, of all")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            raise RefusedError("attention_mask", "take padding out, by burst.shard_loader or cp.loader")
        arguments = {**arguments, "position_ids": positions, "attention_mask": None, "shift_labels": shifted}
        if shifted is None:
            return {name: x for name, x in arguments.items() if name != "shift_labels"}, positions, 0
        return arguments, positions, self._counted(ids, shifted)

    def _refuse_whole_answers(self, arguments: dict[str, Any]) -> None:
        """Raise RefusedError where a shard is asked for what only the whole sequence has."""
        if self.group is None:
            return
        of_config = getattr(self.model.config, "output_router_logits", False)
        every_shard = (
            "it would choose tokens in every shard: leave it out, and choose in the gathered logits; "
            "generate sets it, and needs use_cache"
        )
        for name, asked, why in (
            (KEEP, _kept(arguments) is not None, every_shard),
            ("cache", arguments.get("use_cache"), "a shard has none to return: leave use_cache out"),
            ("output_attentions", arguments.get("output_attentions"), "attention weights are never made"),
            (
                "auxiliary loss",
                arguments.get("output_router_logits", of_config),
                "a loss balancing experts is no sum over tokens of a shard",
            ),
        ):
            refuse(name, why if asked else None)

    def _counted(self, ids: Tensor, shifted: Tensor) -> int:
        """Return the number of labels. Numbers beyond the vocabulary would fail later, on this rank alone."""
        settings: Any = self.model.config
        size = getattr(settings.get_text_config(), "vocab_size", float("inf"))
        valid, ends = shifted != IGNORED, () if ids.is_floating_point() else ids.aminmax()
        count, *tokens = torch.stack([valid.sum(), *shifted.where(valid, 0).aminmax(), *ends]).tolist()
        if not 0 <= min(tokens) <= max(tokens) < size:
            numbers = f"[0, {size}), or {IGNORED} for no label, got {min(tokens)} to {max(tokens)}"
            raise RefusedError("labels", f"tokens and labels must be in {numbers}")
        return int(count)

    def _refuse_columns(self, arguments: dict[str, Any], shape: torch.Size) -> None:
        """Raise RefusedError for columns that do not go with a shard of the tokens."""
        for name, x in arguments.items():
            came = [*x.shape] if isinstance(x, Tensor) else type(x).__name__
            if name in ("position_ids", WEIGHTS, self.types) and x is not None and came != [*shape]:
                raise RefusedError(name, f"they must be {[*shape]} as the tokens are, got {came}")
            if name in FEATURES and x is not None:
                raise RefusedError("batch", f"{name} are merged with whole sequences: give inputs_embeds")

    def _types(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Return the column of which the model makes its masks, by its name, if it came."""
        return {name: x for name, x in arguments.items() if name == self.types and x is not None}

    def _exchange(
        self, problem: Exception | None, positions: Tensor | None, valid: int, tree: int, *has: bool
    ) -> tuple[list[int], int]:
        """Return (tokens of each rank, labels of all ranks); an error of one rank is an error of all."""
        rows, tokens = (0, 0) if positions is None else positions.shape
        if self.group is None:
            if problem is not None:
                raise problem
            return [tokens], valid
        meet(self.topology, "a forward over shards")
        every = Collective(self.group).integers([problem is not None, rows, tokens, valid, tree, *has])
        failed, batch, lengths, labels, trees, *columns = (list(x) for x in zip(*every, strict=True))
        if problem is not None:
            raise problem
        if any(failed):
            raise RefusedError("another rank", f"ranks {_where(failed)} of the group refused their batch")
        if len(set(batch)) > 1:
            raise RefusedError("batch", f"the ranks of the sequence group have {batch} rows of one batch")
        for name, column in zip(("shift_labels", self.types), columns, strict=True):
            differ = f"ranks {_where(column)} of the sequence group have {name}, the others none"
            refuse("labels" if name == "shift_labels" else "batch", differ if len({*column}) > 1 else None)
        refuse("tree", "ranks of a sequence group have different trees" if len({*trees}) > 1 else None)
        return lengths, sum(labels)

    def _whole(self, positions: Tensor, lengths: list[int]) -> Tensor:
        """Return the positions of the whole sequence, [rows, tokens]."""
        if self.group is None:
            return positions
        longest = max(lengths)
        mine = nn.functional.pad(positions, (0, longest - positions.shape[1])).contiguous()
        every = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(every, mine, group=self.group)
        parts = [x[:, :n] for x, n in zip(every, lengths, strict=True)]
        try:
            return unshard(parts, 1, layout=self.config.layout)
        except ValueError as error:
            raise RefusedError(
                "layout", f"{error}. Was the batch dealt by another, or is this generate without its cache?"
            ) from None

    def _generating(self, arguments: dict[str, Any]) -> tuple[Sequence, dict[str, Any], Finish]:
        """Prepare a forward of `generate`, with a cache: ranks have all tokens; the prompt is dealt here."""
        if arguments.get("labels") is not None or arguments.get("shift_labels") is not None:
            raise RefusedError("labels", "a forward with a cache has no loss")
        new = _tokens(arguments)
        before, n = _cached(arguments), new.shape[1]
        layers = getattr(arguments.get(cache_name(arguments) or ""), "layers", ())
        if any(hasattr(layer, "max_cache_len") for layer in layers):
            raise RefusedError("cache", "static caches are unsupported: use the default, a DynamicCache")
        self._refuse_shards(arguments, before, n)
        if before or n == 1 or self.group is None or mixers_of(self.model):  # no rank has all states
            return Sequence(Topology.single(), self.config, before + n), arguments, _unchanged
        self._refuse_long(n - 1)
        prefill = Prefill(self.topology, self.group, self.config, n)
        behind = (0, prefill.padded - n)
        types = {k: nn.functional.pad(x, behind, value=-1) for k, x in self._types(arguments).items()}
        sequence = Sequence(self.topology, self.config, prefill.padded, last=n - 1)
        part = prefill.begin(arguments | types)
        local, mine = part["input_ids"].shape[1], self._choose(_kept(arguments), n, part)

        def whole(out: Any) -> Any:
            return self._with_whole_outputs(prefill.finish(out), local, n, mine)

        return sequence, part, whole

    def _refuse_shards(self, arguments: dict[str, Any], before: int, n: int) -> None:
        """Raise RefusedError where the tokens beside a cache are a shard, which would miss the others'."""
        positions = arguments.get("position_ids")
        if self.group is None:
            alike = True
        elif before or n == 1:  # each rank goes on by itself
            here = torch.arange(before, before + n)
            alike = positions is None or torch.equal(positions.cpu(), here.expand(positions.shape))
        else:
            tensors = {**arguments, KEEP: _kept(arguments)}
            alike = len({*map(tuple, Collective(self.group).integers([digest_of_batch(tensors)]))}) == 1
        if not alike:
            raise RefusedError(
                "cache",
                "a forward with a cache takes all tokens on every rank of a group, as generate does: these "
                "are a shard, or other ranks have other tokens. Leave the cache out",
            )


def _kept(arguments: dict[str, Any]) -> Tensor | None:
    """Return the tokens whose logits are asked for: a number of the last, or indices; None for all."""
    keep = arguments.get(KEEP)
    return None if isinstance(keep, int | None) and not keep else torch.as_tensor(keep).cpu()


def _unchanged(out: Any) -> Any:
    return out


def _tuple_of(finish: Finish) -> Finish:
    """Return `finish` for a caller who asked for a tuple, in the place of an output with names."""
    return lambda out: done if isinstance(done := finish(out), Tensor) else done.to_tuple()


def _tokens(arguments: dict[str, Any]) -> Any:
    """Return input_ids, or the embeddings in their place."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids


def _cached(arguments: dict[str, Any]) -> int:
    """Return how many tokens the cache of a forward holds; a cache of states alone counts none."""
    name = cache_name(arguments)
    return 0 if name is None or all(arguments[name].is_linear) else int(arguments[name].get_seq_length())


def _packed(ends: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """cu_seqlens of the rows; () where no row has more than one document."""
    return ends if any(len(row) > 2 for row in ends) else ()


def _where(flags: list[int]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if flag]
