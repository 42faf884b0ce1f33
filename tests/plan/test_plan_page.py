"""The page of `plan --html`: one file that loads nothing, with the data of --json, and sliders that work."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import limits
import pytest
from typer.testing import CliRunner

from burst_plan.cli import app
from burst_plan.step.figures import TABLE

ROOT = Path(__file__).parents[2]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ASKED = ["plan", "--model", "7b", "--seq", "128K", "--cluster", "a800:1x8"]


def _plan(*options):
    return CliRunner().invoke(app, [*ASKED, *map(str, options)])


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    done = _plan("--html", folder / "plan.html", "--json", folder / "plan.json")
    assert done.exit_code == 0, done.output
    return folder


def _data(text, name):
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', text)[1])


def test_the_page_holds_the_data_of_json(written):
    text = (written / "plan.html").read_text()
    assert _data(text, "plan-data") == json.loads((written / "plan.json").read_text())
    assert text.count("predicted, not measured") >= 4 and "{{" not in text


def test_every_speed_comes_with_the_errors_of_its_kind(written):
    plan = json.loads((written / "plan.json").read_text())
    stops = _data((written / "plan.html").read_text(), "stops-data")
    ways = [*plan["ways"], plan["recommended"], *(way for cell in stops["cells"] for way in cell["ways"])]
    assert len(ways) > 200
    for way in ways:
        kind = "TP or PP" if re.search("TP|PP", way["words"]) else "long context"
        errors = way["errors"]
        assert errors["kind"] == kind and errors["runs"] > 0 and errors["low"] < errors["high"]
        assert errors["words"].endswith(f"were {errors['range']} off the measured speed")
    assert {way["errors"]["kind"] for way in ways} == {"TP or PP", "long context"}
    assert "of this kind (dense FSDP)" in _plan("--seq", "8K", "--batch", "16", "--top", "1").output
    for cell in [plan, *stops["cells"]]:
        ways = cell["ways"]
        assert not ways or cell["reason"].count("public runs of this kind") == 1
    page = (written / "plan.html").read_text()
    assert "escaped(way.errors.range)" in page and '"off by"' in page
    printed = _plan("--top", "3").output
    assert re.search(r"tokens/s/GPU +off by +MFU", printed)
    assert f"speeds: {plan['recommended']['errors']['words']}" in printed


def test_the_page_loads_nothing(written):
    text = (written / "plan.html").read_text()
    assert not re.search(r"https?:|//\w+\.|@import|url\(|<script[^>]* src|<iframe|\bfetch\(|XMLHttp", text)
    assert re.findall(r'\bhref="([^"]*)"', text) == ["data:,"]
    assert "default-src 'none'" in text


def test_stops_of_the_sliders_are_searches_of_their_own(written):
    from burst_plan.step.planned import planned

    stops = _data((written / "plan.html").read_text(), "stops-data")
    assert stops["gpus"] == [2, 4, 8, 16] and stops["seqs"] == [2**n for n in range(14, 20)]
    assert len(stops["cells"]) == 24
    cell = next(one for one in stops["cells"] if (one["gpus"], one["seq"]) == (16, 2**16))
    found = planned("7b", "64K", "a800:2x8", 1, None)
    assert cell["ways"][0]["words"] == str(found.chosen.way) and cell["reason"] == found.reason
    assert cell["ways"][0]["seconds"] == pytest.approx(found.chosen.seconds)
    assert cell["slower"] + len(cell["ways"]) == len(found.ranked)
    nothing = [one for one in stops["cells"] if not one["ways"]]
    assert nothing and all(sum(one["least"]["memory"].values()) > stops["usable"] for one in nothing)
    assert all(sum(one["memory"].values()) <= stops["usable"] for c in stops["cells"] for one in c["ways"])


def test_a_name_cannot_leave_its_place_in_the_page():
    from burst_plan.step.page import page
    from burst_plan.step.planned import planned

    model = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 1024 --swiglu"
    answer = planned(model, "4K", "a800:1x2", 1, None)
    hostile = "</script><b>{{stops}}"
    object.__setattr__(answer.model, "name", hostile)
    text = page(answer)
    assert "</script><b>" not in text and _data(text, "plan-data")["model"]["name"] == hostile


def test_given_degrees_hold_at_every_stop():
    from burst_plan.step.page import page
    from burst_plan.step.planned import planned

    model = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 1024 --swiglu"
    answer = planned(f"{model} --tensor-model-parallel-size 4", "4K", "a800:1x4", 1, None)
    cells = _data(page(answer), "stops-data")["cells"]
    assert all("TP 4" in way["words"] for cell in cells for way in cell["ways"])
    refused = {cell["gpus"]: cell["reason"] for cell in cells if not cell["ways"]}
    assert set(refused) == {1, 2} and all("with TP 4" in why for why in refused.values())


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/plan.html", "there is no folder"),
        ("file/plan.html", "there is no folder"),
        (".", "cannot write"),
        ("n" * 300, "cannot write"),
        ("/proc/plan.html", "cannot write"),
        ("plan.json", "two files are to be written to plan.json"),
    ],
)
def test_a_page_that_cannot_be_written_is_one_line_and_status_2(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("kept")
    done = _plan("--json", "plan.json", "--html", path)
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1 and words in done.output, done.output
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and Path("file").read_text() == "kept"


def test_a_page_is_of_a_model(tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    done = CliRunner().invoke(app, ["plan", "--against", str(rows), "--html", str(tmp_path / "plan.html")])
    assert done.exit_code == 2 and "go with --model" in done.output
    assert [one.name for one in tmp_path.iterdir()] == ["rows.json"]


def test_a_bad_model_leaves_no_page(tmp_path):
    done = CliRunner().invoke(
        app, ["plan", "--model", "900z", "--seq", "1M", "--html", str(tmp_path / "a.html")]
    )
    assert done.exit_code == 2 and not list(tmp_path.iterdir())


def test_a_wheel_has_the_template_and_all_tables():
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    step = ROOT / "burst_plan" / "step"
    there = {str(path.relative_to(step)) for suffix in ("html", "json") for path in step.rglob(f"*.{suffix}")}
    assert {"page.html", TABLE} < there == set(packaged["burst_plan.step"])


def _shown(page, words, folder):
    """Open the page in a browser; return the texts of elements with an id."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/browser",
               "--virtual-time-budget=3000", "--dump-dom", f"file://{page}{words}"]  # fmt: skip
    done = limits.run(command)
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r'<(?:dd|output|p) [^>]*?id="([\w-]+)"[^>]*>([^<]*)<', done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_a_slider_changes_what_a_browser_shows(written, tmp_path):
    page = written / "plan.html"
    stops = _data(page.read_text(), "stops-data")
    cells = {(one["seq"], one["gpus"]): one for one in stops["cells"]}

    def expected(seq, gpus):
        return float(f"{cells[seq, gpus]['ways'][0]['tokens_per_second_gpu']:.3g}")

    for words, stop in (
        ("", (2**17, 8)),
        (f"#seq={2**15}&gpus=8", (2**15, 8)),
        (f"#seq={2**15}&gpus=16", (2**15, 16)),
    ):
        shown = _shown(page, words, tmp_path)
        assert float(shown["tokens"].replace(",", "")) == pytest.approx(expected(*stop), rel=5e-3)
        assert f"{stop[0]:,} tokens" in shown["seq-value"] and shown["gpus-value"] == f"{stop[1]} GPUs"
    assert len({expected(2**17, 8), expected(2**15, 8), expected(2**15, 16)}) == 3
    too_long = next(stop for stop, cell in cells.items() if not cell["ways"])
    assert _shown(page, "#seq={}&gpus={}".format(*too_long), tmp_path)["seconds"] == "does not go"

    moved = tmp_path / "moved.html"  # as a hand does: an input event of the slider
    act = '<script>$("seq").value = 1; $("seq").dispatchEvent(new Event("input"));</script></body>'
    moved.write_text(page.read_text().replace("</body>", act))
    shown = _shown(moved, "", tmp_path)
    assert float(shown["tokens"].replace(",", "")) == pytest.approx(expected(2**15, 8), rel=5e-3)
