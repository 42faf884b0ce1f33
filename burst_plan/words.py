"""Expressions for masks and GPUs on a command line: "causal & window:4096", "memory=24GB,tflops=165", ..."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from operator import and_, or_
from typing import NamedTuple

import torch

from burst_mcore.mask import Mask
from burst_mcore.rates import Rates
from burst_plan.machines import MACHINES, Machine

SUFFIXES = {"": 1, "K": 2**10, "M": 2**20}
MOST_TOKENS = 2**40
"""The longest length."""
MOST_BLOCKS = 2048
"""Most blocks per side of a random block matrix: it is made and hashed as a whole."""
GPU = {"memory": "memory", "tflops": "tflops", "gb": "memory_rate", "link": "link", "nic": "nic"}
"""Numbers that describe a GPU, and their fields of `Machine`."""
DESCRIBED = "memory=24GB,tflops=165,gb=1008,link=32,nic=12.5"
"""An example description: dense TFLOP/s in 16 bits, and GB/s of memory, of links and of the network card."""


class MaskWord(NamedTuple):
    """A mask that has a name on the command line."""

    build: Callable[[list[str], int], Mask]
    """(its arguments, split at commas; tokens of the sequence) -> the mask."""
    written: str
    """The name with its arguments, for messages."""
    numbers: tuple[int, ...] = ()
    """How many arguments it may have; `build` counts if this is empty."""
    lengths: int = 0
    """How many of its arguments, from the first on, are lengths in tokens."""


def legal() -> str:
    """Return the syntax of masks, for messages."""
    words = ", ".join(word.written for word in WORDS.values())
    return f"{words}, and any of these joined by & and |, of which & comes first"


def tokens(text: str) -> int:
    """Return the tokens of a length such as 4096, 128K or 1M. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+)([KM]?)", text.upper())
    if match is None or int(match[1]) == 0:
        raise ValueError(f"a number of tokens looks like 4096, 128K or 1M, got {text!r}")
    number = int(match[1]) * SUFFIXES[match[2]]
    if number > MOST_TOKENS:
        raise ValueError(f"a number of tokens is at most {MOST_TOKENS}, got {text!r}")
    return number


@lru_cache(maxsize=64)
def mask_of(text: str, n: int) -> Mask:
    """Return the mask over n tokens of an expression: names of this file, joined by "&" and "|".

    Random masks are the same every time. Every query attends to its own key, in every mask.

    Raises:
        ValueError: an unknown name, or a mask that does not go with n tokens; the message lists the syntax.
    """
    parts = (reduce(and_, (_term(word, n) for word in _words(part))) for part in text.split("|"))
    mask = reduce(or_, parts)
    mask.check(n)
    return mask


def gpu(text: str, ranks: int, nodes: int) -> Machine:
    """Return the machine that numbers describe, for clusters of `ranks` a node.

    Missing numbers are an A100's, in proportion to the peak: kernels, exponentials, launches.

    Raises:
        ValueError: an unknown name, a number that is not above 0, or a missing number that the cluster needs.
    """
    numbers: dict[str, float] = {}
    for part in text.replace(" ", "").lower().split(","):
        match = re.fullmatch(rf"({'|'.join(GPU)})=(\d{{1,9}}(?:\.\d+)?)(?:gb)?", part)
        if match is None or match[1] in numbers or not float(match[2]):
            raise ValueError(f"--gpu has numbers such as {DESCRIBED}, each once, got {part!r}")
        numbers[match[1]] = float(match[2])
    needed = ["memory", "tflops", "gb", *["link"] * (ranks > 1), *["nic"] * (nodes > 1)]
    if absent := [name for name in needed if name not in numbers]:
        of = f"{nodes} node{'s' * (nodes > 1)} of {ranks}"
        raise ValueError(f"--gpu needs {' and '.join(absent)} for {of}, such as {DESCRIBED}, got {text!r}")
    like = MACHINES["A100-NVLink"]
    fields = {GPU[name]: number for name, number in numbers.items()}
    fields |= {
        "memory": numbers["memory"] * 1e9,
        "exponentials": like.exponentials * numbers["tflops"] / like.tflops,
    }
    return replace(like, name=f"GPU of {numbers['memory']:g} GB", **fields)  # type: ignore[arg-type]


def shortened(text: str, n: int, to: int) -> str:
    """Return the same mask over fewer tokens: lengths times to / n, at least 1; counts as there is room.

    Raises:
        ValueError: an unknown name.
    """
    parts = (" & ".join(_shorter(word, n, to) for word in _words(part)) for part in text.split("|"))
    return " | ".join(parts)


def _words(text: str) -> list[str]:
    words = ["".join(word.split()) for word in text.split("&")]
    for word in words:
        if word.partition(":")[0] not in WORDS:
            raise ValueError(f"unknown mask {word!r} in {text!r}; legal: {legal()}")
    return words


def _term(text: str, n: int) -> Mask:
    word, numbers = WORDS[text.partition(":")[0]], _numbers(text)
    try:
        if word.numbers and len(numbers) not in word.numbers:
            raise ValueError(f"it takes {' or '.join(map(str, word.numbers))} numbers, got {len(numbers)}")
        return word.build(numbers, n)
    except ValueError as error:
        raise ValueError(f"mask {text!r}: {error}; legal: {legal()}") from None


def _numbers(word: str) -> list[str]:
    _, colon, arguments = word.partition(":")
    return arguments.split(",") if colon else []


