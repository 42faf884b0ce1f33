"""docs/evidence/architecture.md names the files of each addition, which is made here in a copy, by these."""

import re
import shutil
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence" / "architecture.md"

BEGINNING = '''
import os, sys
own = "burst_mcore burst_plan burst_bench masks dense tables test_layout test_plan test_mask".split()
for name in [name for name in sys.modules if name.split(".")[0] in own]:
    del sys.modules[name]  # this process was forked from one that has the package itself
sys.path[:0] = ["{copy}", "{copy}/docs/scripts", "{tests}"]
from hypothesis import settings
import conftest  # settings of property tests
import burst_mcore
assert burst_mcore.__file__ == "{copy}/burst_mcore/__init__.py"
import masks, torch
from burst_mcore import BurstConfig, Layout, Mask, Topology, burst_attention

def hold(*modules):
    """Run the property tests of modules, in which nearly every case draws the new kind: few are enough."""
    tests = [test for m in modules for test in vars(m).values() if hasattr(test, "hypothesis")]
    assert len(tests) > 2
    for test in tests:
        test._hypothesis_internal_use_settings = settings(max_examples=40)
        test()

def assert_exact(mask, config, topology=None, rank=0, size=1):
    """Forward and backward over a ring against dense attention in float64."""
    from burst_mcore import shard
    from dense import dense, error, problem
    p = problem(0, 24 * size, kv_heads=2)
    q, k, v, dout = (shard(x, 1, rank=rank, size=size, layout=config.layout) for x in p)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = burst_attention(*leaves, topology=topology or Topology.single(), mask=mask, config=config)
    out.backward(dout)
    want, results = dense(p, mask), (out, *(x.grad for x in leaves))
    for got, whole in zip(results, (want.out, want.dq, want.dk, want.dv), strict=True):
        assert error(got, shard(whole, 1, rank=rank, size=size, layout=config.layout)) < 1e-12
'''


def files_of(addition: str) -> set[str]:
    """The files, and the folders of new files, that the page names for an addition."""
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith(f"| {addition} |"))
    return set(re.findall(r"`([\w/.]+)`", row.split("|")[2]))


def _path(root: Path, file: str) -> Path:
    """A file as the page names it: files of burst_mcore without the package's name."""
    return root / file if file.startswith("burst_") else root / "burst_mcore" / file


LAYOUTS = '''
@dataclass(frozen=True)
class Rotated(Periodic):
    """Rank r holds chunk r + by."""

    word, written, number = "rotated", "rotated:K (chunk r + K)", "by"

    by: int = 0

    def places(self, rank, size):
        return ((rank + self.by) % size,)


def kind_of('''

HOLD_LAYOUTS = """
masks.random_layout = lambda draw, size, n: Layout.of(f"rotated:{draw.randint(1, 9)}")
import pickle, pytest, tables, test_layout, test_plan
from burst_mcore.layout.balance import work
from burst_mcore.attention.geometry.cuts import cut_for
hold(test_layout, test_plan)
rotated = Layout("rotated", by=3)
assert rotated == Layout.of("rotated:3") == pickle.loads(pickle.dumps(rotated)) != Layout("rotated", by=2)
assert hash(rotated) == hash(Layout.of("rotated:3")) and rotated.by == 3 and Layout("zigzag").by == 0
for call, words in (
    (lambda: Layout("zigzag", by=1), "by is for layout rotated only"),
    (lambda: Layout.of("rotated"), "legal: .*rotated:K"),
    (lambda: Layout.of("rotated:0"), "needs by >= 1"),
):
    with pytest.raises(ValueError, match=words):
        call()
assert rotated.run_table(30, 4).tolist() == [
    [r, run.start, run.stop, run.step] for r in range(4) for run in rotated.runs(30, r, 4)]
assert work(rotated, Mask.causal(), 32, 4)[0].sum() == 32 * 33 // 2
assert 0 <= cut_for(0.5, rotated, Mask.causal(), 64, 4).position <= 64
assert_exact(Mask.causal(), BurstConfig(layout=rotated))
names = "features/attention.md", "frameworks/megatron-flags.md", "reference/deepspeed-section.md"
pages = [tables.WRITERS[name]() for name in names]
assert all("rotated:K (chunk r + K)" in page for page in pages)
"""


TERM = '''

@dataclass(frozen=True)
class Opening(Term):
    """All queries see the first `length` keys, and the keys up to their own position."""

    length: int

    def __str__(self) -> str:
        return f"opening({self.length})"

    def bands(self, n: int) -> Tensor:
        p = min(self.length, n)
        return torch.tensor([[0, n, 0, p, -UNBOUNDED, UNBOUNDED], [p, n, p, n, -UNBOUNDED, 0]])

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k[None, :] < self.length) | (k[None, :] <= q[:, None])


@dataclass(frozen=True)
class Stride('''

