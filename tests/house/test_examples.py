"""The parts of the main job that need no training run; tests/megatron/pretraining has the runs."""

import pytest

pytest.importorskip("tensorboard")
pytest.importorskip("megatron.core")

import re
import shlex
import time
from pathlib import Path

import compare
import finetune_hf
import job
import prepare_bytes
import train
from alone import TakenError, alone_in
from job import Iteration

ROOT = Path(__file__).parents[2]


def _iterations(losses, norm=1.0):
    return [Iteration(i + 1, loss, norm, 0.5 if i else None) for i, loss in enumerate(losses)]


def test_the_last_value_of_a_flag_counts_however_it_is_written():
    arguments = ["--train-iters", "10", "--x", "1", "--train-iters=20"]
    assert train.value_of("--train-iters", arguments) == "20"


def test_the_summary_of_one_iteration_and_of_many():
    assert "loss of the last 1 iterations: 3.000" in train.summary(_iterations([3.0]), 100, 5)
    text = train.summary(_iterations([9.0, *[2.0] * 10]), 100, 5)
    assert "loss of the last 10 iterations: 2.000" in text
    assert "200 tokens/s" in text


def test_the_loss_curve_is_a_picture(tmp_path):
    train.plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "loss": 3.0}\n{"iteration": 2, "loss": 2.0}\n')
    train.plot(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_compare_takes_the_largest_relative_difference_of_full_runs():
    one, other = _iterations([2.0] * 20), _iterations([2.0] * 19 + [2.002], norm=1.01)
    assert compare.difference(other, one) == pytest.approx((1e-3, 1e-2))
    with pytest.raises(ValueError, match="20 iterations"):
        compare.difference(one[:3], one[:3])


def test_pieces_are_the_text_cut_at_line_ends():
    text = b"".join(b"line %d\n" % i for i in range(1000)) + b"no newline"
    pieces = list(prepare_bytes.pieces(text))
    assert b"".join(pieces) == text
    assert all(piece.endswith(b"\n") and len(piece) >= prepare_bytes.PIECE for piece in pieces[:-1])
    assert list(prepare_bytes.pieces(b"")) == []


def test_a_folder_takes_one_run_at_a_time_and_is_free_after_an_error(tmp_path):
    again = pytest.raises(TakenError, match=f"another run writes to {tmp_path}")
    with again, alone_in(tmp_path), alone_in(tmp_path):
        raise AssertionError("two at once")
    with alone_in(tmp_path):
        pass


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


class _Slow:
    """A job whose ranks take long to start."""

    def run(self):
        time.sleep(0.5)
        yield Iteration(3, 2.0, 1.0, None)
        for number in range(4, 8):
            time.sleep(0.01)
            yield Iteration(number, 2.0, 1.0, 0.01)


def test_the_remaining_time_does_not_count_the_start(monkeypatch):
    rates = []

    class Bar(train.tqdm):
        def display(self, *arguments, **options):
            start = getattr(self, "start_t", 0)  # not there yet at the first drawing
            rates.append((self.n - self.initial) / (time.time() - start))
            return super().display(*arguments, **options)

    monkeypatch.setattr(train, "tqdm", Bar)
    assert len(train.follow(_Slow(), 10, 100, 2)) == 5
    starts, last = rates[:2], rates[2:]
    assert starts == [0, 0] and len(last) > 3, rates  # before and at the first iteration
    assert all(10 < rate < 200 for rate in last), rates  # with the start: below 10


def test_an_interrupt_is_one_whatever_handler_torch_has_set(monkeypatch, tmp_path):
    class Context:
        def wait(self, **_):
            raise job.SignalException("Process 1 got signal: 2", 2)

        def pids(self):
            return {}

        def close(self):
            pass

    monkeypatch.setattr(job, "start_processes", lambda **_: Context())
    with pytest.raises(KeyboardInterrupt):
        next(job.Job(tmp_path, 2, []).run())


def test_an_interrupted_training_says_so(monkeypatch, tmp_path, capsys):
    def follow(*_):
        raise KeyboardInterrupt

    for name, stand_in in (("prepare", lambda: None), ("follow", follow), ("plot", lambda *_: None)):
        monkeypatch.setattr(train, name, stand_in)
    assert train.train(tmp_path, ["--save", str(tmp_path / "checkpoint")]) == 1
    assert capsys.readouterr().err == "training stopped: interrupted; nothing is saved yet\n"
