"""README and docs are run: every python block, every command and every link that they name."""

import ast
import json
import re
import runpy
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import forked
import pytest

from burst_mcore.attention.schedule.route import Route

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
"""Texts of the manual by path."""
BLOCK = re.compile(r"^```python(?: torchrun=(\d+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NODES_APART = Route(1, 8, heads=8, outer=True)
"""8 nodes of 8: 8 ranks, one of each node, share heads, and each node has a ring."""


def page_of(name):
    return PAGES[f"docs/{name}"]


@pytest.fixture
def scripts(monkeypatch):
    """Scripts that write pages: each can be imported, or run by `script(name)`."""
    folder = ROOT / "docs" / "scripts"
    monkeypatch.syspath_prepend(str(folder))
    return lambda name: runpy.run_path(str(folder / f"{name}.py"))


def _blocks():
    for page, text in PAGES.items():
        for number, (ranks, code) in enumerate(BLOCK.findall(text)):
            yield pytest.param(int(ranks or 0), code, id=f"{Path(page).name}-{number}")


@pytest.mark.parametrize(("ranks", "code"), list(_blocks()))
def test_python_blocks_run(ranks, code, tmp_path):
    for name, module in {"megatron": "megatron.core", "transformers": "", "deepspeed": ""}.items():
        if name in code:
            pytest.importorskip(module or name)
    script = tmp_path / "block.py"
    script.write_text(code)
    well, printed, errors = forked.run(tmp_path, script, ranks=max(1, ranks))
    assert well, errors
    assert printed.count("holds tokens") == ranks
    (active,) = re.findall(r"`(burst_mcore: 2 ranks [^`]*)`: burst is active", page_of("start.md"))
    if f"```python torchrun=2\n{code}" in page_of("start.md"):
        assert errors.count(active) == 1


LOUD = """
import logging, runpy, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
runpy.run_module("burst_mcore.megatron", run_name="__main__", alter_sys=True)
"""
"""The launcher, with the log that the import of megatron.training sets up where nothing has before."""


def test_the_first_run_of_megatron_has_the_losses_of_one_process(tmp_path):
    pytest.importorskip("megatron.training")
    import prepare_bytes

    data, loud = tmp_path / "text", tmp_path / "loud.py"
    loud.write_text(LOUD)
    prepare_bytes.write(data, iter([b"the quick brown fox %d; " % i * 20 for i in range(60)]))
    text = re.sub(r"\\\n\s*", " ", page_of("start.md"))
    (active,) = re.findall(r"burst is active.*`(INFO:burst_mcore:.*: predicted )", text, re.DOTALL)
    command = re.search(r"^torchrun --nproc-per-node 2 (.*)$", text, re.MULTILINE)[1]
    command = command.replace("runs/start", str(data)).replace("-m burst_mcore.megatron", str(loud))
    alone = command.replace("-size 2", "-size 1").removesuffix(" --context-parallel-attention-backend burst")
    losses = []
    for ranks, words in ((2, command), (1, alone)):
        (folder := tmp_path / str(ranks)).mkdir()
        well, printed, errors = forked.run(folder, *shlex.split(words), ranks=ranks)
        assert well, errors
        assert printed.count(active) == (ranks if ranks > 1 else 0)
        losses.append([float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", printed)])
    assert len(losses[0]) == 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_schedule_in_the_docs_is_the_one_that_prints():
    from burst_mcore.attention.schedule.route import schedule

    printed = str(schedule(Route(nodes=1, intra=3), "query")).splitlines()
    shown = page_of("features/schedule.md").split("```text\n")[1].split("```")[0].splitlines()
    for line, whole in zip(shown, printed, strict=True):
        assert whole.startswith(line.removesuffix("| ...").rstrip()), line


def _busiest_nic(route, passes, kv_heads=32):
    """GB between nodes of the rank that sends most, of the call in README's table."""
    import torch

    from burst_mcore.attention.geometry.shard import Shard
    from burst_mcore.attention.schedule.route import schedule
    from burst_plan.simulate.cost import link_bytes, message_bytes

    shard = Shard(
        batch=1, tokens=2**20 // 64, heads=32, kv_heads=kv_heads, head_dim=128, value_dim=128,
        dtype=torch.bfloat16,
    )  # fmt: skip
    for pass_ in passes:
        sizes, programs = message_bytes(shard, route, pass_), schedule(route, pass_).programs
        sent = [link_bytes(program, rank, sizes, 8)["inter"] for rank, program in enumerate(programs)]
        yield max(sent) / 1e9


ROWS = {
    "RingAttention, one ring over all GPUs": (Route(1, 64), "kv"),
    "burst, double ring, K and V rotate": (Route(8, 8), "kv"),
    "burst, double ring, queries rotate": (Route(8, 8), "query"),
    "burst, heads across nodes, a ring in each node": (NODES_APART, "query"),
}


def test_the_bytes_in_the_readme_are_those_of_the_schedules():
    text = PAGES["README.md"]
    for row, (route, rotates) in ROWS.items():
        shown = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE).groups()
        assert list(shown) == [f"{gigabytes:.2f}" for gigabytes in _busiest_nic(route, ("forward", rotates))]
    in_words = re.sub(r"\s+", " ", text)
    for route, words in (
        (Route(8, 8), "take {:.2f} and {:.2f} GB (double ring)"),
        (NODES_APART, "or {:.2f} and {:.2f} GB (heads across nodes)"),
    ):
        assert words.format(*_busiest_nic(route, ("forward", "kv"), kv_heads=8)) in in_words


def test_what_is_named_exists():
    makefile = (ROOT / "Makefile").read_text()
    for page, text in PAGES.items():
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"
        for link in re.findall(r"\]\((?!http)([^)#]+)", text):
            assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"
        for path in re.findall(r"`((?:burst_\w+|tests|docs)/[\w/.]+)`", text):
            assert (ROOT / path).exists(), f"{page}: {path}"


def test_every_page_is_in_the_menu_of_the_manual():
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    listed = re.findall(r"([\w/-]+\.md)$", menu, re.MULTILINE)
    pages = {page.removeprefix("docs/") for page in PAGES if page != "README.md"}
    assert {page for page in listed if not page.startswith("source/")} == pages
    assert len(listed) == len(set(listed))


def test_the_manual_is_short():
    """Words of all committed pages, code and tables included; the site has some lists besides."""
    pages = subprocess.check_output(["git", "ls-files", "*.md"], cwd=ROOT, text=True).splitlines()
    counts = {page: len((ROOT / page).read_text().split()) for page in pages}
    longest = max(counts, key=counts.__getitem__)
    assert counts[longest] <= 1800, (
        f"{longest} has {counts[longest]} words: cut, or make two pages of one job each"
    )
    assert sum(counts.values()) <= 45_000, f"{sum(counts.values())} words in all: cut"


def test_the_site_has_a_row_for_each_test_that_proves_something_of_megatron(scripts):
    page = page_of("evidence/megatron-tests.md")
    marks = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    listed = scripts("proofs")["with_tests"](page).splitlines()
    rows = listed[listed.index("|---|---|---|---|") + 1 :]
    rows = rows[: next(number for number, line in enumerate(rows) if not line.startswith("|"))]
    assert len(rows) == len(re.findall(r"^@pytest\.mark\.proves\(", marks, re.MULTILINE)) > 40
    assert not set(rows) & {*page.splitlines()}


def test_the_table_of_scenarios_has_all_of_them(scripts):
    """Its errors and times are of the run that wrote it."""
    script = scripts("scenarios")
    rows = page_of("troubleshooting.md").split(script["HEAD"])[1].split("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [*script["SCENARIOS"]]
    assert len(rows) <= 12 and not [row for row in rows if "Error: " not in row]


PUBLIC = ["", ".checkpointing", ".deepspeed", ".loss", ".recurrent", ".rollouts", ".torch"]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    listed = re.findall(r"^::: (\S+)\.(\w+)$", page_of("reference/api.md"), re.MULTILINE)
    tree = ast.parse((ROOT / "burst_mcore" / module[1:] / "__init__.py").read_text())
    assigned = {
        ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)
    }
    errors = {name for _, name in listed if name.endswith("Error")}
    there = {name for of, name in listed if of == f"burst_mcore{module}"}
    missing = {*ast.literal_eval(assigned["__all__"])} - errors - there
    assert not missing, f"docs/reference/api.md lacks {missing} of burst_mcore{module}"


def test_what_words_of_auto_earn_is_by_todays_model(scripts):
    """A row of 24 cells; the whole page is written by its command."""
    _, row = scripts("earnings")["by_cluster"]("1x8", "H100")
    assert row in page_of("evidence/earnings.md").splitlines()


@pytest.mark.parametrize("command", ["explain", "draw"])
def test_commands_in_the_docs_run(command, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from burst_plan.cli import app

    monkeypatch.chdir(tmp_path)
    pages = "\n".join(PAGES.values())
    lines = re.findall(rf"^burst-mcore ({command} .*)$", pages, re.MULTILINE)
    assert lines, f"no page shows burst-mcore {command}"
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line))
        assert done.exit_code == 0, done.output
        shown = re.search(rf"{re.escape(line)}\n```\n[^`]*```text\n(exposed: [^`]*)```", pages)
        assert shown is None or shown[1] in done.output


BEGUN = "as far as the work"
WORK = {
    "plan": ["burst_plan.step.planned.search", "burst_bench.published.against.compare"],
    "doctor": ["burst_plan.doctor.checkup.search"],
    "bench": ["burst_bench.__main__.run"],
    "calibrate": ["burst_bench.calibrate.measure"],
    "patch": ["burst_plan.patch.trees.SourceTree.__init__"],
}
"""What takes long in a command, or needs a tree of Megatron: a test goes that far."""


def _shown(command):
    """The words of each line of the pages that gives this command."""
    others = [(ROOT / folder / "README.md").read_text() for folder in ("patches", "benchmarks")]
    text = re.sub(r" \\\n +", " ", "\n".join([*PAGES.values(), *others]))
    for line in re.findall(rf"^burst-mcore ({command} .*)$", text, re.MULTILINE):
        if "[--" not in line:
            yield shlex.split(line.partition(" > ")[0], comments=True)


@pytest.mark.parametrize(
    ("command", "lines"), [("plan", 12), ("doctor", 4), ("bench", 7), ("calibrate", 2), ("patch", 5)]
)
def test_commands_in_the_docs_are_legal(command, lines, tmp_path, monkeypatch, capfd):
    from typer.testing import CliRunner

    from burst_plan.cli import app
    from burst_plan.machines import MACHINES

    def work(*_, **__):
        raise ValueError(BEGUN)

    for name in WORK[command]:
        monkeypatch.setattr(name, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder := tmp_path / "path" / "to" / "model").mkdir(parents=True)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 96, **sizes}))
    guide = page_of("guides/million.md")
    config = json.loads(re.search(r"```json\n(.*?)```", guide, re.DOTALL)[1])
    config["sequence_parallel_size"] = 16  # of 16 and 32 ranks
    (tmp_path / "ds.json").write_text(json.dumps(config))
    MACHINES["H100"].rates.save(tmp_path / "rates.json")
    megatron = next(word for words in _shown("plan") for word in words if word.startswith("--num-layers"))
    shown = [[megatron if "$MEG" in word else word for word in words] for words in _shown(command)]
    assert len(shown) >= lines
    for words in shown:
        done = CliRunner().invoke(app, words)
        told = f"{done.output} {capfd.readouterr().err} {done.exception!r}"
        assert BEGUN in told or done.exit_code == 0, f"{words}: {told}"