CONSTRUCTOR = '''
    @classmethod
    def opening(cls, length: int) -> Mask:
        """A query sees the first `length` keys, and the keys up to its own position."""
        return cls((Opening(length),))

    @classmethod
    def causal('''

WORD = """
    "opening": MaskWord(lambda numbers, n: Mask.opening(tokens(numbers[0])), "opening:P", (1,), 1),
    "full": MaskWord("""

HOLD_MASK = """
masks.TERMS = (lambda draw, n: Mask.opening(draw.randint(1, n + 2)), *masks.TERMS[:1], *masks.TERMS[3:4])
import pickle, pytest, test_mask, test_plan
from burst_plan.words import mask_of, shortened
hold(test_mask, test_plan)
mask = mask_of("opening:8 & documents:12,12", 24)
assert mask == Mask.opening(8) & Mask.documents([0, 12, 24]) == pickle.loads(pickle.dumps(mask))
assert shortened("opening:8K & causal", 65536, 64) == "opening:8 & causal"
with pytest.raises(ValueError, match="legal: .*opening:P"):
    mask_of("openning:8", 24)
assert_exact(mask, BurstConfig())
"""


KERNEL = '''
"""The reference by another name, without softcap."""

from dataclasses import replace

from burst_mcore.attention.kernels import reference


def _supports(problem):
    if problem.dtype.itemsize < 4:
        return "it takes float32 and float64"
    return "it has no softcap" if problem.softcap else None


KERNEL = replace(reference.KERNEL, name="plain", supports=_supports)
KERNELS = (KERNEL,)
'''

HOLD_KERNEL = """
import pytest, tables
for mask in (Mask.causal(), Mask.window(5, 2), Mask.causal() & Mask.documents([0, 7, 24])):
    assert_exact(mask, BurstConfig(kernel="plain"))
with pytest.raises(ValueError, match="'plain' does not support this call: it has no softcap"):
    q = torch.randn(1, 8, 2, 16)
    burst_attention(q, q, q, topology=Topology.single(), mask=Mask.causal(), softcap=3.0,
                    config=BurstConfig(kernel="plain"))
assert '`"plain"`' in tables.WRITERS["reference/deepspeed-section.md"]()
"""


RING = '''
"""A direct exchange without overlap: all blocks arrive, each in its own buffer, before the first tile."""

from dataclasses import replace

from burst_mcore.attention.schedule.actions import HOME, Compute, Kind, Recv, Send, Wait
from burst_mcore.attention.schedule.carried import Messages
from burst_mcore.attention.schedule.direct import direct


def eager(ring_rank, size, *, gradients, messages=Messages()):
    """The program of a ring rank."""
    started, waits, rest = [], [], []
    for action in direct(ring_rank, size, gradients=gradients, messages=messages):
        if isinstance(action, (Recv, Send, Wait)) and action.channel.kind == Kind.DATA:
            early = replace(action, step=0)
            if isinstance(action, Recv):
                early = replace(early, buffer=f"{Kind.DATA}{action.channel.part}")
            (waits if isinstance(action, Wait) else started).append(early)
        elif isinstance(action, Compute):
            rest.append(replace(action, buffer=f"{Kind.DATA}{action.step}" if action.step else HOME))
        else:
            rest.append(action)
    return (*started, *waits, *rest)
'''

HOLD_RING = """
import torch.distributed as dist
from burst_mcore.attention.geometry.plan import plan_for
from burst_mcore.attention.schedule.actions import Pass
from burst_mcore.attention.schedule.route import Route, schedule
from burst_plan.explain.verify import verify

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
documents = Mask.causal() & Mask.documents([0, 20, 50, 24 * size])
for mask in (Mask.full(), Mask.window(9, 0), documents):
    for pass_ in Pass:
        verify(schedule(Route(1, 6, eager=True), pass_, plan_for(Layout("zigzag"), mask, 24 * size, 6)))
        verify(schedule(Route(1, 3, 2, eager=True), pass_, plan_for(Layout("zigzag"), mask, 24 * size, 3, 2)))
for backward in ("query", "kv"):
    for heads in (1, 2):
        config = BurstConfig(ring="eager", backward=backward, head_parallel=heads)
        assert_exact(documents, config, Topology.from_group(dist.group.WORLD), rank, size)
dist.destroy_process_group()
"""


ROUTE_IMPORT = "from burst_mcore.attention.schedule.direct import direct\n"

ROUTE_WRITER = """    if route.eager:
        return eager(ring_rank, route.ring_size, gradients=moves.gradients, messages=messages)
    if route.direct:
        return"""

CHOICE = """    if ring == "eager":
        return Route(1, ranks.size // degree, degree, overlap, eager=ranks.size > degree)
    if ring == "direct":"""


FIELD = """
    rounding: str = setting("nearest", ("nearest", "stochastic"), "How sums are rounded.")

    def __post_init__("""

