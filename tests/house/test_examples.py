"""The parts of the main job that need no training run; tests/megatron/pretraining has the runs."""

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("megatron.core")

import re
import shlex
from pathlib import Path

import finetune_hf
import train

ROOT = Path(__file__).parents[2]


def test_commands_of_fine_tuning_are_legal_and_say_which_files_are_text():
    texts = [page.read_text() for page in [*ROOT.glob("docs/**/*.md"), ROOT / "examples" / "finetune.slurm"]]
    commands = re.findall(r"examples/finetune(?:_hf.py|.slurm) (--config .*)", "\n".join(texts))
    asked = [finetune_hf.arguments_of(shlex.split(command)) for command in commands]
    assert len(asked) == 5 and all(each.pattern == "*.txt" for each in asked)
    assert sorted(each.tokens for each in asked)[-2:] == [4096, 2**20]


def test_fine_tuning_without_text_is_one_line(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a")
    words = ["--config", "ds.json", "--out", str(tmp_path / "out"), "--data", str(tmp_path)]
    with pytest.raises(SystemExit, match=rf"^{tmp_path} has no file \*.py: give --data or --pattern$"):
        finetune_hf.run(finetune_hf.arguments_of(words), None, "", words)
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        finetune_hf.arguments_of([*words, "--tokens", "1G"])
    assert "a number of tokens looks like 4096, 128K or 1M, got '1G'" in capsys.readouterr().err


def test_an_interrupted_training_says_so(monkeypatch, tmp_path, capsys):
    def follow(*_):
        raise KeyboardInterrupt

    for name, stand_in in (("prepare", lambda: None), ("follow", follow), ("plot", lambda *_: None)):
        monkeypatch.setattr(train, name, stand_in)
    assert train.train(tmp_path, ["--save", str(tmp_path / "checkpoint")]) == 1
    assert capsys.readouterr().err == "training stopped: interrupted; nothing is saved yet\n"
