"""parallelize: a model, and the mesh dim over which its sequences are sharded -> a model for any loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from burst_mcore.agreement.agreement import check_equal, on_all_ranks
from burst_mcore.attention.agree import meet
from burst_mcore.attention.api import burst_attention
from burst_mcore.attention.runtime.topology import Topology
from burst_mcore.checkpointing import Full, KeepAttention, Policy, Segment
from burst_mcore.config import BurstConfig
from burst_mcore.layout import Layout, positions
from burst_mcore.loss.causal_lm import patch_of
from burst_mcore.loss.statistics import TokenStats, divisors_of, statistics_of_call
from burst_mcore.loss.whole import WholeTokens, whole_mean
from burst_mcore.mask import Mask
from burst_mcore.rollouts import Folded
from burst_mcore.torch.reduction import WORDS, Reduction, refuse_wrapped
from burst_mcore.transformers.data.loader import ShardedLoader, shard_of_whole_batch
from burst_mcore.transformers.errors import UnsupportedError, refuse, refuse_versions
from burst_mcore.transformers.models.supported import is_of_transformers
from burst_mcore.transformers.prepare import SEQUENCE, TOWERS, fingerprint, prepare_model
from burst_mcore.wrap import while_set

T = TypeVar("T")
POLICIES: dict[str, Policy | None] = {
    "none": None,
    "full": Full(),
    "attention": KeepAttention(),
    "segment": Segment(0.5),
}
"""Words for recompute; a policy of burst_mcore.checkpointing says more."""
DIM = "cp"


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    config: BurstConfig | Mapping[str, Any] | None = None,
    loss: str = "fused",
    checkpointing: Policy | str = "none",
    reduction: str = "auto",
    towers: str = "shared",
) -> ContextParallel:
    """Prepare a model, in place, to train over sequences that are sharded over the ranks of a mesh dim.

    Call it before fully_shard or DDP, which must reduce gradients over dp x cp. Collective over all ranks.
    A causal LM of transformers needs no other change: `model(**cp.shard(batch)).loss` is the loss of the
    whole sequence on every rank; losses, gradients, norms and weights are those of one process. Of another
    model (`loss="model"`) the attention layers call `cp.attention`, and its loss is made by `cp.whole_loss`.

    Args:
        model: a causal LM of transformers, PEFT's adapters around it, or any module.
        mesh: the dim of a DeviceMesh whose ranks share sequences, as mesh["cp"]; a mesh with a dim "cp"; or
            the process group.
        config: of attention, a BurstConfig or its fields.
        loss: "fused" fuses the LM head with its loss, and makes no logits; "model" leaves both to the model.
        checkpointing: "none" leaves layers as they are set; "full", "attention", "segment", or a policy.
        reduction: how gradients are reduced over cp. "auto" follows from fully_shard or DDP; "mean" and "sum"
            are for callers who reduce gradients themselves.
        towers: of vision-language models. "shared" gives whole images out over the group; "whole" has every
            rank make the features of all images.

    Raises:
        UnsupportedError: what cannot be supported, by its name; ranks without an error get an OthersError.
    """
    group, settings, policy = on_all_ranks(
        lambda: _read(model, mesh, config, loss, checkpointing, reduction, towers)
    )
    check_equal("configuration", (group.size(), settings, loss, policy, reduction, towers))
    if is_of_transformers(model):
        options: dict[str, Any] = {"fused_loss": loss == "fused", "recompute": policy, "towers": towers}
        sequence = prepare_model(model, group=group, config=settings, **options)
        sequence.factor = factor = Reduction(model, group, reduction)
        return ContextParallel(model, group, sequence.topology, settings, factor, sequence.sharding)
    check_equal("model", fingerprint(model))
    topology, sharding = Topology.from_group(group), {"layout": settings.layout}
    meet(topology, "parallelize")
    cp = ContextParallel(model, group, topology, settings, Reduction(model, group, reduction), sharding)
    vars(model)[SEQUENCE] = cp
    return cp


@dataclass(eq=False, repr=False)
class ContextParallel:
    """What a training loop asks of the ranks that share sequences; made by `parallelize`."""

    model: nn.Module
    group: dist.ProcessGroup
    topology: Topology
    config: BurstConfig
    _factor: Reduction
    _sharding: dict[str, Any]

    def __post_init__(self) -> None:
        self.rank, self.size = self.group.rank(), self.group.size()
        self.layout = Layout.of(self.config.layout)

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole batch, which every rank of the group gives. Collective.

        Labels are shifted here, as shift_labels; positions, and what else has one entry for each token, are
        sharded by the same index. Documents are what cu_seqlens or restarting position_ids say. A model with
        towers shards batches itself: for it the whole batch comes back.

        Raises:
            UnsupportedError: a batch is not legal, or differs; ranks without an error get an OthersError.
        """
        columns = batch if isinstance(batch, Mapping) else {"input_ids": batch}
        return self._at("cp.shard", lambda: shard_of_whole_batch(columns, self._sharding, self.group)[0])

    def _at(self, sync_point: str, do: Callable[[], T]) -> T:
        """Return `do()`, to which all ranks of a sequence come, and which fails on all of them or on none.

        Tensor parallelism's neighbours would go on to the model's forward, and wait there for these ranks.
        """
        meet(self.topology, sync_point)
        tp = _tensor_parallel(self.model, self.group)
        return do() if tp is None else on_all_ranks(do, tp)

    def loader(
        self, data: Iterable[Any], *, own: bool = False, device: torch.device | str | None = None
    ) -> ShardedLoader:
        """Return a loader of this rank's parts of the batches that a DataLoader, or anything else, yields.

        Args:
            data: yields whole batches, the same on every rank of the group.
            own: every rank loads batches of its own, and all work on each of them in turn.
            device: of batches; by default that of the model's parameters.
        """
        device = device or next(iter(self.model.parameters()), torch.empty(0)).device
        loader = ShardedLoader(data, group=self.group, own=own, device=device, **self._sharding)
        original = loader.agreed
        loader.agreed = lambda load: self._at("cp.loader", lambda: original(load))  # type: ignore[method-assign]
        return loader

    def positions(self, tokens: int) -> Tensor:
        """Return which tokens of a sequence, padded to `padded(tokens)`, this rank has, in its order."""
        return positions(self.padded(tokens), rank=self.rank, size=self.size, layout=self.layout)

    def padded(self, tokens: int) -> int:
        """Return to how many tokens a sequence is padded when it is sharded."""
        return self.layout.padded(tokens, self.size)

    def gather(self, x: Tensor, tokens: int | None = None) -> Tensor:
        """Return [rows, tokens, ...] of the whole sequence, in its order, on every rank.

        Differentiable: a loss made of it, the same on every rank, has the gradient of one process.

        Args:
            x: [rows, local tokens, ...].
            tokens: of the whole sequence, without the padding for the layout; None keeps that.
        """
        sequence: Tensor = WholeTokens.apply(x, self.group, self.layout, self._factor)  # type: ignore[no-untyped-call]
        return sequence[:, :tokens]

    def whole_loss(self, total: Tensor, count: Tensor | float) -> Tensor:
        """Return the sum of all ranks' `total` over the sum of their `count`: the whole sequence's mean.

        For losses that are made of a shard's logits or numbers. Collective over the group.
        """
        return whole_mean(total, count, self.group if self.size > 1 else None, self._factor)

    def token_stats(
        self, model: nn.Module, batch: Mapping[str, Any], temperature: Tensor | float = 1.0
    ) -> TokenStats:
        """Return log-probabilities of labels, and entropies, of this rank's tokens, without logits.

        Entry t is of the label of token t, which is token t + 1; it is 0 where the label is ignored. Both
        have gradients. The LM head is fused, so that no rank makes logits of more than a chunk.

        Args:
            model: the model, or its DDP wrapper.
            batch: of `shard` or `loader`, with shift_labels.
            temperature: divisor of the logits; a number, or one for each token of this rank.

        Raises:
            UnsupportedError: another model, a loss not fused, no labels, odd temperatures.
        """
        read_labels = partial(self._labels, model, batch, temperature)
        labels = self._at("cp.token_stats", lambda: on_all_ranks(read_labels, self.group))
        _, patch = patch_of(self.model) or (None, None)
        if patch is None:
            raise UnsupportedError("loss", "the model's loss is not fused: use parallelize(loss='fused')")
        with while_set(patch, compute=partial(statistics_of_call, temperature)):
            statistics: Tensor = model(**batch)
        return TokenStats(*statistics.view(2, *labels.shape))

    def _labels(self, model: nn.Module, batch: Mapping[str, Any], temperature: Tensor | float) -> Tensor:
        """Return the labels of a call of `token_stats`, if that is legal."""
        if self._sharding.get("whole"):
            raise UnsupportedError("model", "token_stats is of shards, and batches with images are whole")
        labels: Tensor | None = batch.get("shift_labels")
        if labels is None:
            raise UnsupportedError("labels", "token_stats needs a batch with shift_labels, as cp shards it")
        if all(module is not self.model for module in model.modules()):
            raise UnsupportedError("model", "token_stats takes the model of this parallelize, or its wrapper")
        refuse("temperature", divisors_of(temperature, labels)[1])
        return labels

    def rollout_stats(self, model: nn.Module, folded: Folded, temperature: float = 1.0) -> TokenStats:
        """Return `token_stats` of folded rollouts, [rollouts, longest], on every rank, with gradients.

        Entry t of a rollout is of its token t + 1; it is 0 where that is no label. Collective.
        """
        of_row = self.token_stats(model, self.shard(folded.batch), temperature)
        return TokenStats(*(folded.unfold(self.gather(x, folded.tokens)) for x in of_row))

    def mask(
        self,
        mask: Mask | None = None,
        *,
        documents: Tensor | Iterable[int] | None = None,
        tokens: int | None = None,
    ) -> Mask:
        """Return a mask over the whole sequence, for `attention`: causal, if not given, within documents.

        Args:
            mask: over the whole sequence.
            documents: cu_seqlens of the sequence.
            tokens: of the whole sequence before padding, where documents end before.
        """
        mask = Mask.causal() if mask is None else mask
        if documents is None:
            return mask
        of_documents = Mask.documents(documents if isinstance(documents, Tensor) else [*documents])
        ends: list[int] = of_documents.document_ends.tolist()  # type: ignore[union-attr]  # it has some
        if tokens is not None and tokens < ends[-1]:
            raise UnsupportedError("mask", f"documents end at {ends[-1]}, beyond the {tokens} tokens")
        last = self.padded(ends[-1] if tokens is None else tokens)
        return mask & Mask.documents(ends if ends[-1] == last else [*ends, last])

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None, **options: Any) -> Tensor:
        """Attention of this rank's tokens to the whole sequence, for models that are not of transformers.

        Args:
            q, k, v: [batch, local tokens, heads, head_dim], after rotary embedding by `positions`.
            mask: over the whole sequence; by default causal.
            options: softmax_scale, softcap, sinks, ... as `burst_attention` has them.
        """
        options |= {"mask": Mask.causal() if mask is None else mask, "config": self.config}
        return burst_attention(q, k, v, topology=self.topology, **options)  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"ContextParallel(rank {self.rank} of {self.size}, layout {self.layout})"


