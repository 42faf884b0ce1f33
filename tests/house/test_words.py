"""Words that the field does not use for what is meant, and that are gone: see docs/reference/glossary.md."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
GONE = {
    "block": r"bundles?",
    "ring step": r"hops?",
    "shard": r"deals?|dealt|dealing|dealer",
    "rotate, send": r"travels?|travelling|travelled",
    "CP group": r"sequence groups?",
    "max logits": r"largest scores?",
    "supported": r"served",
    "unsupported": r"RefusedError|refused \\*\(\w*",
    "suffix": r"savedtail|tails?_of",
}
"""By the word that stands in their place."""


def test_words_that_are_gone_do_not_come_back():
    found, texts = [], 0
    for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split("\n"):
        path = ROOT / name
        if path.suffix not in (".py", ".md") or name == "CHANGELOG.md" or path == Path(__file__):
            continue
        texts += 1
        for word, gone in GONE.items():
            there = re.findall(rf"(?<![a-z])(?:{gone})(?![a-z])", path.read_text(), re.IGNORECASE)
            found += [f"{name}: {each}, say {word}" for each in there]
    assert texts > 400 and not found, found