def test_every_flag_is_in_the_docs():
    import argparse

    from burst_mcore.megatron.arguments import add_arguments

    text = page_of("frameworks/megatron-flags.md")
    for action in add_arguments(argparse.ArgumentParser(add_help=False))._actions:
        assert f"`{action.option_strings[0]}`" in text or action.help == argparse.SUPPRESS


def test_every_method_and_kernel_is_in_the_docs():
    from burst_bench.methods import METHODS
    from burst_bench.subjects import SUBJECTS
    from burst_mcore.attention.kernels.table import KERNELS

    page = page_of("evidence/benchmark.md") + page_of("evidence/step.md")
    kernels = page_of("features/kernels.md")
    names = [name for kind, name in METHODS if kind != "kernels"]
    assert all(f"`{name}`" in page for name in [*names, *SUBJECTS])
    assert all(f'`"{name}"`' in kernels for name in KERNELS)


def test_tables_are_as_the_code_writes_them(scripts):
    pages = scripts("tables")["pages"]()
    assert len(pages) == 8
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, f"make tables: {name} is not as the code says"


@pytest.mark.slow
def test_plans_of_every_scale_are_as_the_planner_makes_them(scripts):
    text = scripts("tables")["scale"](1024)
    assert "| 128 x 8 |" in text, "the row that the quick test leaves out"
    assert page_of("guides/scale.md") == text, "make tables: the planner differs"