def _window(numbers: list[str], n: int) -> Mask:
    if len(numbers) == 1:
        return Mask.window(tokens(numbers[0]) - 1, 0)
    back, ahead = (-1 if x == "-1" else 0 if x == "0" else tokens(x) for x in numbers)
    return Mask.window(back, ahead)


def _images(numbers: list[str], n: int) -> Mask:
    length, count = map(tokens, numbers)
    if length * count > n:
        raise ValueError(f"{count} images have {length * count} tokens in all, but the sequence has {n}")
    starts = [n * image // count for image in range(count)]
    return Mask.window(0, 0) | Mask.images([(start, start + length) for start in starts])


def _tree(numbers: list[str], n: int) -> Mask:
    prompt, count = map(tokens, numbers)
    if prompt + count > n:
        raise ValueError(f"{n} tokens cannot be a prompt of {prompt} and {count} answers")
    ends = [prompt + (n - prompt) * answer // count for answer in range(count + 1)]
    return Mask.tree([-1] + [0] * count, [prompt, *(b - a for a, b in pairwise(ends))])


def _ends(numbers: list[str], n: int) -> tuple[int, ...]:
    if numbers[:1] == ["random"]:
        if len(numbers) != 2:
            raise ValueError(f"it takes 2 numbers, got {len(numbers)}")
        count = tokens(numbers[1])
        if count > n:
            raise ValueError(f"{n} tokens cannot be {count} documents")
        return 0, *sorted(random.Random(0).sample(range(1, n), count - 1)), n
    if not numbers:
        raise ValueError("the lengths of the documents are missing")
    ends = list(accumulate(map(tokens, numbers), initial=0))
    if ends[-1] > n:
        raise ValueError(f"the documents have {ends[-1]} tokens in all, but the sequence has {n}")
    return (*ends, n) if ends[-1] < n else tuple(ends)


def _blocks(numbers: list[str], n: int) -> Mask:
    size, density = tokens(numbers[0]), _share(numbers[1])
    count = -(-n // size)
    if count > MOST_BLOCKS:
        raise ValueError(
            f"{count} blocks a side are too many, at most {MOST_BLOCKS}: SIZE must be at least "
            f"{-(-n // MOST_BLOCKS)}"
        )
    matrix = torch.rand(count, count, generator=torch.Generator().manual_seed(0)) < density
    matrix.fill_diagonal_(True)
    return Mask.blocks(matrix, size)


def _share(text: str) -> float:
    try:
        density = float(text)
    except ValueError:
        density = -1.0
    if not 0 <= density <= 1:
        raise ValueError(f"a density is a number from 0 to 1, got {text!r}")
    return density


WORDS = {
    "causal": MaskWord(lambda numbers, n: Mask.causal(), "causal", (0,)),
    "full": MaskWord(lambda numbers, n: Mask.full(), "full", (0,)),
    "window": MaskWord(
        _window, "window:W (W tokens back, itself included), window:LEFT,RIGHT (-1: unbounded)", (1, 2), 2
    ),
    "dilated": MaskWord(lambda numbers, n: Mask.dilated(*map(tokens, numbers)), "dilated:W,D", (2,), 1),
    "chunked": MaskWord(lambda numbers, n: Mask.chunked(tokens(numbers[0])), "chunked:SIZE", (1,), 1),
    "prefix": MaskWord(lambda numbers, n: Mask.prefix(tokens(numbers[0])), "prefix:LENGTH", (1,), 1),
    "documents": MaskWord(
        lambda numbers, n: Mask.documents(_ends(numbers, n)),
        "documents:L1,L2,... (lengths; what they leave of the sequence is one more), documents:random,COUNT",
    ),
    "images": MaskWord(_images, "images:LENGTH,COUNT (each sees itself; evenly spread)", (2,), 1),
    "tree": MaskWord(_tree, "tree:PROMPT,COUNT (a prompt, and COUNT answers that see it)", (2,), 1),
    "blocks": MaskWord(_blocks, "blocks:SIZE,DENSITY (random, with the diagonal)", (2,), 1),
}
"""All masks by name."""


def _shorter(word: str, n: int, to: int) -> str:
    name, numbers = word.partition(":")[0], _numbers(word)
    if not numbers:
        return name
    if numbers[0] == "random":
        return f"{name}:random,{min(tokens(numbers[1]), to)}"
    if name == "documents":
        scaled_ends = sorted({end * to // n for end in _ends(numbers, n)})  # they still fill the sequence
        return f"documents:{','.join(str(b - a) for a, b in pairwise(scaled_ends))}"
    lengths = WORDS[name].lengths
    scaled = [x if x in ("-1", "0") else str(max(1, tokens(x) * to // n)) for x in numbers[:lengths]]
    others = numbers[lengths:]
    if name in ("images", "tree"):  # as many as there is room for
        room = to // int(scaled[0]) if name == "images" else to - int(scaled[0])
        others = [str(min(tokens(others[0]), room))]
    return f"{name}:{','.join([*scaled, *others])}"


def in_words(rates: Rates) -> str:
    """Return the rates as a line of text."""
    backward = "" if rates.backward is None else f" forward, {rates.backward / 1e12:.3g} backward"
    return (
        f"{rates.intra / 1e9:.3g} GB/s within a node, {rates.inter / 1e9:.3g} GB/s a rank between nodes, "
        f"kernel {rates.compute / 1e12:.3g} TFLOP/s{backward}, {rates.latency * 1e6:.3g} us a message, "
        f"{rates.call * 1e6:.3g} us a step"
    )
