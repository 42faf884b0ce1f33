"""The work of a vision tower, shared: each rank of a CP group makes features of some images, for all.

Whole images go to ranks in their order, so that patches are spread evenly, and features are gathered once.
The gradient of an image's features is the sum over all ranks, at the rank that made them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from burst_mcore.agreement.groups import integers_of, on_all_ranks
from burst_mcore.transformers.models.attention import current
from burst_mcore.transformers.models.sequence import SequenceParallel
from burst_mcore.wrap import while_set

logger = logging.getLogger("burst_mcore")

METHODS = ("get_image_features", "get_video_features")
"""What models of transformers call to make features."""
PIXELS = ("pixel_values", "pixel_values_videos")
OF_IMAGES = ("grid_thw", "image_sizes", "pixel_attention_mask")
"""The ends of names of other tensors with an entry for each image; a tensor for each row has other names."""
OUTPUTS = ("last_hidden_state", "pooler_output", "hidden_states", "attentions", "deepstack_features")
"""What a tower's output may have, to be gathered: of anything else nobody knows whether images have it."""


def attach_towers(model: nn.Module, hooks: SequenceParallel) -> None:
    """Have a model's own methods make the features of this rank's images, and gather those of all, once."""
    for module in model.modules():
        for name in METHODS:
            inner = any(hasattr(m, name) for m in [*module.modules()][1:])
            if hasattr(module, name) and not inner and name not in vars(module):
                vars(module)[name] = SharedImages(getattr(module, name), hooks)


@dataclass(eq=False)
class SharedImages:
    """Stands in place of a model's `get_image_features` or `get_video_features`."""

    method: Callable[..., Any]
    hooks: SequenceParallel
    makes_all: bool = False
    """Whether every rank makes all features in every call: the model's are of a kind that is not gathered."""
    has_warned: bool = False

    def __post_init__(self) -> None:
        self.__wrapped__ = self.method  # by which `generate` finds the parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence, group = current(), self.hooks.group
        names = [*inspect.signature(self.method).parameters]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        shares = self.hooks.shares_towers and group is not None and not self.makes_all
        if not shares or sequence is None or sequence.entering is None or sequence.topology.size == 1:
            return self.method(**arguments)  # the last: a batch of this rank alone
        assert group is not None
        images = None if self._normalizes_over_images() else Images.of(arguments, names)
        if images is None:
            return self._on_every_rank(arguments)
        bounds = images.bounds(group.size())
        first, last = bounds[group.rank()], bounds[group.rank() + 1]
        share = images.part(first, last) if first < last else images.part(*images.smallest())
        with while_set(self.hooks, shares_towers=False):  # methods that call each other share once
            out = on_all_ranks(lambda: self.method(**share), group)
        streams = _streams(out, len(images.patches))
        if streams is None:
            self.makes_all = True
            return self._on_every_rank(arguments)
        _replace(out, gathered_features(streams, first < last, len(images.patches), group))
        return out

    def _normalizes_over_images(self) -> bool:
        modules = self.method.__self__.modules()  # type: ignore[attr-defined]  # of a bound method
        return any(isinstance(x, nn.modules.batchnorm._BatchNorm) and x.training for x in modules)

    def _on_every_rank(self, arguments: dict[str, Any]) -> Any:
        """Make the features of all images on this rank, as all others do; the first says so, once."""
        if not self.has_warned and self.hooks.topology.rank == 0:
            logger.warning("%s: every rank makes the features of all images", self.method.__qualname__)
        self.has_warned = True
        return self.method(**arguments)