def test_every_error_has_an_entry(scripts):
    messages, page = scripts("messages"), page_of("reference/messages.md")
    globs, files = messages["globs_of"](page), messages["messages"]()
    assert "\n* " not in page, "make docs writes the lists, which are not committed"
    page = messages["with_messages"](page)
    assert len(files) > 100 and sum(map(len, files.values())) > 500
    for path, texts in files.items():
        matching = [glob for glob in globs if fnmatch(path, glob)]
        assert len(matching) == 1, f"errors of {path} belong to {matching or 'no section'} of messages.md"
        for text in texts:
            assert f"* {messages['shown'](text)}\n" in page, f"no entry for {text!r} of {path}"
    for glob in globs:
        assert any(fnmatch(path, glob) for path in files), f"no error is of {glob}"


def _raised():
    """Yield calls of which each raises an error that a user may meet."""
    import torch

    from burst_mcore import BurstConfig, Layout, Mask, Topology, burst_attention
    from burst_mcore.attention.schedule.actions import Pass
    from burst_mcore.deepspeed.section import section_of
    from burst_mcore.loss import fused_linear_cross_entropy
    from burst_plan.words import mask_of

    x, y = torch.zeros(1, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    yield lambda: BurstConfig(ring="rign")
    yield lambda: BurstConfig(rign="flat")
    yield lambda: BurstConfig(mesh="2x2")
    yield lambda: Pass("sideways")
    yield lambda: Layout.of("zigzag:2")
    yield lambda: mask_of("casual", 8)
    yield lambda: burst_attention(x, y, y, topology=Topology.single(), mask=Mask.causal())
    yield lambda: Topology.from_group("cp")
    yield lambda: section_of({"burst_attention": {"layuot": "zigzag"}})
    yield lambda: section_of({"burst_attention": {"head_parallel": []}})
    yield lambda: fused_linear_cross_entropy(x[0, :, 0], y[0, 0], torch.zeros(3, dtype=torch.long))


def test_errors_that_are_raised_are_in_the_list(scripts):
    pytest.importorskip("transformers")
    page = scripts("messages")["with_messages"](page_of("reference/messages.md"))
    entries = [words or fenced for words, fenced in re.findall(r"^\* (?:`([^`].*)`|`` (.*) ``)$", page, re.M)]
    named = [entry for entry in entries if len(re.findall("[A-Za-z]{2,}", entry)) >= 2]
    patterns = [re.compile(".*".join(map(re.escape, entry.split("…")))) for entry in named]
    for call in _raised():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call()
        text = " ".join(str(error.value).split())
        assert any(pattern.fullmatch(text) for pattern in patterns), f"reference/messages.md lacks: {text}"


def test_pictures_are_as_the_code_draws_them(scripts):
    script = scripts("pictures")
    drawn, folder = script["pictures"](), ROOT / "docs" / "images"
    assert {path.name for path in folder.iterdir()} == {*drawn}
    for name, picture in drawn.items():
        assert (folder / name).read_text() == picture, f"make tables: {name} is another now"
        assert any(f"images/{name})" in text for text in PAGES.values()), f"no page shows {name}"
    for name, command in script["COMMANDS"].items():
        pages = [text for text in PAGES.values() if f"images/{name}.svg)" in text]
        assert pages and all(f"`burst-mcore {command}`" in text for text in pages), f"{name}: {command}"
