"""Writes the tables of the docs that follow from the code: settings, flags, Megatron versions, bytes, plans.

The table of the planner's errors is written, too: the package has a copy.

`make tables`, after a setting, a layout or a kernel was added, or the model of a step changed.
tests/house/test_docs.py fails until then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from predictions import summary
from step_errors import judged, ranges, table
from volume import Share, least, of_columns, of_ring, of_rows

from burst_mcore.attention.geometry.shard import Ranks
from burst_mcore.attention.schedule.actions import Link, Pass
from burst_mcore.attention.schedule.heads import legal_degrees
from burst_mcore.attention.schedule.route import route_for
from burst_mcore.config import SETTINGS, Setting
from burst_mcore.deepspeed.section import KEYS, RECOMPUTE
from burst_plan.step.figures import TABLE
from burst_plan.step.memory import total
from burst_plan.step.planned import planned

DOCS = Path(__file__).parents[1]
PUBLIC = DOCS.parent / "benchmarks" / "public"


QUICK = 64
"""GPUs up to which the planner answers within seconds; for 1024 it takes tens of seconds."""


def pages() -> dict[str, str]:
    """Return the pages with tables, by name, as they follow from the code."""
    return {name: write() for name, write in WRITERS.items()}


def _attention() -> str:
    return with_rows(
        (DOCS / "features/attention.md").read_text(),
        "| field | legal | default | meaning |\n|---|---|---|---|\n",
        _settings(),
    )


def _versions_of_megatron() -> str:
    return with_rows(
        (DOCS / "evidence/megatron-tests.md").read_text(),
        "| version | by the launcher | by the patches | largest difference |\n|---|---|---|---|\n",
        _trained(),
    )


def _topology() -> str:
    return with_rows(
        (DOCS / "features/topology.md").read_text(),
        "| heads | method | 64 GPUs | 1024 GPUs |\n|---|---|---|---|\n",
        _through_nics(),
    )


def _section() -> str:
    page, head = (
        (DOCS / "reference/deepspeed-section.md").read_text(),
        f"| key | legal | default | meaning |\n{'|---' * 4}|\n",
    )
    others = {name: each for name, each in KEYS.items() if name not in SETTINGS}
    page = with_rows(page, f"has these keys, too:\n\n{head}", _keys(others))
    return with_rows(page, f'## "checkpointing"\n\n{head}', _keys(RECOMPUTE))


def _planner() -> str:
    return with_rows(
        (DOCS / "evidence/planner.md").read_text(),
        "| kind of plan | public runs | predicted speed was off by |\n|---|---|---|\n",
        (f"| {errors.kind} | {errors.runs} | {errors.range} |" for errors in ranges(judged(PUBLIC))),
    )


def scale(most: int) -> str:
    """The guide with the plans that its commands print; rows of more than `most` GPUs stay as they are."""
    page = (DOCS / "guides" / "scale.md").read_text()
    head = f"{'|---' * 8}|\n"
    old = page.partition(head)[2].splitlines()
    commands = [line.split() for line in page.splitlines() if line.startswith("burst-mcore plan ")]
    asked = [dict(zip(words[2::2], words[3::2], strict=True)) for words in commands]
    return with_rows(page, head, (_plan(words, most) or row for words, row in zip(asked, old, strict=False)))


def _plan(words: Mapping[str, str], most: int) -> str | None:
    """The row of a command of the planner; None for more than `most` GPUs."""
    nodes, gpus = map(int, words["--cluster"].partition(":")[2].split("x"))
    if nodes * gpus > most:
        return None
    batch = int(words.get("--batch", 1))
    best = planned(words["--model"], words["--seq"], words["--cluster"], batch, None).chosen
    assert best is not None
    return (
        f"| {nodes} x {gpus} | {words['--seq']} | {batch} | {best.plan} | {best.tokens_per_second:.0f} | "
        f"{best.mfu:.0%} | {best.errors.range} | {total(best.memory) / 1e9:.0f} |"
    )


WRITERS: dict[str, Callable[[], str]] = {
    "features/attention.md": _attention,
    "evidence/megatron-tests.md": _versions_of_megatron,
    "features/topology.md": _topology,
    "reference/deepspeed-section.md": _section,
    "evidence/planner.md": _planner,
    "evidence/predictions.md": lambda: summary(PUBLIC),
    "guides/scale.md": lambda: scale(QUICK),
    f"../burst_plan/step/{TABLE}": lambda: table(PUBLIC),
}
"""What writes each page."""


def with_rows(page: str, before: str, rows: Iterable[str]) -> str:
    """The page with these rows between `before` and the next empty line."""
    head, tail = page.split(before)
    rest = tail.splitlines(keepends=True)
    end = next((i for i, line in enumerate(rest) if line == "\n"), len(rest))
    return "".join([head, before, *(f"{row}\n" for row in rows), *rest[end:]])


def _settings() -> Iterable[str]:
    for name, (default, _, meaning) in SETTINGS.items():
        yield f"| `{name}` | {_legal(name)} | `{default}` | {meaning} |"


def _keys(keys: Mapping[str, Setting]) -> Iterable[str]:
    for name, (default, legal, meaning) in keys.items():
        words = legal if isinstance(legal, str) else ", ".join(f'`"{word}"`' for word in legal)
        yield f"| `{name}` | {words} | `{json.dumps(default)}` | {meaning} |"


def _trained() -> Iterable[str]:
    """Yield a row for the versions of Megatron that tests/megatron/pretraining/versions.py trained alike."""
    rows = json.loads((DOCS.parent / "benchmarks" / "megatron-versions.json").read_text())["rows"]
    versions: dict[str, list[str]] = {}
    for tree in dict.fromkeys(row["tree"] for row in rows):
        of_tree = [row for row in rows if row["tree"] == tree]
        worst = max(row["worst relative difference"] for row in of_tree)
        launched = sum(row["way"] == "launcher" for row in of_tree)
        result = f"runs: {launched} | runs: {len(of_tree) - launched} | {worst:.1e}"
        versions.setdefault(result, []).append(tree)
    for result, trees in versions.items():
        yield f"| {', '.join(trees)} | {result} |"


TOKENS, NODE = 2**20, 8
"""Tokens of the sequence, and GPUs of a node, in the table of bytes."""
SHAPES = {
    "32:32": (32, 32, 128, 256),
    "32:8": (32, 8, 128, 256),
    "128, MLA's latent": (128, 1, 192, 576),
}
"""Heads, K/V heads, the width of a query head, and of a head of keys and values."""
Bytes = tuple[float, float]
"""Of forward and backward."""


def _through_nics() -> Iterable[str]:
    """Yield a row for each method: the GB that pass the NIC of a GPU, forward and backward."""
    for heads, shape in SHAPES.items():
        columns = [_ways(_share(gpus, *shape), Ranks(gpus, NODE)) for gpus in (64, 1024)]
        for method in columns[0]:
            yield f"| {heads} | {method} | {' | '.join(column[method] for column in columns)} |"


def _share(gpus: int, heads: int, kv_heads: int, width: int, kv_width: int) -> Share:
    """The bytes of the rows of a GPU, in bfloat16, sums in float32; a head of O has 128 numbers."""
    row = TOKENS // gpus * heads
    q, out, kv = (2 * numbers for numbers in (row * width, row * 128, row // heads * kv_heads * kv_width))
    statistic = 4 * row
    return Share(heads=heads, kv_heads=kv_heads, q=q, out=out, kv=kv, statistic=statistic)


def _ways(share: Share, ranks: Ranks) -> dict[str, str]:
    """The bytes of each method, in words."""
    nodes, forward = ranks.size // ranks.intra, of_columns(share, Pass.FORWARD)
    steps = [of_columns(share, Pass.KV), of_rows(share)]
    ring = forward.around(ranks.size), min(step.around(ranks.size) for step in steps)
    across = {f"h {h}": _of_route(share, h, ranks, outer=True) for h in _degrees(share, ranks)}
    bound = least(share, nodes)
    return {
        "ring": _cell(ring),
        "double ring": _cell(_of_route(share, 1, ranks)),
        "USP: heads in the node": _cell(_of_route(share, NODE, ranks)),
        "heads across nodes": _fewest(across),
        "bound": _cell((bound, bound)),
    }


def _degrees(share: Share, ranks: Ranks) -> list[int]:
    return legal_degrees(ranks, share.heads, share.kv_heads)[1:]


def _of_route(share: Share, degree: int, ranks: Ranks, *, outer: bool = False) -> Bytes:
    route = route_for(degree, ranks, ring="double", overlap=True, outer=outer)
    forward, *backward = (
        of_ring(share, pass_, route, ranks.intra)[Link.INTER] for pass_ in (Pass.FORWARD, Pass.KV, Pass.QUERY)
    )
    return forward, min(backward)


def _fewest(methods: Mapping[str, Bytes]) -> str:
    """The bytes of the method with fewest, and its name."""
    name = min(methods, key=lambda name: sum(methods[name]))
    return f"{_cell(methods[name])} ({name})"


def _cell(sent: Bytes) -> str:
    return " / ".join(f"{size / 1e9:.3g}" for size in sent)


def _legal(name: str) -> str:
    legal = SETTINGS[name].legal
    return ", ".join(f"`{word}`" for word in legal) if isinstance(legal, tuple) else legal


if __name__ == "__main__":
    for name, text in {**pages(), "guides/scale.md": scale(10**6)}.items():
        (DOCS / name).write_text(text)
