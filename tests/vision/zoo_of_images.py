"""Every image-text model that transformers names, tiny: is it the same over a CP group, or unsupported?"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch
from equal import compared
from families import class_of, config_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from zoo import WITH_IMAGES, everything

from burst_mcore.transformers.errors import UnsupportedError
from burst_mcore.transformers.models.supported import text_tower, use_burst
from burst_mcore.transformers.models.towers import METHODS

NAMES = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
TIMM = "requires the timm library"
"""What transformers says of a tower whose package is not installed."""
REASONS = {
    "attention outside transformers' interface": "does not take its attention|attends, or mixes",
    "an encoder and a decoder": "is an encoder and a decoder",
    "keys that an indexer picks, other kinds of layers": "has layers of type",
    "images without a `vision_config`": "are merged with whole sequences",
    "a text tower that holds another tower": "within what attends to text",
    "positions that begin at the padding token": "counts positions by its tokens",
    "no head, a loss of its own": "has no head|no output embeddings|a loss of its own",
    "needs the package timm": TIMM,
}
"""By words of the page, what an error says."""


def outcomes(rank: int, size: int, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Of each name (outcome, words): equal, wrong, unsupported, not built."""
    return {name: outcome(name) for name in names}


def outcome(name: str) -> tuple[str, str]:
    try:
        model = _without_weights(name)
        use_burst(model, 2)
        if (count := sum(p.numel() for p in model.parameters())) > 6e6:
            return "not built", f"{count:.3g} parameters"
        for dtype in (torch.float32, torch.float64):  # the noise of float32 may be larger than the bar
            torch.set_default_dtype(dtype)
            ((loss, gradient, where),) = compared(0, 2, (name,), case_of(model), {}).values()
            if equal := loss < 1e-5 and gradient < 1e-4:
                break
    except UnsupportedError as error:
        return "unsupported", str(error)
    except Exception as error:
        return "not built", f"{type(error).__name__}: {str(error)[:160]}"
    finally:
        torch.set_default_dtype(torch.float32)
    return "equal" if equal else "wrong", f"loss {loss:.1e}, gradients {gradient:.1e} ({where})"


def _without_weights(name: str) -> Any:
    """The tiny model of a name on no device, or that of its own size, if no tiny one is built."""
    kind = class_of(name)
    with torch.device("meta"):
        try:
            return kind._from_config(config_of(name), attn_implementation="eager")
        except Exception:
            return kind._from_config(CONFIG_MAPPING[name](), attn_implementation="eager")


def case_of(model: Any) -> str:
    """The case of a model: images, else videos, else text; pixels of no meaning where no tower is known."""
    if text_tower(model) is None:
        return "pixels" if "pixel_values" in inspect.signature(model.forward).parameters else "text"
    made = {name for m in model.modules() for name in METHODS if hasattr(m, name)}
    return "plain" if METHODS[0] in made else "videos" if made else "text"


def page(found: dict[str, tuple[str, str]]) -> str:
    """The outcomes as the last part of docs/frameworks/models.md."""
    models: dict[str, dict[str, list[str]]] = {"equal": {}, "wrong": {}, "unsupported": {}, "not built": {}}
    for name, (what, words) in found.items():
        told = next((reason for reason, says in REASONS.items() if re.search(says, words)), words)
        models[what].setdefault("" if what == "equal" else told, []).append(f"`{name}`")
    lines = [
        WITH_IMAGES,
        "`PYTHONPATH=.:tests/helpers:tests/deepspeed/models python tests/vision/zoo_of_images.py",
        f"docs/frameworks/models.md` goes over all {len(found)} names of `AutoModelForImageTextToText`:",
        "tiny models, three images in rows of 97 tokens (videos, or text, without images), on 2",
        "processes and in one; in float64 if need be. `llama4` has an attribute set that this",
        "transformers lacks; `fast_vlm`, `gemma3n` and `perception_lm` need `pip install timm`.",
        "[vision.md](vision.md) says how they train.",
        "",
        f"**Equal ({len(models['equal'][''])}):** losses agree to 1e-5, gradients, the tower's too, to 1e-4.",
        "",
        ", ".join(models.pop("equal")[""]),
    ]
    for what, reasons in models.items():
        if reasons:
            count = sum(map(len, reasons.values()))
            title = "Not compared" if what == "not built" else what.capitalize()
            lines += ["", f"**{title} ({count}):**", "", "| reason | models |", "|---|---|"]
            lines += [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(reasons.items())]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    target, names = Path(sys.argv[1]), tuple(sys.argv[2:]) or NAMES
    results = everything(outcomes, names, at_once=5)
    if not sys.argv[2:]:
        target.write_text(target.read_text().partition(WITH_IMAGES)[0] + page(results))
