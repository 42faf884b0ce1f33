"""The work of a vision tower, shared: each rank of a CP group makes features of some images, for all.

Whole images go to ranks in their order, so that patches are spread evenly, and features are gathered once.
The gradient of an image's features is the sum over all ranks, at the rank that made them.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, product
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import pad
from torch.nn.modules.batchnorm import _BatchNorm

from burst_mcore.agreement.agreement import integers_of, on_all_ranks
from burst_mcore.transformers.models.attention import current
from burst_mcore.transformers.models.sequence import SequenceParallel
from burst_mcore.wrap import while_set

logger = logging.getLogger("burst_mcore")

METHODS = ("get_image_features", "get_video_features")
"""What models of transformers call to make features."""
PIXELS = ("pixel_values", "pixel_values_videos")
SIZES = ("grid_thw", "image_sizes")
"""The ends of names of tensors with the size of each image; a tensor for each row has other names."""
MASK = "pixel_attention_mask"
OUTPUTS = ("last_hidden_state", "pooler_output", "hidden_states", "attentions", "deepstack_features")
"""What a tower's output may have, to be gathered: of anything else nobody knows whether images have it."""


def attach_towers(model: nn.Module, hooks: SequenceParallel) -> None:
    """Have a model's own methods make the features of this rank's images, and gather those of all, once."""
    for module, name in product(model.modules(), METHODS):
        owners = [m for m in module.modules() if hasattr(m, name)]
        if owners == [module]:  # the innermost, whose method those of the others call
            vars(module)[name] = SharedImages(getattr(module, name), hooks)


@dataclass(eq=False)
class SharedImages:
    """Stands in place of a model's `get_image_features` or `get_video_features`."""

    __wrapped__: MethodType
    """The model's own method: by this name `generate` finds its parameters."""
    hooks: SequenceParallel
    has_warned: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence, method = current(), self.__wrapped__
        names = [*inspect.signature(method).parameters]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if sequence is None or sequence.topology.size == 1 or not self.hooks.shares_towers:
            return method(**arguments)  # also in `generate`, and for a batch of this rank alone
        out = self._shared(arguments, names)
        if out is None:
            if not self.has_warned and sequence.topology.rank == 0:
                logger.warning("%s: every rank makes the features of all images", method.__qualname__)
            self.has_warned = True
            out = method(**arguments)
        return out

    def _shared(self, arguments: dict[str, Any], names: list[str]) -> Any:
        """Return an output with the features of all images, of which this rank makes some. Collective.

        None where images are not told apart, or a layer normalizes over them; for good, if not gathered.
        """
        layers = self.__wrapped__.__self__.modules()  # type: ignore[attr-defined]
        normalizes = any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)
        images, group = Images.of(arguments, names), self.hooks.group
        if images is None or group is None or normalizes:
            return None
        tensors, is_wanted = images.share(group.rank(), group.size())
        with while_set(self.hooks, shares_towers=False):  # methods that call each other share once
            out = on_all_ranks(lambda: self.__wrapped__(**arguments | tensors), group)
        features = gathered(out, is_wanted, len(images.patches), group)
        if features is None:
            self.hooks.shares_towers = False
            return None
        values = dict.fromkeys(out)  # what else an output has is of this rank's images alone
        values["pooler_output"], *deep = features
        return type(out)(**values | ({"deepstack_features": deep} if deep else {}))