@dataclass
class Images:
    """The arguments of a method that makes features, and how they are told apart by images."""

    arguments: dict[str, Any]
    tensors: dict[str, Tensor]
    """Those that have an entry for each image, or for each patch."""
    patches: list[int]
    """By image; pixels, where images have sizes; 1, where they are alike."""

    @classmethod
    def of(cls, arguments: dict[str, Any], names: list[str]) -> Images | None:
        """Return the images of a call, by the names of its parameters; None if these tell none apart."""
        tensors = {name: x for name, x in arguments.items() if name in names and isinstance(x, Tensor)}
        pixels = next((tensors[name] for name in PIXELS if name in tensors), None)
        lists = [x for name, x in arguments.items() if name in names and isinstance(x, list | tuple)]
        known = all(name in PIXELS or name.endswith(OF_IMAGES) for name in tensors)
        if pixels is None or not known or any(not isinstance(x[0], int) for x in lists if x):
            return None
        if pixels.dim() == 5 and "pixel_attention_mask" in names:  # rows of images, the last of which are 0
            real = pixels.flatten(0, 1).flatten(1).any(1)
            tensors = {name: x.flatten(0, 1)[real][:, None] for name, x in tensors.items()}
            pixels = tensors["pixel_values"]
        grids = next((x for name, x in tensors.items() if name.endswith("grid_thw")), None)
        sizes = tensors.get("image_sizes")
        if grids is not None:
            patches = grids.prod(-1).tolist()
        else:
            patches = [1] * len(pixels) if sizes is None else sizes.prod(-1).tolist()
        divides = patches and all(len(x) in (len(patches), sum(patches)) for x in tensors.values())
        return cls(arguments, tensors, patches) if divides else None

    def bounds(self, size: int) -> list[int]:
        """Return where each rank's images begin, and the end: an image goes where its middle patch goes."""
        ends = [*accumulate(self.patches, initial=0)]
        ranks = [(a + b) * size // (2 * ends[-1]) for a, b in pairwise(ends)]
        return [sum(rank < r for rank in ranks) for r in range(size + 1)]

    def smallest(self) -> tuple[int, int]:
        """Return the bounds of an image of the fewest patches, for a rank that has none of its own."""
        at = self.patches.index(min(self.patches))
        return at, at + 1

    def part(self, first: int, last: int) -> dict[str, Any]:
        """Return the arguments of images [first, last)."""
        ends = [*accumulate(self.patches, initial=0)]
        of_images, of_patches = slice(first, last), slice(ends[first], ends[last])
        parts = {
            name: x[of_images if len(x) == len(self.patches) else of_patches]
            for name, x in self.tensors.items()
        }
        return {**self.arguments, **parts}


def _streams(out: Any, images: int) -> list[Any] | None:
    """Return an output's features, [pooled, by layer ...]: each a tensor, or at most `images` of them.

    None where they are something else, or not alone.
    """
    if not isinstance(out, dict) or {*out} - {*OUTPUTS}:
        return None
    streams = [getattr(out, "pooler_output", None), *(getattr(out, "deepstack_features", None) or ())]
    are_features = (
        isinstance(x, Tensor)
        or (
            isinstance(x, list | tuple)
            and len(x) <= images
            and all(isinstance(y, Tensor) and y.dim() == 2 for y in x)
        )
        for x in streams
    )
    return streams if all(are_features) else None


def _replace(out: Any, streams: list[Any]) -> None:
    """Make the features of an output those of all images; what else it has, of this rank's alone, is None."""
    for name in [*out.keys()]:
        out[name] = None
    out["pooler_output"], layers = streams[0], streams[1:]
    if layers:
        out["deepstack_features"] = layers


def gathered_features(streams: list[Any], makes: bool, images: int, group: dist.ProcessGroup) -> list[Any]:
    """Return the features of all images, as each rank has those of some. Collective; once in backward too.

    Args:
        streams: of `_streams`.
        makes: whether this rank's features are wanted; else they have no part in the whole but their graph.
        images: of all ranks.
    """
    pieces = [[x] if isinstance(x, Tensor) else [*x] for x in streams]
    values = torch.cat([x.flatten() for stream in pieces for x in stream])
    values = values if makes else values[:0]
    lengths = [-1] * images * len(streams)
    for i, stream in enumerate(pieces if makes else ()):
        lengths[i * images : i * images + len(stream)] = map(len, stream)
    table = integers_of(group, [*lengths, values.numel()])
    counts = [row.pop() for row in table]
    pool: Tensor = _Gathered.apply(values, counts, group)  # type: ignore[no-untyped-call]
    features: list[list[Tensor]] = [[] for _ in streams]
    for row, part in zip(table, pool.split(counts), strict=True):
        at = 0
        for i, stream in enumerate(pieces):
            tail = stream[0].shape[1:]
            for length in (n for n in row[i * images : (i + 1) * images] if n >= 0):
                size = length * tail.numel()
                features[i].append(part[at : at + size].view(length, *tail))
                at += size
    kinds = [type(x) for x in streams]
    return [
        torch.cat(x) if issubclass(kind, Tensor) else kind(x) for kind, x in zip(kinds, features, strict=True)
    ]


class _Gathered(torch.autograd.Function):
    """All ranks' numbers, of which each brings as many as `counts` says; backward sums their gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        parts = [part.new_empty(max(counts)) for _ in counts]
        dist.all_gather(parts, pad(part, (0, max(counts) - len(part))), group=group)
        return torch.cat([x[:n] for x, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        longest = max(ctx.counts)
        parts = [pad(x, (0, longest - len(x))).contiguous() for x in upstream.split(ctx.counts)]
        total = upstream.new_empty(longest)
        dist.reduce_scatter(total, parts, group=ctx.group)
        return total[: ctx.counts[ctx.group.rank()]], None, None
