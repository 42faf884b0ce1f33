"""Every image-text model that transformers names, tiny: is it the same over a CP group, or refused?"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from equal import compared
from families import CLASSES, SIDE, config_of, model_of
from ranks import processes
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from burst_mcore.torch import parallelize
from burst_mcore.transformers.errors import RefusedError
from burst_mcore.transformers.models.supported import use_burst


def outcomes(rank: int, size: int, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Of each name (outcome, words): equal, wrong, refused, not built."""
    return {name: outcome(rank, size, name) for name in names}


def outcome(rank: int, size: int, name: str) -> tuple[str, str]:
    try:
        _refuse_large(name)
        ((loss, gradient, where),) = compared(rank, size, (name,), "plain", {}).values()
    except RefusedError as error:
        return "refused", str(error)
    except Exception as error:
        return _as_it_is(name, f"{type(error).__name__}: {str(error)[:160]}")
    equal = loss < 1e-5 and gradient < 1e-4
    return "equal" if equal else "wrong", f"loss {loss:.1e}, gradients {gradient:.1e} ({where})"


def _refuse_large(name: str) -> None:
    with torch.device("meta"):
        model = _class_of(name)._from_config(config_of(name), attn_implementation="eager")
    count = sum(p.numel() for p in model.parameters())
    if count > 6e6:
        raise ValueError(f"{count:.3g} parameters")


def _class_of(name: str) -> Any:
    return getattr(transformers, CLASSES[name])


def _as_it_is(name: str, error: str) -> tuple[str, str]:
    """Of a model that one process does not train on images: whether it is refused, tiny or on no device."""
    for attempt in (_with_pixels, _of_text, _own):
        try:
            attempt(name)
        except RefusedError as refused:
            return "refused", str(refused)
        except Exception:
            continue
    return "not built", error


def _with_pixels(name: str) -> None:
    _of_text(name, pixel_values=torch.zeros(1, 3, SIDE, SIDE))


def _of_text(name: str, **pixels: Tensor) -> None:
    _refuse_large(name)
    model = model_of(name)
    parallelize(model, dist.group.WORLD, reduction="mean")
    batch = {"input_ids": torch.arange(3, 67)[None], "shift_labels": torch.arange(3, 67)[None]}
    model(**batch, position_ids=torch.arange(64)[None], **pixels)


def _own(name: str) -> None:
    with torch.device("meta"):
        model = _class_of(name)._from_config(CONFIG_MAPPING[name](), attn_implementation="eager")
    use_burst(model, 2)


if __name__ == "__main__":
    names = tuple(sys.argv[1:]) or tuple(CLASSES)
    for first in range(0, len(names), 5):
        some = names[first : first + 5]
        mine, other = processes(2, outcomes, some)
        assert {k: x[0] for k, x in mine.items()} == {k: x[0] for k, x in other.items()}, (mine, other)
        for name, (what, words) in mine.items():
            sys.stdout.write(f"{name} | {what} | {' '.join(words.split())}\n")