@dataclass
class Images:
    """The images of a call that makes features, and how they are told apart."""

    tensors: dict[str, Tensor]
    """By name, arguments that have an entry for each image, or for each patch."""
    patches: list[int]
    """By image; pixels, where images have sizes; 1, where they are alike."""

    @classmethod
    def of(cls, arguments: dict[str, Any], names: list[str]) -> Images | None:
        """Return the images of a call, by the names of its parameters; None if these tell none apart."""
        named = {name: x for name, x in arguments.items() if name in names}
        tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
        pixels = next((tensors[name] for name in PIXELS if name in tensors), None)
        known = all(name in PIXELS or name.endswith((*SIZES, MASK)) for name in tensors)
        lists = [x for x in named.values() if isinstance(x, list | tuple)]
        if pixels is None or not known or any(not isinstance(x[0], int) for x in lists if x):
            return None
        if pixels.dim() == 5 and MASK in names:  # rows of images, the last of which are 0
            real = pixels.flatten(0, 1).flatten(1).any(1)
            tensors = {name: x.flatten(0, 1)[real][:, None] for name, x in tensors.items()}
            pixels = tensors["pixel_values"]
        sizes = next((x for name, x in tensors.items() if name.endswith(SIZES)), None)
        patches = [1] * len(pixels) if sizes is None else sizes.prod(-1).tolist()
        divides = patches and all(len(x) in (len(patches), sum(patches)) for x in tensors.values())
        return cls(tensors, patches) if divides else None

    def ranks(self, size: int) -> list[int]:
        """Return the rank of each image, of `size` ranks: an image goes where its middle patch goes."""
        ends = [*accumulate(self.patches, initial=0)]
        return [(a + b) * size // (2 * ends[-1]) for a, b in pairwise(ends)]

    def share(self, rank: int, size: int) -> tuple[dict[str, Tensor], bool]:
        """Return the tensors of a rank's images, and whether it has any: else they are of the smallest."""
        own = [image for image, owner in enumerate(self.ranks(size)) if owner == rank]
        images = own or [self.patches.index(min(self.patches))]
        first, end = images[0], images[-1] + 1
        of_patches = slice(sum(self.patches[:first]), sum(self.patches[:end]))
        part = {sum(self.patches): of_patches, len(self.patches): slice(first, end)}
        return {name: x[part[len(x)]] for name, x in self.tensors.items()}, bool(own)


def gathered(out: Any, is_wanted: bool, images: int, group: dist.ProcessGroup) -> list[Any] | None:
    """Return the features of all images, [pooled, by layer ...]. Collective; once in backward too.

    None where layers, or ranks, have features of different shapes, or the output has anything else.

    Args:
        is_wanted: whether `out`, of this rank's images, has a part in the whole; else only its graph has.
        images: of all ranks.
    """
    features = _features_of(out, images)
    tensors = [x if isinstance(x, Tensor) else torch.cat([*x]) for x in features]
    lengths = {tuple(map(len, x)) for x in features if not isinstance(x, Tensor)}
    alike = len({x.shape for x in tensors}) == 1 and len(lengths) < 2
    part = torch.stack(tensors if alike else [torch.empty(0, 0)])[:, : None if is_wanted else 0]
    own = [*next(iter(lengths), [part.shape[1]])] if is_wanted else []  # rows by image, or of all images
    width = part.shape[2:].numel() if alike else -1
    table = integers_of(group, [width, *own, *[-1] * (images - len(own))])
    if width < 0 or len({width for width, *_ in table}) > 1:
        return None
    lengths_of_ranks = [[n for n in row if n >= 0] for _, *row in table]
    rows = _rows_of(part, [*map(sum, lengths_of_ranks)], group)
    return [
        x if isinstance(given, Tensor) else type(given)(x.split([*chain(*lengths_of_ranks)]))
        for given, x in zip(features, rows, strict=True)
    ]


def _rows_of(part: Tensor, counts: list[int], group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks along dim 1, as many of each as `counts` says; backward sums gradients."""
    part = pad(part, (0, 0) * (part.dim() - 2) + (0, max(counts) - part.shape[1]))
    mesh = DeviceMesh.from_group(group, part.device.type)
    parts = DTensor.from_local(part[None], mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()])
    return torch.cat([x[:, :n] for x, n in zip(parts, counts, strict=True)], 1)


def _features_of(out: Any, images: int) -> list[Any]:
    """Return an output's features: each a tensor, or a tensor for each of at most `images` images.

    None of them where they are something else, or not alone.
    """
    if not isinstance(out, dict) or {*out} - {*OUTPUTS}:
        return []
    features = [out.get("pooler_output"), *(out.get("deepstack_features") or ())]
    by_image = [x for x in features if not isinstance(x, Tensor)]
    if not all(isinstance(x, list | tuple) and 0 < len(x) <= images for x in by_image):
        return []
    are_rows = all(isinstance(each, Tensor) and each.dim() == 2 for x in by_image for each in x)
    return features if are_rows else []
