"""What a model does with its batches: a class for each way, chosen when the model is prepared.

ShardedBatch  trusts what it is given, as loops and loaders shard it: `initialize`, `parallelize`
WholeBatch    shards what it is given, which is whole on every rank: Accelerate with cp_size
LoadedBatch   shards what all ranks of a group have alike, and trusts other batches: Accelerate with sp_size
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from burst_mcore.agreement.groups import integers_of
from burst_mcore.attention.agree import agreement_of
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import unshard
from burst_mcore.loss.whole import gathered
from burst_mcore.recurrent.bound import mixers_of
from burst_mcore.rollouts.columns import IGNORED, TREE, WEIGHTS, Columns
from burst_mcore.transformers.agreement import meet
from burst_mcore.transformers.data.batches import OF_TOWERS, apart, digest_of_batch, documents, summary
from burst_mcore.transformers.data.loader import shard_of_whole_batch
from burst_mcore.transformers.errors import RefusedError, refuse
from burst_mcore.transformers.models.attention import Sequence
from burst_mcore.transformers.models.sequence import KEEP, Forward, SequenceParallel, kept, tokens_of
from burst_mcore.transformers.models.supported import asks_for_fused_head, switched_attention
from burst_mcore.transformers.models.vision import whole_arguments

logger = logging.getLogger("burst_mcore")

CACHE_NAMES = ("past_key_values", "cache")
"""Argument of a forward, and field of its output, that holds a cache: "cache" from transformers 5.24 on."""
OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments of a forward that a model without a loss does not get."""


