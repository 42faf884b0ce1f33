"""The list of causal LMs in the docs is what is true."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from ranks import processes
from zoo import NAMES, VERSION, WITH_IMAGES, everything, outcomes, page

NOT_BUILT = {
    *("dbrx", "gemma3n", "gemma4_assistant", "musicgen", "musicgen_melody"),
    *("qwen4_exp", "qwen4_exp_text"),
}
"""Names of which transformers itself builds no tiny model here."""
PAGE = Path(__file__).parents[3] / "docs" / "frameworks" / "models.md"
MADE_WITH = re.compile(r"in transformers (\d[\d.]*\d)\.")
"""The page's version of transformers."""


@pytest.mark.slow
def test_every_causal_lm_is_equal_or_unsupported():
    found = everything()
    assert not {name: words for name, words in found.items() if words[0] in ("wrong", "crashed")}
    assert sum(outcome == "equal" for outcome, _ in found.values()) >= 127
    not_built = {name for name, words in found.items() if words[0] == "not built"}
    assert not_built <= NOT_BUILT
    again = "write it again: python tests/deepspeed/models/zoo.py docs/frameworks/models.md"
    made = _made_with()
    assert made.release[:2] == Version(VERSION).release[:2], again
    assert (
        MADE_WITH.sub(f"in transformers {made}.", page(found)) == PAGE.read_text().partition(WITH_IMAGES)[0]
    ), again


def test_a_few_of_each_kind():
    equal = ("llama", "gemma3", "gemma4", "gemma4_text", "deepseek_v3", "hrm_text", "qwen3")
    equal += ("qwen3_next", "lfm2", "mamba2", "jamba")
    unsupported = ("doge", "inkling_text", "roberta", "minimax_m3_vl_text")
    (found, _) = processes(2, outcomes, (*equal, *unsupported))
    assert {name: found[name][0] for name in equal} == dict.fromkeys(equal, "equal")
    assert {name: found[name][0] for name in unsupported} == dict.fromkeys(unsupported, "unsupported")
    assert "layers of type hybrid" in found["inkling_text"][1]
    assert "layers of type minimax_m3_sparse" in found["minimax_m3_vl_text"][1]
    assert "a layer's mask as on a tensor" in found["doge"][1]


def _made_with():
    (version,) = MADE_WITH.findall(PAGE.read_text())
    return Version(version)


def test_the_page_is_of_a_version_that_an_install_takes_and_names_its_models():
    """A release that only mends its minor version names the same models; another minor version may not."""
    project = tomllib.loads((PAGE.parents[2] / "pyproject.toml").read_text())["project"]
    asked = [Requirement(line) for lines in project["optional-dependencies"].values() for line in lines]
    ranges = [each.specifier for each in asked if each.name == "transformers"]
    assert len(ranges) == 2 and all(_made_with() in specifier for specifier in ranges)
    if _made_with().release[:2] == Version(VERSION).release[:2]:
        text = PAGE.read_text()
        assert all(f"`{name}`" in text for name in NAMES)