def _read(
    model: Any, mesh: Any, config: Any, loss: Any, checkpointing: Any, reduction: Any, towers: Any
) -> tuple[dist.ProcessGroup, BurstConfig, Policy | None]:
    """Return (group, configuration, recompute policy) of the arguments, without communication."""
    if not isinstance(model, nn.Module):
        raise UnsupportedError("model", f"give the model itself, got {model!r}")
    if SEQUENCE in vars(model) or any(SEQUENCE in vars(module) for module in model.modules()):
        raise UnsupportedError("model", "it was prepared before: parallelize a model once, keep its result")
    refuse_wrapped(model)
    if is_of_transformers(model):
        refuse_versions("transformers")
    settings, policy = options_of(config, loss, checkpointing, towers)
    _refuse_word("reduction", reduction, WORDS)
    if not is_of_transformers(model):
        text = f"{type(model).__name__} is no causal LM of transformers"
        if loss == "fused":
            how = 'pass loss="model", call cp.attention in its layers, and make its loss by cp.whole_loss'
            raise UnsupportedError("loss", f"{text}: {how}")
        if policy is not None:
            raise UnsupportedError("checkpointing", f"{text}: use burst_mcore.checkpointing.checkpoint")
    return _group_of(mesh), settings, policy


def _tensor_parallel(model: nn.Module, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """Return the ranks over which tensor parallelism has sharded a model, before FSDP2 or behind its dims."""
    ranks = {*dist.get_process_group_ranks(group)}
    for mesh in (p.device_mesh for p in model.parameters() if isinstance(p, DTensor)):
        last_dim = mesh.get_group(mesh.ndim - 1)
        # FSDP2's own last dim has several ranks of a sequence, or replicas, which wait for this rank as well.
        if len(ranks & {*dist.get_process_group_ranks(last_dim)}) == 1:
            return last_dim
    return None


def options_of(config: Any, loss: Any, checkpointing: Any, towers: Any) -> tuple[BurstConfig, Policy | None]:
    """Return (configuration, recompute policy) of options of `parallelize`, if they are legal."""
    _refuse_word("loss", loss, ("fused", "model"))
    _refuse_word("towers", towers, TOWERS)
    if not isinstance(checkpointing, Policy):
        _refuse_word("checkpointing", checkpointing, POLICIES, ", or a policy of burst_mcore.checkpointing")
        checkpointing = POLICIES[checkpointing]
    try:
        return config if isinstance(config, BurstConfig) else BurstConfig(**(config or {})), checkpointing
    except (TypeError, ValueError) as error:
        raise UnsupportedError("config", str(error)) from None


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if isinstance(mesh, DeviceMesh) and (mesh.ndim == 1 or DIM in (mesh.mesh_dim_names or ())):
        return (mesh if mesh.ndim == 1 else mesh[DIM]).get_group()
    dim = f'the dim of a DeviceMesh whose ranks share sequences, as mesh["{DIM}"]'
    raise UnsupportedError("mesh", f"give {dim}, or their process group, got {mesh!r}")


def _refuse_word(name: str, value: Any, legal: Iterable[str], more: str = "") -> None:
    if value not in [*legal]:
        raise UnsupportedError(name, f"it must be one of {', '.join(legal)}{more}, got {value!r}")