@dataclass(eq=False)
class _Forwards:
    """Forwards over a shard of a batch, which is given or sharded here, and over tokens beside a cache.

    Before a forward over a shard the ranks exchange positions and numbers of labels, a few bytes a token: so
    each knows the documents of the whole sequence, and by how many labels the loss is divided where the
    caller (the Trainer) does not give `num_items_in_batch` itself.
    """

    of: SequenceParallel

    def _sharded(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward over a shard, with labels (training, evaluation) or without."""
        if not self.of.makes_loss:
            arguments = {name: x for name, x in arguments.items() if name not in OF_LOSS}
        columns = Columns.taken(arguments)
        beside = ("a cache", cache_name(arguments)), ("TRL's fused head", asks_for_fused_head(arguments))
        types = self._types(arguments)
        inputs = ("attention of the caller's own", self.of.trusted), ("a mask of types of tokens", types)
        towers = ("towers", self.of.text is not None)
        topology = Topology.single() if self.of.group is None else self.of.topology
        with agreement_of(topology).refusing():
            refuse("tree", columns.why_unsupported(self.of.model, *beside, *inputs, towers))
            self._refuse_whole_answers(arguments)
            arguments, positions, valid = self._own(arguments)
            self._refuse_columns({WEIGHTS: columns.weights}, positions.shape)
        has_loss = arguments.get("shift_labels") is not None
        numbers = *positions.shape, valid, columns.number, has_loss, bool(types)
        lengths, valid = self._compared(meet(topology, "a forward over shards", *numbers))
        whole = self._whole(positions, lengths).cpu()
        arguments |= {name: self._whole(x, lengths) for name, x in types.items()}
        ends = () if columns.tree is not None else _packed(documents(whole))
        refuse("tree", columns.why_not_its_depths(whole))
        n, last, most = whole.shape[1], int(whole.max()), self.of.most_positions
        if most is not None and last >= most:  # on all ranks alike
            text = f"the model has embeddings of {most} positions, the sequence has {last + 1}"
            raise RefusedError("position_ids", f"{text}: cut the sample, or pack shorter documents")
        if has_loss:
            arguments["labels"] = arguments["shift_labels"]
            if arguments.get("num_items_in_batch") is None:
                arguments["num_items_in_batch"] = positions.new_tensor(max(valid, 1))
        if self.of.topology.size > 1 or has_loss:
            arguments["use_cache"] = self.of.topology.size == 1 and bool(arguments.get("use_cache"))
        sequence = Sequence(self.of.topology, self.of.config, n, ends, last, columns, positions)
        if not has_loss:
            return sequence, arguments, _unchanged
        if asks_for_fused_head(arguments):
            return sequence, arguments, lambda out: self.of.with_whole_tokens(out, positions.shape[1])
        return sequence, arguments, self.of.with_whole_loss

    def _own(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor, int]:
        """Check this rank's part of a batch; return its arguments, positions and number of labels."""
        refuse("model", None if self.of.trusted else switched_attention(self.of.model))
        ids = tokens_of(arguments)
        positions, labels, shifted = (arguments.get(x) for x in ("position_ids", "labels", "shift_labels"))
        if positions is None and isinstance(ids, Tensor) and self.of.topology.size == 1:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
            text = "a forward over sharded sequences needs position_ids beside input_ids or inputs_embeds"
            raise RefusedError("position_ids", f"{text}: take batches from burst.shard_loader or cp.loader")
        if positions.dim() == 2 and len(positions) == 1:
            positions = positions.expand(ids.shape[0], -1)
        self._refuse_columns({**arguments, "position_ids": positions}, ids.shape[:2])
        if shifted is None and labels is not None:
            if self.of.topology.size > 1:
                text = "labels must be shifted before the sequence is sharded: give shift_labels"
                raise RefusedError("labels", f"{text}, as burst.shard_loader and cp.loader do")
            shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        mask = arguments.get("attention_mask")
        if isinstance(mask, dict):
            raise RefusedError("attention_mask", "masks by kinds of layers are not supported: give one")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            raise RefusedError("attention_mask", "take padding out, by burst.shard_loader or cp.loader")
        arguments = {**arguments, "position_ids": positions, "attention_mask": None, "shift_labels": shifted}
        if shifted is None:
            return {name: x for name, x in arguments.items() if name != "shift_labels"}, positions, 0
        return arguments, positions, self._counted(ids, shifted)

    def _refuse_whole_answers(self, arguments: dict[str, Any]) -> None:
        """Raise RefusedError where a shard is asked for what only the whole sequence has."""
        if self.of.group is None:
            return
        of_config = getattr(self.of.model.config, "output_router_logits", False)
        balances = arguments.get("output_router_logits", of_config)
        every_shard = "it would choose in every shard: leave it out. generate sets it, and needs use_cache"
        for name, asked, why in (
            (KEEP, kept(arguments) is not None, every_shard),
            ("cache", arguments.get("use_cache"), "a shard has none to return: leave use_cache out"),
            ("output_attentions", arguments.get("output_attentions"), "attention weights are never made"),
            ("auxiliary loss", balances, "a loss that balances experts is no sum over tokens of a shard"),
        ):
            refuse(name, why if asked else None)

    def _counted(self, ids: Tensor, shifted: Tensor) -> int:
        """Return the number of labels. Numbers beyond the vocabulary would fail later, on this rank alone."""
        settings: Any = self.of.model.config
        size = getattr(settings.get_text_config(), "vocab_size", float("inf"))
        known = self.of.text is None and not ids.is_floating_point()  # tokens of images may be beyond
        valid, ends = shifted != IGNORED, ids.aminmax() if known else ()
        count, *tokens = torch.stack([valid.sum(), *shifted.where(valid, 0).aminmax(), *ends]).tolist()
        if not 0 <= min(tokens) <= max(tokens) < size:
            numbers = f"[0, {size}), or {IGNORED} for no label, got {min(tokens)} to {max(tokens)}"
            raise RefusedError("labels", f"tokens and labels must be in {numbers}")
        return int(count)

    def _refuse_columns(self, arguments: dict[str, Any], shape: torch.Size) -> None:
        """Raise RefusedError for columns that do not go with a shard of the tokens."""
        for name, x in arguments.items():
            value = [*x.shape] if isinstance(x, Tensor) else type(x).__name__
            if name in ("position_ids", WEIGHTS, self.of.types) and x is not None and value != [*shape]:
                raise RefusedError(name, f"they must be {[*shape]} as the tokens are, got {value}")
            if name in OF_TOWERS and x is not None:
                raise RefusedError("batch", f"{name} are merged with whole sequences: give inputs_embeds")

    def _types(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Return the column of which the model makes its masks, by its name, if it came."""
        return {name: x for name, x in arguments.items() if name == self.of.types and x is not None}

    def _compared(self, numbers: list[list[int]]) -> tuple[list[int], int]:
        """Return (tokens of each rank, labels of all ranks), if the numbers of all ranks go together."""
        batch, lengths, labels, trees, *columns = (list(column) for column in zip(*numbers, strict=True))
        if len(set(batch)) > 1:
            raise RefusedError("batch", f"the ranks of the CP group have {batch} rows of one batch")
        for name, column in zip(("shift_labels", self.of.types), columns, strict=True):
            differ = f"ranks {_where(column)} of the CP group have {name}, the others none"
            refuse("labels" if name == "shift_labels" else "batch", differ if len({*column}) > 1 else None)
        refuse("tree", "ranks of a CP group have different trees" if len({*trees}) > 1 else None)
        return lengths, sum(labels)

    def _whole(self, positions: Tensor, lengths: list[int]) -> Tensor:
        """Return the positions of the whole sequence, [rows, tokens]."""
        if self.of.group is None:
            return positions
        longest = max(lengths)
        mine = nn.functional.pad(positions, (0, longest - positions.shape[1])).contiguous()
        every = [torch.empty_like(mine) for _ in lengths]
        dist.all_gather(every, mine, group=self.of.group)
        parts = [x[:, :n] for x, n in zip(every, lengths, strict=True)]
        try:
            return unshard(parts, 1, layout=self.of.config.layout)
        except ValueError as error:
            text = f"{error}. Was the batch sharded by another, or is this generate without its cache?"
            raise RefusedError("layout", text) from None

    def _cached(self, arguments: dict[str, Any], whole: bool) -> bool:
        """Return whether a forward has a cache, or makes one, as MiniMax does of a whole batch."""
        makes = whole and arguments.get("use_cache") and mixers_of(self.of.model)
        return cache_name(arguments) is not None or bool(makes)

    def _sharded_here(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward whose batch is whole on every rank, and shard it; what comes back is whole.

        In training with labels no logits come back: the loss is made.
        """
        labelled = any(arguments.get(name) is not None for name in ("labels", "shift_labels"))
        meet(self.of.topology, "a forward over whole batches")
        keep = kept(arguments)
        columns, others, seen = self._columns(arguments)
        sharding = {**self.of.sharding, "whole": False}
        part, batch = shard_of_whole_batch(columns | seen, sharding, self.of.group)
        part = {name: x for name, x in part.items() if name not in (KEEP, *seen)}
        if labelled and keep is not None:
            raise RefusedError(KEEP, "a loss is of all tokens: leave it out, or the labels")
        tokens = tokens_of(arguments).shape[1]
        fused = asks_for_fused_head(arguments)
        if not labelled and not fused:
            part.pop("shift_labels")
        sequence, part, finish = self._sharded(part)
        local, mine = tokens_of(part).shape[1], self.of.choose(keep, tokens, part)
        if self.of.text is not None:
            device = tokens_of(part).device
            part |= whole_arguments(columns, others, batch, device)
            sequence = replace(sequence, entering=batch["position_ids"].to(device))
        if fused:  # of labels that are not shifted TRL expects one number fewer than tokens
            return sequence, part, lambda out: self.of.with_whole_tokens(out, local, tokens - 1)

        def whole(out: Any) -> Any:
            out = finish(out)
            if labelled and (self.of.model.training or self.of.loss_only):
                out["logits"] = None
            return self.of.with_whole_outputs(out, local, tokens, mine)

        return sequence, part, whole

    def _columns(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Return (columns of tokens, other columns, what ranks compare of these) of whole arguments."""
        columns: dict[str, Any] = {**arguments, KEEP: kept(arguments)}
        columns, others = (columns, {}) if self.of.text is None else apart(columns)
        seen = {
            f"of {name} {i}": summary(each)
            for name, x in arguments.items()
            if name in others or isinstance(x, list | tuple)
            for i, each in enumerate(tree_leaves(x))
            if isinstance(each, Tensor)
        }
        return columns, others, seen

    def _alike(self, arguments: dict[str, Any]) -> bool:
        """Return whether all ranks of the group were given the same arguments. Collective over the group."""
        if self.of.group is None:
            return True
        meet(self.of.topology, "a forward over whole batches, or shards")
        columns, _, seen = self._columns(arguments)
        return len({*map(tuple, integers_of(self.of.group, [digest_of_batch(columns | seen)]))}) == 1

    def _generating(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward of `generate`, with a cache: ranks have all tokens; a prompt is sharded here."""
        if arguments.get("labels") is not None or arguments.get("shift_labels") is not None:
            raise RefusedError("labels", "a forward with a cache has no loss")
        before, n = _tokens_of_cache(arguments), tokens_of(arguments).shape[1]
        layers = getattr(arguments.get(cache_name(arguments) or ""), "layers", ())
        if any(hasattr(layer, "max_cache_len") for layer in layers):
            raise RefusedError("cache", "static caches are unsupported: use the default, a DynamicCache")
        if self.of.group is not None and (before or n == 1):  # each rank goes on by itself
            positions, here = apart(arguments)[0].get("position_ids"), torch.arange(before, before + n)
            whole = positions is None or torch.equal(positions.cpu(), here.expand(positions.shape))
        else:
            whole = self._alike(arguments)
        if not whole:
            text = "a forward with a cache takes all tokens on every rank of a group, as generate does"
            raise RefusedError("cache", f"{text}: these are a shard, or other ranks have other tokens")
        if before or n == 1 or self.of.group is None or mixers_of(self.of.model):  # no rank has all states
            return Sequence(Topology.single(), self.of.config, before + n), arguments, _unchanged
        return self._prompt(arguments, n)

    def _prompt(self, arguments: dict[str, Any], n: int) -> Forward:
        """Prepare a forward over a prompt of n tokens, sharded here; its cache has all on every rank."""
        from transformers import DynamicCache

        mask = arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())):
            raise RefusedError("attention_mask", "prompts must be of one length: padding is not supported")
        name, group, layout = cache_name(arguments), self.of.group, self.of.config.layout
        assert name is not None and group is not None
        cache, beside = arguments[name], (name, "use_cache", "cache_position")
        sequence, part, finish = self._sharded_here({k: x for k, x in arguments.items() if k not in beside})
        part |= {name: DynamicCache(), "use_cache": True}  # without a model's config it keeps all tokens

        def whole(out: Any) -> Any:
            made = cache_name(out)
            assert made is not None
            for number, layer in enumerate(out[made].layers):
                shards = layer.keys, layer.values
                cache.update(*(gathered(x, group, layout, dim=2)[:, :, :n] for x in shards), number)
            out[made] = cache
            return finish(out)

        return sequence, part, whole


class WholeBatch(_Forwards):
    """Shards what it is given: every rank of a group has the whole batch, and gets whole outputs."""

    def forward(self, arguments: dict[str, Any]) -> Forward:
        """Return the forward over this rank's shard of a whole batch, or over all tokens beside a cache."""
        shared = self.of.group is not None
        cached = self._cached(arguments, shared)
        if (shared or self.of.text is not None) and (asks_for_fused_head(arguments) or not cached):
            return self._sharded_here(arguments)
        return self._generating(arguments) if cached else self._sharded(arguments)


@dataclass(eq=False)
class ShardedBatch(_Forwards):
    """Trusts what it is given: each rank's shard of a batch, with its positions and shifted labels.

    Batches beside a cache are whole here too, and those for TRL's fused head whose labels are not shifted.
    """

    _warned: bool = False

    def forward(self, arguments: dict[str, Any]) -> Forward:
        """Return the forward over the shard that this rank was given."""
        whole = self.of.group is not None and arguments.get("shift_labels") is None
        if arguments.get(TREE) is None and whole and asks_for_fused_head(arguments):
            return self._sharded_here(arguments)
        if arguments.get(TREE) is None and self._cached(arguments, whole):
            return self._generating(arguments)
        sequence, arguments, finish = self._sharded(arguments)
        if finish is _unchanged:
            self._warn_of_own_loss()
        return sequence, arguments, finish

    def _warn_of_own_loss(self) -> None:
        """Say, once, how a loss is made of a shard's logits, where this forward seems to be for that."""
        trains = self.of.model.training and torch.is_grad_enabled() and self.of.group is not None
        if trains and not self._warned and dist.get_rank() == 0:
            how = "(sum of this rank's losses, number of its labels), or its gradient is wrong"
            loss = f"make its loss with burst.whole_loss or cp.whole_loss{how}"
            logger.warning("a training forward over shards has no labels: %s", loss)
        self._warned = self._warned or trains


@dataclass(eq=False)
class LoadedBatch(_Forwards):
    """Shards batches that all ranks of a group have alike, as of Accelerate's loaders, and trusts others."""

    alone: bool = False
    """Whether an evaluation's batch that differs by rank, without shift_labels, is of this rank alone."""

    def __post_init__(self) -> None:
        self._sharding = WholeBatch(self.of)
        self._trusting = ShardedBatch(self.of) if self.of.text is None else self._sharding

    def forward(self, arguments: dict[str, Any]) -> Forward:
        """Return the forward over this rank's shard, or over a batch of this rank alone."""
        labelled = arguments.get("shift_labels") is not None or arguments.get(TREE) is not None
        is_shard = (self.of.text is None and labelled) or asks_for_fused_head(arguments)
        alone = self.alone and not (self.of.model.training or is_shard)
        if not (alone and cache_name(arguments)) and self._alike(arguments):
            return self._sharding.forward(arguments)
        return self._of_this_rank(arguments) if alone else self._trusting.forward(arguments)

    def _of_this_rank(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward of this rank alone over whole sequences, as if no rank shared them."""
        alone = copy(self.of)
        alone.group, alone.topology = None, Topology.single()
        here = WholeBatch(alone)
        return here._generating(arguments) if cache_name(arguments) else here._sharded_here(arguments)


def cache_name(arguments: Mapping[str, Any]) -> str | None:
    """Return the name under which arguments or outputs of a forward have a cache; None if they have none."""
    return next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)


def _unchanged(out: Any) -> Any:
    return out


def _tokens_of_cache(arguments: dict[str, Any]) -> int:
    """Return how many tokens the cache of a forward holds; a cache of states alone counts none."""
    name = cache_name(arguments)
    return 0 if name is None or all(arguments[name].is_linear) else int(arguments[name].get_seq_length())


def _packed(ends: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """cu_seqlens of the rows; () where no row has more than one document."""
    return ends if any(len(row) > 2 for row in ends) else ()


def _where(flags: list[int]) -> list[int]:
    return [rank for rank, flag in enumerate(flags) if flag]
