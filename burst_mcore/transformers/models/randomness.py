"""Random numbers of a forward over a shard: dropout masks and NEFTune's noise, as over a whole sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from burst_mcore.words import digest
from burst_mcore.wrap import while_set


class own_draws:  # noqa: N801  # a context manager, used like a function
    """Let a rank draw random numbers of its own, by its place in the sequence.

    Ranks have equal seeds and different tokens: without this, all would drop the same entries. Behind it the
    generators are as they were before, one number further if any was drawn: equal on all ranks again. So the
    order of data stays alike, and a state that was saved (in a checkpoint) gives the same masks again.
    """

    def __init__(self, place: int, device: torch.device) -> None:
        self._place, self._device = place, device
        self._states: list[tuple[torch.Generator, torch.Tensor, torch.Tensor]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __enter__(self) -> None:
        for generator in _generators(self._device):
            common = generator.get_state()
            generator.manual_seed(int(digest(f"{digest(common)} at place {self._place}"), 16))
            self._states.append((generator, common, generator.get_state()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __exit__(self, *_: object) -> None:
        for generator, common, start in self._states:
            has_drawn = not torch.equal(generator.get_state(), start)
            generator.set_state(common)
            if has_drawn:  # or the next forward would drop the same entries
                torch.rand((), generator=generator, device=generator.device)


def _generators(device: torch.device) -> Iterator[torch.Generator]:
    """Yield the generators that operators on a device draw from."""
    yield torch.default_generator
    if device.type != "cpu":
        yield torch.get_device_module(device).default_generators[device.index or 0]


def noise_of_whole(model: nn.Module, share: float) -> AbstractContextManager[None]:
    """Make NEFTune's noise as strong as over the whole sequence, of which a rank has a share, within.

    transformers' hook of the embeddings divides `neftune_noise_alpha` by the root of the tokens that it sees:
    https://github.com/huggingface/transformers, src/transformers/integrations/neftune.py.
    """
    noisy: Any = next((m for m in model.modules() if "neftune_noise_alpha" in vars(m)), None)
    if noisy is None:
        return nullcontext()
    return while_set(noisy, neftune_noise_alpha=noisy.neftune_noise_alpha * math.sqrt(share))