HOLD_FIELD = """
import argparse, tables
from burst_mcore.deepspeed.config.section import section_of
from burst_mcore.megatron.arguments import add_arguments, burst_config
parser = add_arguments(argparse.ArgumentParser())
arguments = parser.parse_args(["--burst-rounding", "stochastic"])
assert burst_config(arguments) == BurstConfig(rounding="stochastic") != burst_config(parser.parse_args([]))
section = section_of({"burst_attention": {"rounding": "stochastic"}})
assert section.attention == BurstConfig(rounding="stochastic")
names = "features/attention.md", "frameworks/megatron-flags.md", "reference/deepspeed-section.md"
pages = [tables.WRITERS[name]() for name in names]
assert all("How sums are rounded." in page for page in pages)
"""


METHOD = """

def _mine(case: RingCase, world: World) -> Attention:
    return burst(case, world, backward="kv")


add("attention", Method("mine", _mine, divisible))
"""

HOLD_METHOD = """
from pathlib import Path
from burst_bench.__main__ import main
from burst_bench.results import read
if __name__ == "__main__":  # and not in the ranks of the bench, which run this file again
    cases = {"attention": "ranks=1; seq=64; heads=2; head_dim=8", "masks": "seq=64; head_dim=8"}
    for subject, case in cases.items():
        out = Path(burst_mcore.__file__).parents[1] / f"{subject}.json"
        main([subject, "--case", case, "--methods", "mine", "--repeats", "1", "--out", str(out)])
        assert read(out).tables[case]["mine", "cpu"]
"""

ADDITIONS = {
    "a mask": (
        {
            "mask/terms.py": [("\n\n@dataclass(frozen=True)\nclass Stride(", TERM)],
            "mask/mask.py": [
                ("\n    @classmethod\n    def causal(", CONSTRUCTOR),
                ("    Blocks,\n", "    Blocks,\n    Opening,\n"),
            ],
            "burst_plan/words.py": [('\n    "full": MaskWord(', WORD)],
        },
        HOLD_MASK,
    ),
    "a layout": ({"layout/kinds.py": [("def kind_of(", LAYOUTS.lstrip())]}, HOLD_LAYOUTS),
    "a kernel": (
        {
            "attention/kernels/plain.py": KERNEL,
            "attention/kernels/table.py": [("_FILES = {", '_FILES = {\n    "plain": "plain",')],
        },
        HOLD_KERNEL,
    ),
    "a ring": (
        {
            "attention/schedule/eager.py": RING,
            "attention/schedule/route.py": [
                (ROUTE_IMPORT, f"{ROUTE_IMPORT}from burst_mcore.attention.schedule.eager import eager\n"),
                ("    mirrored: bool = False\n", "    mirrored: bool = False\n    eager: bool = False\n"),
                ("    if route.direct:\n        return", ROUTE_WRITER),
                ("> 2 and not self.direct", "> 2 and not self.direct and not self.eager"),
            ],
            "attention/candidates.py": [('    if ring == "direct":', CHOICE)],
            "config.py": [('RINGS = ("auto", ', 'RINGS = ("auto", "eager", ')],
        },
        HOLD_RING,
    ),
    "a bench method": ({"burst_bench/methods/attention.py": METHOD}, HOLD_METHOD),
    "a flag of Megatron, a key of DeepSpeed": (
        {"config.py": [("\n    def __post_init__(", FIELD)]},
        HOLD_FIELD,
    ),
}
"""In the order of the page: files with what is put in the place of lines, or at the end; and a script."""


def test_every_row_of_the_page_is_tested():
    table = PAGE.read_text().split("| what | files | what to write |\n|---|---|---|\n")[1].split("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()] == [*ADDITIONS]


@pytest.mark.parametrize("addition", ADDITIONS)
def test_an_addition_takes_the_files_that_the_page_names(addition, tmp_path):
    """Made in a copy of the package, where a script holds it."""
    edits, script = ADDITIONS[addition]
    changed = {file if _path(ROOT, file).exists() else f"{Path(file).parent}/" for file in edits}
    assert changed == files_of(addition), f"docs/evidence/architecture.md names other files for {addition}"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("burst_mcore", "burst_plan", "burst_bench", "docs", "benchmarks", "tests/megatron"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file, changes in edits.items():
        path = _path(tmp_path, file)
        text = path.read_text() if path.exists() else ""
        for old, new in [(None, changes)] if isinstance(changes, str) else changes:
            assert old is None or text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
            text = text + new if old is None else text.replace(old, new)
        path.write_text(text)
    (tmp_path / "script.py").write_text(BEGINNING.format(copy=tmp_path, tests=ROOT / "tests") + script)
    (tmp_path / "logs").mkdir()
    ranks = 4 if addition == "a ring" else 1
    well, _, errors = forked.run(tmp_path / "logs", tmp_path / "script.py", ranks=ranks)
    assert well, errors
