"""README and docs are run: every python block, every command and every link that they name."""

import ast
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
from fnmatch import fnmatch
from pathlib import Path

import forked
import limits
import pytest

from burst_mcore.attention.schedule.route import Route

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python(?: torchrun=(\d+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NODES_APART = Route(1, 8, heads=8, outer=True)
"""8 nodes of 8: 8 ranks, one of each node, share heads, and each node has a ring."""


def _blocks():
    for page in PAGES:
        for number, (ranks, code) in enumerate(BLOCK.findall(page.read_text())):
            yield pytest.param(int(ranks or 0), code, id=f"{page.name}-{number}")


@pytest.mark.parametrize(("ranks", "code"), list(_blocks()))
def test_python_blocks_run(ranks, code, tmp_path):
    for name, module in (
        ("megatron", "megatron.core"),
        ("transformers", "transformers"),
        ("deepspeed", "deepspeed"),
    ):
        if name in code:
            pytest.importorskip(module)
    script = tmp_path / "block.py"
    script.write_text(code)
    well, printed, errors = forked.run(tmp_path, script, ranks=max(1, ranks))
    assert well, errors
    assert printed.count("holds tokens") == ranks


def test_the_first_run_of_megatron_has_the_losses_of_one_process(tmp_path):
    pytest.importorskip("megatron.training")
    import prepare_bytes

    data = tmp_path / "text"
    prepare_bytes.write(data, iter([b"the quick brown fox %d; " % i * 20 for i in range(60)]))
    text = re.sub(r"\\\n\s*", " ", (ROOT / "docs" / "start.md").read_text())
    command = re.search(r"^torchrun --nproc-per-node 2 (.*)$", text, re.MULTILINE)[1].replace(
        "runs/start", str(data)
    )
    alone = command.replace("-size 2", "-size 1").removesuffix(" --context-parallel-attention-backend burst")
    losses = []
    for ranks, words in ((2, command), (1, alone)):
        (folder := tmp_path / str(ranks)).mkdir()
        well, printed, errors = forked.run(folder, *shlex.split(words), ranks=ranks)
        assert well, errors
        losses.append([float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", printed)])
    assert len(losses[0]) == 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_scripts_to_save_have_names_of_their_own_where_git_ignores_them():
    text, ignored = (ROOT / "docs" / "start.md").read_text(), (ROOT / ".gitignore").read_text().split()
    names = re.findall(r"save these lines as `(.*?)`", text)
    assert len(names) == len(set(names)) == 2 and all(name.startswith("runs/") for name in names)
    assert all(f"torchrun --nproc-per-node 2 {name}`" in text for name in names)
    environment = re.search(r"-m venv (\w+)", text)[1]
    assert {"/runs/", f"/{environment}/"} <= {*ignored}


def test_shell_blocks_are_legal():
    blocks = [
        block
        for page in PAGES
        for block in re.findall(r"^```bash\n(.*?)^```$", page.read_text(), re.M | re.S)
    ]
    assert len(blocks) > 3
    for block in blocks:
        done = limits.run(["bash", "-n"], input=block)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_the_schedule_in_the_docs_is_the_one_that_prints():
    from burst_mcore.attention.schedule.route import schedule

    printed = str(schedule(Route(nodes=1, intra=3), "query")).splitlines()
    shown = (
        (ROOT / "docs" / "features" / "schedule.md")
        .read_text()
        .split("```text\n")[1]
        .split("```")[0]
        .splitlines()
    )
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


@pytest.mark.parametrize(
    ("row", "route", "rotates"),
    [
        ("RingAttention, one ring over all GPUs", Route(1, 64), "kv"),
        ("burst, double ring, K and V rotate", Route(8, 8), "kv"),
        ("burst, double ring, queries rotate", Route(8, 8), "query"),
        ("burst, heads across nodes, a ring in each node", NODES_APART, "query"),
    ],
)
def test_the_bytes_in_the_readme_are_those_of_the_schedules(row, route, rotates):
    text = (ROOT / "README.md").read_text()
    shown = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE).groups()
    computed = _busiest_nic(route, ("forward", rotates))
    assert list(shown) == [f"{gigabytes:.2f}" for gigabytes in computed]
    forward, backward = _busiest_nic(Route(8, 8), ("forward", "kv"), kv_heads=8)
    assert f"take {forward:.2f} and {backward:.2f} GB (double ring)" in re.sub(r"\s+", " ", text)
    forward, backward = _busiest_nic(NODES_APART, ("forward", "kv"), kv_heads=8)
    assert f"or {forward:.2f} and {backward:.2f} GB (heads across nodes)" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_named_exists(page):
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:burst_\w+|tests|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_calls_of_the_frameworks_are_there():
    page = (ROOT / "docs" / "frameworks" / "deepspeed.md").read_text()
    table = re.search(r"^## Which call is yours\n.*?(?=^## )", page, re.M | re.S)[0]
    calls = re.findall(r"`burst_mcore\.(\w+)\.(\w+)\(", table)
    assert len(calls) == 4
    for module, name in calls:
        assert hasattr(importlib.import_module(f"burst_mcore.{module}"), name), name


def test_every_page_is_in_the_menu_of_the_manual():
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    listed = re.findall(r"([\w/-]+\.md)$", menu, re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT}
    assert {page for page in listed if not page.startswith("source/")} == pages
    assert len(listed) == len(set(listed))


def test_the_manual_is_short():
    """Words of the committed pages, code and tables included; the site has some lists besides."""
    counts = {page: len(page.read_text().split()) for page in PAGES}
    longest = max(counts, key=counts.__getitem__)
    assert counts[longest] <= 1800, (
        f"{longest} has {counts[longest]} words: cut, or make two pages of one job each"
    )
    assert sum(counts.values()) <= 45_000 + counts[ROOT / "README.md"]


def test_the_site_has_a_row_for_each_test_that_proves_something_of_megatron(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import proofs

    page = (ROOT / "docs" / "evidence" / "megatron-tests.md").read_text()
    marks = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    listed = proofs.with_tests(page).splitlines()
    rows = listed[listed.index("|---|---|---|---|") + 1 :]
    rows = rows[: next(number for number, line in enumerate(rows) if not line.startswith("|"))]
    assert len(rows) == len(re.findall(r"^@pytest\.mark\.proves\(", marks, re.MULTILINE)) > 60
    assert {row.split(" | ")[2] for row in rows} == {"yes", "-"}
    assert "make docs" not in page and not set(rows) & {*page.splitlines()}


PUBLIC = ["", ".checkpointing", ".deepspeed", ".loss", ".recurrent", ".rollouts", ".torch"]


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module):
    listed = re.findall(
        r"^::: (\S+)\.(\w+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE
    )
    tree = ast.parse((ROOT / "burst_mcore" / module[1:] / "__init__.py").read_text())
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    names = next(
        ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "__all__"
    )
    errors = {name for _, name in listed if name.endswith("Error")}
    missing = set(names) - errors - {name for of, name in listed if of == f"burst_mcore{module}"}
    assert not missing, f"docs/reference/api.md lacks {missing} of burst_mcore{module}"


def test_every_field_of_a_configuration_is_in_the_site():
    """The site shows a field by the string under it."""
    tree = ast.parse((ROOT / "burst_mcore" / "config.py").read_text())
    body = next(
        node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "BurstConfig"
    )
    bare = [
        field.target.id
        for field, after in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert not bare, f"no docstring is under {bare}"


SOURCES = {path: path.read_text() for path in sorted((ROOT / "burst_mcore").rglob("*.py"))}


def test_functions_that_the_code_points_to_are_there():
    by_stem = {}
    for path, text in SOURCES.items():
        by_stem.setdefault(path.stem, []).append(text)
    for path, text in SOURCES.items():
        for stem, name in re.findall(r"`(\w+)\.(\w+)`", text):
            if name != "py" and stem in by_stem:
                assert any(re.search(rf"\b{name}\b", other) for other in by_stem[stem]), (
                    f"{path}: {stem}.{name}"
                )


def test_docstrings_begin_with_what_they_are_about():
    for path, text in SOURCES.items():
        headless = re.findall(r'^ *"""(?:It|Its|Those|They)\b.*', text, re.MULTILINE)
        assert not headless, f"{path}: {headless}"


def test_what_words_of_auto_earn_is_by_todays_model(monkeypatch):
    """A row of 24 cells; the whole page is written by its command."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    _, row = runpy.run_path(str(ROOT / "docs" / "scripts" / "earnings.py"))["by_cluster"]("1x8", "H100")
    assert row in (ROOT / "docs" / "evidence" / "earnings.md").read_text().splitlines()


@pytest.mark.parametrize("command", ["explain", "draw"])
def test_commands_in_the_docs_run(command, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from burst_plan.cli import app

    monkeypatch.chdir(tmp_path)
    pages = "\n".join(page.read_text() for page in PAGES)
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
    pages = [*PAGES, ROOT / "patches" / "README.md", ROOT / "benchmarks" / "README.md"]
    text = re.sub(r" \\\n +", " ", "\n".join(page.read_text() for page in pages))
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
    guide = (ROOT / "docs" / "guides" / "million.md").read_text()
    config = json.loads(re.search(r"```json\n(.*?)```", guide, re.DOTALL)[1])
    (tmp_path / "ds.json").write_text(
        json.dumps(config | {"sequence_parallel_size": 16})
    )  # of 16 and 32 ranks
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

    text = (ROOT / "docs" / "frameworks" / "megatron-flags.md").read_text()
    for action in add_arguments(argparse.ArgumentParser(add_help=False))._actions:
        assert f"`{action.option_strings[0]}`" in text or action.help == argparse.SUPPRESS


def test_every_method_and_kernel_is_in_the_docs():
    from burst_bench.methods import METHODS
    from burst_bench.subjects import SUBJECTS
    from burst_mcore.attention.kernels.table import KERNELS

    pages = [(ROOT / "docs" / name).read_text() for name in ("evidence/benchmark.md", "evidence/step.md")]
    page, kernels = "\n".join(pages), (ROOT / "docs" / "features" / "kernels.md").read_text()
    names = [name for kind, name in METHODS if kind != "kernels"]
    assert all(f"`{name}`" in page for name in [*names, *SUBJECTS])
    assert all(f'`"{name}"`' in kernels for name in KERNELS)


def test_tables_of_settings_are_made_from_the_configuration():
    from burst_mcore.config import SETTINGS
    from burst_mcore.megatron.arguments import flag_of

    attention, megatron = (
        (ROOT / "docs" / page).read_text()
        for page in ("features/attention.md", "frameworks/megatron-flags.md")
    )
    for name, (default, legal, meaning) in SETTINGS.items():
        words = ", ".join(f"`{word}`" for word in legal) if isinstance(legal, tuple) else legal
        assert f"| `{name}` | {words} | `{default}` | {meaning} |" in attention
        shown = "" if isinstance(default, bool) else words
        told = f"Turns off: {meaning[0].lower()}{meaning[1:]}" if default is True else meaning
        assert f"| `{flag_of(name)}` | {shown} | {told} |" in megatron


def test_tables_are_as_the_code_writes_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    pages = runpy.run_path(str(ROOT / "docs" / "scripts" / "tables.py"))["pages"]()
    assert len(pages) == 9
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, f"make tables: {name} is not as the code says"


@pytest.mark.slow
def test_plans_of_every_scale_are_as_the_planner_makes_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    scale, start = runpy.run_path(str(ROOT / "docs" / "scripts" / "tables.py"))["scale"], sum(os.times()[:4])
    text = scale(1024)
    assert sum(os.times()[:4]) - start < 60 and "of 1024 GPUs above takes less than a minute on" in text
    assert "| 128 x 8 |" in text, "the row that the quick test leaves out"
    assert (ROOT / "docs" / "guides" / "scale.md").read_text() == text, "make tables: the planner differs"


def test_the_kernels_share_of_a_call_in_the_guide_is_that_of_explain():
    from typer.testing import CliRunner

    from burst_plan.cli import app

    page = " ".join((ROOT / "docs" / "guides" / "scale.md").read_text().split())
    told = r"(\d+ %) of a call over 64K .*? (\d+ %) over 32K \(predicted by `burst-mcore (.*?)`\)"
    long, short, command = re.search(told, page).groups()
    for seq, share in (("64K", long), ("32K", short)):
        words = shlex.split(command.replace("64K", seq))
        head, _, *rows = CliRunner(env={"COLUMNS": "300"}).invoke(app, words).output.splitlines()
        row = next(row for row in rows if row.startswith("*"))  # the way of a call by default
        total, kernel = (float(row[: head.index(x) + len(x)].split()[-1]) for x in ("total ms", "kernel ms"))
        assert f"{100 * kernel / total:.0f} %" == share


def test_every_error_has_an_entry(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import messages

    page = messages.PAGE.read_text()
    globs, files = messages.globs_of(page), messages.messages()
    assert "\n* " not in page, "make docs writes the lists, which are not committed"
    page = messages.with_messages(page)
    assert len(files) > 100 and sum(map(len, files.values())) > 500
    for path, texts in files.items():
        matching = [glob for glob in globs if fnmatch(path, glob)]
        assert len(matching) == 1, (
            f"errors of {path} belong to {matching or 'no section'} of docs/reference/messages.md"
        )
        for text in texts:
            assert f"* {messages.shown(text)}\n" in page, f"no entry for {text!r} of {path}"
    for glob in globs:
        assert any(fnmatch(path, glob) for path in files), f"no error is of {glob}"


def _page_of_messages(monkeypatch):
    """The page of error messages as the site has it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import messages

    return messages.with_messages(messages.PAGE.read_text())


def test_words_about_a_key_of_the_section_are_no_errors(monkeypatch):
    pytest.importorskip("deepspeed")
    from burst_mcore.deepspeed.config.section import KEYS

    entries = _page_of_messages(monkeypatch).splitlines()
    assert len(entries) > 800
    for _, legal, meaning in KEYS.values():
        assert not {f"* `{legal}`", f"* `{meaning}`"} & {*entries}


def test_texts_of_errors_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import messages

    source = """
def check(x) -> str | None:
    if x > 1:
        raise ValueError(f"x is {x}, and must be "
                         "at most 1")
    if x > 0:
        raise RefusedError("batch", "too large" if x else "too small")
    gone = RuntimeError("the other rank " + name + " is gone")
    return f"it takes no {x} of these"

class Word:
    def refused(self, size):
        wrong = None
        if size:
            wrong = "q and k must be alike"
        elif size > 2:
            wrong = OF_HEADS
        if wrong:
            raise ValueError(f"{wrong}, got {size}")
        sys.exit(f"unknown {name} {size}; legal: few")
        raise TypeError(next(iter(why for why, is_so in {f"a head of {size}": size > 1}.items() if is_so)))
        refuse(*next(reasons_of(size), ("", None)))
        raise ValueError(self._longer("there is no mesh"))

    def _longer(self, problem):
        return f"{problem}: make one of {len(self.ranks)} ranks" + ", or none" * self.small

def reasons_of(size):
    yield "model", f"{size} states are carried"

OF_HEADS = "the heads do not divide"

def way_of(row) -> Way | str:
    return LONG if row.long else f"unknown method; known are {row}"

def predicted(row) -> Prediction:
    return None, "no preset knows this CPU"
"""
    assert set(messages._texts(ast.parse(source))) == {
        "it takes no … of these",
        "the other rank … is gone",
        "x is …, and must be at most 1",
        "refused (batch): too large",
        "refused (batch): too small",
        "q and k must be alike, got …",
        "the heads do not divide, got …",
        "unknown … …; legal: few",
        "a head of …",
        "refused (model): … states are carried",
        "there is no mesh: make one of … ranks, or none",
        "there is no mesh: make one of … ranks",
        "unknown method; known are …",
        "no preset knows this CPU",
    }


def _llama(**fields):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    return LlamaForCausalLM(LlamaConfig(**sizes, **fields))


def _raised():
    """Yield calls of which each raises an error that a user may meet."""
    import torch

    from burst_mcore import BurstConfig, Layout, Mask, Topology, burst_attention
    from burst_mcore.attention.schedule.actions import Pass
    from burst_mcore.deepspeed.config.section import section_of
    from burst_mcore.loss import fused_linear_cross_entropy
    from burst_mcore.transformers.models.served import use_burst
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
    yield lambda: use_burst(_llama(attention_dropout=0.1), 2)


def test_errors_that_are_raised_are_in_the_list(monkeypatch):
    pytest.importorskip("transformers")
    page = _page_of_messages(monkeypatch)
    entries = [words or fenced for words, fenced in re.findall(r"^\* (?:`([^`].*)`|`` (.*) ``)$", page, re.M)]
    named = [entry for entry in entries if len(re.findall("[A-Za-z]{2,}", entry)) >= 2]
    patterns = [re.compile(".*".join(map(re.escape, entry.split("…")))) for entry in named]
    for call in _raised():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
            call()
        text = " ".join(str(error.value).split())
        assert any(pattern.fullmatch(text) for pattern in patterns), (
            f"docs/reference/messages.md lacks: {text}"
        )


def test_the_rows_behind_the_page_of_predictions_are_those_of_the_public_files(monkeypatch):
    """Sections that the site alone has; the page itself is in the test of tables."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    import predictions

    public = ROOT / "benchmarks" / "public"
    text = predictions.details(public)
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        "Could any model do better?", "Choices", "Where the numbers come from", "Whose loop a row runs",
        "Training steps", "All rows",
    ]  # fmt: skip
    rows = text.partition("\n## All rows\n")[2].split("| row | measured | predicted | error | |\n")[1]
    counts = [len(json.loads((public / f"{name}.json").read_text())) for name in ("magi", "usp")]
    assert rows.count("\n|") == sum(counts) > 400
    page = (ROOT / "docs" / "evidence" / "predictions.md").read_text()
    assert "docs/scripts/predictions.py" in page and len(page.split()) <= 500


def test_pictures_are_as_the_code_draws_them(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    script = runpy.run_path(str(ROOT / "docs" / "scripts" / "pictures.py"))
    drawn = script["pictures"]()
    text = "\n".join(page.read_text() for page in PAGES)
    for name, picture in drawn.items():
        assert (ROOT / "docs" / "images" / name).read_text() == picture, f"make tables: {name} is another now"
        assert f"images/{name})" in text, f"no page shows {name}"
    images = {path.name for path in (ROOT / "docs" / "images").iterdir()}
    assert images == {*drawn}
    shown = [page.read_text() for page in PAGES]
    for name, command in script["COMMANDS"].items():
        pages = [page for page in shown if f"images/{name}.svg)" in page]
        assert pages and all(f"`burst-mcore {command}`" in page for page in pages), f"{name}: {command}"


def test_the_table_of_recompute_is_that_of_the_committed_run():
    from statistics import median

    from burst_bench.results import read

    table = (
        (ROOT / "docs" / "features" / "recompute.md")
        .read_text()
        .split("| CPU s recomputing |")[1]
        .splitlines()[2:]
    )
    results = read(ROOT / "benchmarks" / "results" / "recompute.json")
    rows = {}
    for (method, meter), samples in results.tables["4 layers"].items():
        rows.setdefault(method, {"method": method})[meter] = median(samples)
    assert len(rows) == 9
    for row, line in zip(rows.values(), table, strict=False):
        method, seconds, recomputing, ratio = (cell.strip(" `") for cell in line.strip("|").split("|"))
        words = {"none": "no", "attention": "keepattention", "segment 0.5": "segment(0.5)"}
        assert method.lower().startswith(words.get(row["method"], row["method"].split()[0])), line
        assert seconds == f"{row['cpu']:.1f}", line
        assert float(recomputing) == pytest.approx(row["recomputing"], abs=0.051), line
        if row.get("predicted"):
            assert ratio == f"{row['saved'] / row['predicted']:.2f}", line


def test_equal_work_bounds_what_any_model_can_reach(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "scripts"))
    from predictions import equal_work, missed_at_least

    from burst_bench.published.against import Compared
    from burst_bench.published.rows import Row

    assert missed_at_least([1.0]) == missed_at_least([1.0, 1.49]) == 0
    assert missed_at_least([1.0, 1.6]) == missed_at_least([1.0, 1.4, 1.6]) == 1
    assert missed_at_least([1.0, 2.0, 4.0, 4.1]) == 2

    fields = {"hardware": "H100", "gpus": 8, "gpus_per_node": 8, "heads": 8, "kv_heads": 8, "head_dim": 64}
    fields |= {"batch": 1, "seq": 8192, "mask": "causal", "passes": "fwd", "method": "usp", "tflops": 1.0}

    def classes(*ways):
        rows = [Row(**fields, head_parallel=heads, variant=words) for heads, words in ways]
        return len(equal_work([Compared({}, 1.0, 1.0, row=row) for row in rows]))

    assert classes((8, "basic"), (8, "zigzag")) == 1  # one program: no ring is left
    assert classes((4, "basic"), (4, "zigzag")) == 2
    assert classes((1, "zigzag"), (1, "zigzag qkvpack")) == 2  # only what is packed is not copied
    assert classes((2, "zigzag"), (2, "zigzag qkvpack")) == 2
