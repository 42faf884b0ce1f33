"""The list of causal LMs in the docs is what is true."""

from pathlib import Path

import pytest
from ranks import processes
from zoo import NAMES, VERSION, everything, outcomes, page

NOT_BUILT = {
    *("cohere_compass_text", "dbrx", "gemma3n", "gemma4_assistant", "musicgen", "musicgen_melody"),
    *("qwen4_exp", "qwen4_exp_text"),
}
"""Names of which transformers itself builds no tiny model here."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
def test_every_causal_lm_is_equal_or_refused():
    found = everything()
    assert not {name: words for name, words in found.items() if words[0] in ("wrong", "crashed")}
    assert sum(outcome == "equal" for outcome, _ in found.values()) >= 90
    not_built = {name for name, words in found.items() if words[0] == "not built"}
    assert not_built <= NOT_BUILT
    assert page(found) == PAGE.read_text(), "write it again: python tests/deepspeed/zoo.py docs/models.md"


def test_a_few_of_each_kind():
    names = ("llama", "gemma4_text", "deepseek_v3", "doge", "qwen3_next", "roberta", "gemma3")
    (found, _) = processes(2, outcomes, names)
    assert [found[name][0] for name in names] == ["equal"] * 3 + ["refused"] * 4
    assert "a layer's mask as on a tensor" in found["doge"][1]
    assert "linear_attention (a state runs along" in found["qwen3_next"][1]
    assert "vision_config" in found["gemma3"][1]


def test_the_page_names_every_model():
    text = PAGE.read_text()
    if f"transformers {VERSION}." not in text:
        pytest.skip(f"the page is of another version than {VERSION}, which may name other models")
    assert all(f"`{name}`" in text for name in NAMES)
