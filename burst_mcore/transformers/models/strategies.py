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

from burst_mcore.attention.agree import agreement_of, meet
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.layout import unshard
from burst_mcore.loss.checksums import checksum
from burst_mcore.loss.whole import gathered
from burst_mcore.recurrent.bound import mixers_of
from burst_mcore.rollouts.columns import IGNORED, TREE, WEIGHTS, Columns
from burst_mcore.transformers.data.batches import OF_TOWERS, digest_of_batch, documents, of_tokens
from burst_mcore.transformers.data.loader import shard_of_whole_batch
from burst_mcore.transformers.errors import UnsupportedError, refuse
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

    hooks: SequenceParallel

    def _sharded(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward over a shard, with labels (training, evaluation) or without."""
        if not self.hooks.makes_loss:
            arguments = {name: x for name, x in arguments.items() if name not in OF_LOSS}
        columns = Columns.taken(arguments)
        types = {name: x for name, x in arguments.items() if name == self.hooks.types and x is not None}
        obstacles = {
            "a cache": cache_name(arguments),
            "TRL's fused head": asks_for_fused_head(arguments),
            "attention of the caller's own": self.hooks.trusted,
            "a mask of types of tokens": types,
            "towers": self.hooks.text is not None,
        }
        topology = Topology.single() if self.hooks.group is None else self.hooks.topology
        with agreement_of(topology).refusing():
            refuse("tree", columns.why_unsupported(self.hooks.model, obstacles))
            self._refuse_whole_answers(arguments)
            arguments, positions, labels = self._checked(arguments)
            self._refuse_columns({WEIGHTS: columns.weights}, positions.shape)
        has_loss = arguments.get("shift_labels") is not None
        numbers = *positions.shape, labels, columns.number, has_loss, bool(types)
        lengths, all_labels = self._compared(meet(topology, "a forward over shards", *numbers))
        all_positions = self._gathered(positions, lengths).cpu()
        arguments |= {name: self._gathered(x, lengths) for name, x in types.items()}
        ends = () if columns.tree is not None else documents(all_positions)
        if all(len(row) <= 2 for row in ends):
            ends = ()
        refuse("tree", columns.why_not_its_depths(all_positions))
        n, last, limit = all_positions.shape[1], int(all_positions.max()), self.hooks.max_positions
        if limit is not None and last >= limit:  # on all ranks alike
            text = f"the model has embeddings of {limit} positions, the sequence has {last + 1}"
            raise UnsupportedError("position_ids", f"{text}: cut the sample, or pack shorter documents")
        if has_loss:
            arguments["labels"] = arguments["shift_labels"]
            if arguments.get("num_items_in_batch") is None:
                arguments["num_items_in_batch"] = positions.new_tensor(max(all_labels, 1))
        if self.hooks.topology.size > 1 or has_loss:
            arguments["use_cache"] = self.hooks.topology.size == 1 and bool(arguments.get("use_cache"))
        sequence = Sequence(self.hooks.topology, self.hooks.config, n, ends, last, columns, positions)
        if not has_loss:
            return sequence, arguments, _unchanged
        if asks_for_fused_head(arguments):
            return sequence, arguments, lambda out: self.hooks.with_whole_tokens(out, positions.shape[1])
        return sequence, arguments, self.hooks.with_whole_loss

    def _checked(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], Tensor, int]:
        """Check this rank's part of a batch; return its arguments, positions and number of labels."""
        refuse("model", None if self.hooks.trusted else switched_attention(self.hooks.model))
        ids = tokens_of(arguments)
        positions, labels, targets = (arguments.get(x) for x in ("position_ids", "labels", "shift_labels"))
        if positions is None and isinstance(ids, Tensor) and self.hooks.topology.size == 1:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        if not isinstance(ids, Tensor) or not isinstance(positions, Tensor):
            text = "a forward over sharded sequences needs position_ids beside input_ids or inputs_embeds"
            raise UnsupportedError("position_ids", f"{text}: use batches of burst.shard_loader or cp.loader")
        if positions.dim() == 2 and len(positions) == 1:
            positions = positions.expand(ids.shape[0], -1)
        self._refuse_columns({**arguments, "position_ids": positions}, ids.shape[:2])
        if targets is None and labels is not None:
            if self.hooks.topology.size > 1:
                text = "labels must be shifted before the sequence is sharded: give shift_labels"
                raise UnsupportedError("labels", f"{text}, as burst.shard_loader and cp.loader do")
            targets = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        mask = arguments.get("attention_mask")
        if isinstance(mask, dict):
            raise UnsupportedError("attention_mask", "masks by kinds of layers are not supported: give one")
        if _hides_tokens(mask):
            raise UnsupportedError("attention_mask", "take padding out, by burst.shard_loader or cp.loader")
        arguments = {**arguments, "position_ids": positions, "attention_mask": None, "shift_labels": targets}
        if targets is None:
            del arguments["shift_labels"]
            return arguments, positions, 0
        return arguments, positions, self._counted(ids, targets)

    def _refuse_whole_answers(self, arguments: dict[str, Any]) -> None:
        """Raise UnsupportedError where a shard is asked for what only the whole sequence has."""
        if self.hooks.group is None:
            return
        of_config = getattr(self.hooks.model.config, "output_router_logits", False)
        balances = arguments.get("output_router_logits", of_config)
        every_shard = "it would choose in every shard: leave it out. generate sets it, and needs use_cache"
        for name, is_set, why in (
            (KEEP, kept(arguments) is not None, every_shard),
            ("cache", arguments.get("use_cache"), "a shard has none to return: leave use_cache out"),
            ("output_attentions", arguments.get("output_attentions"), "attention weights are never made"),
            ("auxiliary loss", balances, "a loss that balances experts is no sum over tokens of a shard"),
        ):
            refuse(name, why if is_set else None)

    def _counted(self, ids: Tensor, labels: Tensor) -> int:
        """Return the number of labels. Numbers beyond the vocabulary would fail later, on this rank alone."""
        settings: Any = self.hooks.model.config
        size = getattr(settings.get_text_config(), "vocab_size", float("inf"))
        has_text_alone = self.hooks.text is None and not ids.is_floating_point()  # images' may be beyond
        valid, ends = labels != IGNORED, ids.aminmax() if has_text_alone else ()
        count, *tokens = torch.stack([valid.sum(), *labels.where(valid, 0).aminmax(), *ends]).tolist()
        if not 0 <= min(tokens) <= max(tokens) < size:
            numbers = f"[0, {size}), or {IGNORED} for no label, got {min(tokens)} to {max(tokens)}"
            raise UnsupportedError("labels", f"tokens and labels must be in {numbers}")
        return int(count)

    def _refuse_columns(self, arguments: dict[str, Any], shape: torch.Size) -> None:
        """Raise UnsupportedError for columns that do not go with a shard of the tokens."""
        for name, x in arguments.items():
            value = [*x.shape] if isinstance(x, Tensor) else type(x).__name__
            if name in ("position_ids", WEIGHTS, self.hooks.types) and x is not None and value != [*shape]:
                raise UnsupportedError(name, f"they must be {[*shape]} as the tokens are, got {value}")
            if name in OF_TOWERS and x is not None:
                raise UnsupportedError("batch", f"{name} are merged with whole sequences: give inputs_embeds")

    def _compared(self, numbers: list[list[int]]) -> tuple[list[int], int]:
        """Return (tokens of each rank, labels of all ranks), if the numbers of all ranks go together."""
        batch, lengths, labels, trees, *columns = (list(column) for column in zip(*numbers, strict=True))
        if len(set(batch)) > 1:
            raise UnsupportedError("batch", f"the ranks of the CP group have {batch} rows of one batch")
        for name, column in zip(("shift_labels", self.hooks.types), columns, strict=True):
            ranks = [rank for rank, has_column in enumerate(column) if has_column]
            differ = f"ranks {ranks} of the CP group have {name}, the others none"
            refuse("labels" if name == "shift_labels" else "batch", differ if len({*column}) > 1 else None)
        refuse("tree", "ranks of a CP group have different trees" if len({*trees}) > 1 else None)
        return lengths, sum(labels)

    def _gathered(self, part: Tensor, lengths: list[int]) -> Tensor:
        """Return a column of the whole sequence, such as positions, [rows, tokens]."""
        if self.hooks.group is None:
            return part
        part = nn.functional.pad(part, (0, max(lengths) - part.shape[1])).contiguous()
        parts = [torch.empty_like(part) for _ in lengths]
        dist.all_gather(parts, part, group=self.hooks.group)
        parts = [x[:, :n] for x, n in zip(parts, lengths, strict=True)]
        try:
            return unshard(parts, 1, layout=self.hooks.config.layout)
        except ValueError as error:
            text = f"{error}. Was the batch sharded by another, or is this generate without its cache?"
            raise UnsupportedError("layout", text) from None

    def _has_cache(self, arguments: dict[str, Any], is_whole: bool) -> bool:
        """Return whether a forward has a cache, or makes one, as MiniMax does of a whole batch."""
        makes_one = is_whole and arguments.get("use_cache") and mixers_of(self.hooks.model)
        return cache_name(arguments) is not None or bool(makes_one)

    def _sharded_here(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward whose batch is whole on every rank, and shard it; what comes back is whole.

        In training with labels no logits come back: the loss is made.
        """
        has_labels = any(arguments.get(name) is not None for name in ("labels", "shift_labels"))
        meet(self.hooks.topology, "a forward over whole batches")
        keep = kept(arguments)
        columns, checksums = self._columns(arguments)
        sharding = {**self.hooks.sharding, "whole": False}
        part, batch = shard_of_whole_batch(columns | checksums, sharding, self.hooks.group)
        part = {name: x for name, x in part.items() if name not in (KEEP, *checksums)}
        if has_labels and keep is not None:
            raise UnsupportedError(KEEP, "a loss is of all tokens: leave it out, or the labels")
        tokens = tokens_of(arguments).shape[1]
        of_fused_head = asks_for_fused_head(arguments)
        if not has_labels and not of_fused_head:
            part.pop("shift_labels")
        sequence, part, finish = self._sharded(part)
        local, is_local = tokens_of(part).shape[1], self.hooks.choose(keep, tokens, part)
        if self.hooks.text is not None:
            device = tokens_of(part).device
            part |= whole_arguments(arguments, columns, batch, device)
            sequence = replace(sequence, entering=batch["position_ids"].to(device))
        if of_fused_head:  # of labels that are not shifted TRL expects one number fewer than tokens
            return sequence, part, lambda out: self.hooks.with_whole_tokens(out, local, tokens - 1)

        def with_whole_outputs(out: Any) -> Any:
            out = finish(out)
            if has_labels and (self.hooks.model.training or self.hooks.loss_only):
                out["logits"] = None
            return self.hooks.with_whole_outputs(out, local, tokens, is_local)

        return sequence, part, with_whole_outputs

    def _columns(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return (columns of tokens, shapes and checksums of all other tensors) of whole arguments."""
        columns: dict[str, Any] = {**arguments, KEEP: kept(arguments)}
        columns = columns if self.hooks.text is None else of_tokens(columns)
        return columns, {
            f"of {name} {i}": torch.tensor([*each.shape, int(checksum(each))])
            for name, x in arguments.items()
            if columns.get(name) is not x or isinstance(x, list | tuple)
            for i, each in enumerate(tree_leaves(x))
            if isinstance(each, Tensor)
        }

    def _alike(self, arguments: dict[str, Any]) -> bool:
        """Return whether all ranks of the group were given the same arguments. Collective over the group."""
        if self.hooks.group is None:
            return True
        columns, checksums = self._columns(arguments)
        digest = digest_of_batch(columns | checksums)
        numbers = meet(self.hooks.topology, "a forward over whole batches, or shards", digest)
        return all(each == numbers[0] for each in numbers)

    def _generating(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward of `generate`, with a cache: ranks have all tokens; a prompt is sharded here."""
        if arguments.get("labels") is not None or arguments.get("shift_labels") is not None:
            raise UnsupportedError("labels", "a forward with a cache has no loss")
        cache: Any = arguments.get(cache_name(arguments) or "")
        if any(hasattr(layer, "max_cache_len") for layer in getattr(cache, "layers", ())):
            raise UnsupportedError("cache", "static caches are unsupported: use the default, a DynamicCache")
        has_tokens = cache is not None and not all(cache.is_linear)  # a cache of states alone counts none
        before, n = int(cache.get_seq_length()) if has_tokens else 0, tokens_of(arguments).shape[1]
        if self.hooks.group is not None and (before or n == 1):  # each rank goes on by itself
            positions, places = of_tokens(arguments).get("position_ids"), torch.arange(before, before + n)
            is_whole = positions is None or torch.equal(positions.cpu(), places.expand(positions.shape))
        else:
            is_whole = self._alike(arguments)
        if not is_whole:
            text = "a forward with a cache takes all tokens on every rank of a group, as generate does"
            raise UnsupportedError("cache", f"{text}: these are a shard, or other ranks have other tokens")
        if before or n == 1 or self.hooks.group is None or mixers_of(self.hooks.model):  # none has all states
            return Sequence(Topology.single(), self.hooks.config, before + n), arguments, _unchanged
        return self._prompt(arguments, n)

    def _prompt(self, arguments: dict[str, Any], n: int) -> Forward:
        """Prepare a forward over a prompt of n tokens, sharded here; its cache has all on every rank."""
        from transformers import DynamicCache

        if _hides_tokens(arguments.get("attention_mask")):
            raise UnsupportedError("attention_mask", "prompts must be of one length: padding is unsupported")
        name, group, layout = cache_name(arguments), self.hooks.group, self.hooks.config.layout
        assert name is not None and group is not None
        cache, beside = arguments[name], (name, "use_cache", "cache_position")
        sequence, part, finish = self._sharded_here({k: x for k, x in arguments.items() if k not in beside})
        part |= {name: DynamicCache(), "use_cache": True}  # without a model's config it keeps all tokens

        def with_whole_cache(out: Any) -> Any:
            output_name = cache_name(out)
            assert output_name is not None
            for number, layer in enumerate(out[output_name].layers):
                shards = layer.keys, layer.values
                cache.update(*(gathered(x, group, layout, dim=2)[:, :, :n] for x in shards), number)
            out[output_name] = cache
            return finish(out)

        return sequence, part, with_whole_cache


class WholeBatch(_Forwards):
    """Shards what it is given: every rank of a group has the whole batch, and gets whole outputs."""

    def forward(self, arguments: dict[str, Any]) -> Forward:
        """Return the forward over this rank's shard of a whole batch, or over all tokens beside a cache."""
        shares = self.hooks.group is not None
        has_cache = self._has_cache(arguments, shares)
        if (shares or self.hooks.text is not None) and (asks_for_fused_head(arguments) or not has_cache):
            return self._sharded_here(arguments)
        return self._generating(arguments) if has_cache else self._sharded(arguments)


class ShardedBatch(_Forwards):
    """Trusts what it is given: each rank's shard of a batch, with its positions and shifted labels.

    Batches beside a cache are whole here too, and those for TRL's fused head whose labels are not shifted.
    """

    def forward(self, arguments: dict[str, Any]) -> Forward:
        """Return the forward over the shard that this rank was given."""
        is_whole = self.hooks.group is not None and arguments.get("shift_labels") is None
        if arguments.get(TREE) is None and is_whole and asks_for_fused_head(arguments):
            return self._sharded_here(arguments)
        if arguments.get(TREE) is None and self._has_cache(arguments, is_whole):
            return self._generating(arguments)
        sequence, arguments, finish = self._sharded(arguments)
        if finish is _unchanged:
            self._warn_of_own_loss()
        return sequence, arguments, finish

    def _warn_of_own_loss(self) -> None:
        """Say, once, how a loss is made of a shard's logits, where this forward seems to be for that."""
        trains = self.hooks.model.training and torch.is_grad_enabled() and self.hooks.group is not None
        if trains and not self.hooks.has_warned and dist.get_rank() == 0:
            how = "(sum of this rank's losses, number of its labels), or its gradient is wrong"
            loss = f"make its loss with burst.whole_loss or cp.whole_loss{how}"
            logger.warning("a training forward over shards has no labels: %s", loss)
        self.hooks.has_warned = self.hooks.has_warned or trains


@dataclass(eq=False)
class LoadedBatch(_Forwards):
    """Shards batches that all ranks of a group have alike, as of Accelerate's loaders, and trusts others."""

    alone: bool = False
    """Whether an evaluation's batch that differs by rank, without shift_labels, is of this rank alone."""

    def forward(self, arguments: dict[str, Any]) -> Forward:
        """Return the forward over this rank's shard, or over a batch of this rank alone."""
        is_prepared = arguments.get("shift_labels") is not None or arguments.get(TREE) is not None
        is_shard = (self.hooks.text is None and is_prepared) or asks_for_fused_head(arguments)
        may_be_alone = self.alone and not (self.hooks.model.training or is_shard)
        if not (may_be_alone and cache_name(arguments)) and self._alike(arguments):
            return WholeBatch(self.hooks).forward(arguments)
        if may_be_alone:
            return self._of_this_rank(arguments)
        trusting = ShardedBatch if self.hooks.text is None else WholeBatch
        return trusting(self.hooks).forward(arguments)

    def _of_this_rank(self, arguments: dict[str, Any]) -> Forward:
        """Prepare a forward of this rank alone over whole sequences, as if no rank shared them."""
        hooks = copy(self.hooks)
        hooks.group, hooks.topology = None, Topology.single()
        batches = WholeBatch(hooks)
        return batches._generating(arguments) if cache_name(arguments) else batches._sharded_here(arguments)


def cache_name(arguments: Mapping[str, Any]) -> str | None:
    """Return the name under which arguments or outputs of a forward have a cache; None if they have none."""
    return next((name for name in CACHE_NAMES if arguments.get(name) is not None), None)


def _unchanged(out: Any) -> Any:
    return out


def _hides_tokens(mask: Any) -> bool:
    """Return whether an attention_mask is more than one that hides no token, bool [rows, tokens]."""
    return mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()))
