"""What the commands refuse: in one line that says what is legal, with status 2, before any work."""

import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest
from test_models_of_plans import LLAMA
from typer.testing import CliRunner

from burst_plan.cli import app, main

MEGATRON = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 32000 --swiglu"
EXPERTS = f"{MEGATRON} --num-experts 8 --moe-router-topk 2"
THREE_BY_FOUR = "--context-parallel-size 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1"
SEGMENT = "--context-parallel-attention-backend burst --burst-recompute segment --burst-recompute-keep auto"
LONG = "9" * 400
PLAN = [
    ("--model 900z", "unknown model '900z': give one of 7b"),
    (f"--model '{MEGATRON.replace('--vocab-size 32000 ', '')}'", "no --vocab-size"),
    (f"--model '{MEGATRON} --num-query-groups 2'", "without --group-query-attention"),
    (f"--model '{MEGATRON} --seq-length 4096'", "contradicts --seq-length 4096"),
    (f"--model '{MEGATRON} --tensor-model-parallel-size 3'", "no plan over 8 ranks with TP 3"),
    (f"--model '{MEGATRON} --expert-model-parallel-size 2'", "needs --num-experts"),
    (f"--model '{EXPERTS} --expert-model-parallel-size 3'", "EP 3 does not divide"),
    (f"--model '{EXPERTS} --moe-layer-freq maybe'", "--moe-layer-freq is a number, or a list"),
    (f"--model '{EXPERTS} --expert-tensor-parallel-size 2'", "is not planned"),
    (f"--model '{MEGATRON} --global-batch-size 3 {THREE_BY_FOUR}'", "3 sequences do not divide"),
    (f"--model '{MEGATRON} --hybrid-layer-pattern M-M*'", "--hybrid-layer-pattern M-M* is not planned"),
    ("--seq long", "a number of tokens looks like"),
    (f"--seq {LONG}", "a number of tokens is at most"),
    (f"--batch {LONG}", "--batch must be at least 1 and at most"),
    ("--batch 0", "--batch must be at least 1"),
    ("--cluster a800:0x8", "a cluster is nodes x ranks"),
    ("--cluster abacus:1x8", "unknown machine 'abacus'"),
    ("--cluster 9999999x9", "at most 16384 ranks"),
    ("--gpu memory=24GB,tflops=9,gb=9", "give a cluster such"),
    ("--rates none.json", "none.json is no file of rates"),
    ("--cluster l20:1x8 --rates fast.json", "kernel of 200 TFLOP/s, more than the peak of L20-PCIe 1x8"),
    ("--against rows.json", "give --model MODEL with --seq, or --against FILE"),
    ("--json nowhere/plan.json", "there is no folder nowhere"),
    ("--json ds.json/plan.json", "there is no folder"),
    ("--json .", "cannot write"),
]
"""Beside a model, a length and a cluster that are legal."""
DOCTOR = [
    (f"--world 8 --model '{MEGATRON} --context-parallel-size 3'", "do not divide 8 ranks"),
    (f"--world 8 --model '{MEGATRON} --window-size 128,0'", "for windows and documents use plan --mask"),
    (f"--world 8 --model '{MEGATRON} --recompute-granularity selective'", "selective is not predicted"),
    (f"--world 8 --model '{MEGATRON} {SEGMENT} --burst-recompute-memory-gb 4'", "auto is not predicted"),
    ("--model '--num-layers none'", "invalid int value"),
    (f"--model '{MEGATRON} --group-query-attention --num-query-groups 0'", "must be at least 1, got 0"),
    (f"ds.json --model '{MEGATRON} --kv-channels 512'", "support heads of at most 256, got 512"),
    ("ds.json --model ./none", "no causal LM in ./none"),
    ("ds.json --world 1000000", "--world must be at least 1 and at most 16384"),
    ("ds.json --world 3", "unsupported (sequence_parallel_size)"),
    ("ds.json --device h1000", "unknown machine 'h1000': one of A100-NVLink, A800"),
    ("ds.json --rates none.json", "is no file of rates"),
    ("wrong.json", 'did you mean "layout"'),
    ("striped.json --world 4 --model qwen3-next-80b-a3b", "layout striped shards neighbouring"),
]
DRAW = [
    ("--cluster 2by4", "2by4"),
    ("--cluster 0x4", "4x8"),
    ("--seq many", "128K or 1M, got 'many'"),
    ("--direction sideways", "forward, kv, query"),
    ("--head-parallel 3", "legal: [1, 2, 4, 8]"),
    ("--ring star", "'double', 'flat'"),
    ("--gpu memory=80GB,tflops=312,gb=2039,link=0", "each once, got 'link=0'"),
    ("--dtype int8", "dtype must be one of"),
    ("--measure", "at most 16384"),
    ("--mask star", "unknown mask 'star'"),
    ("--mask documents:131073", "but the sequence has 131072"),
    ("--layout star", "unknown layout 'star'"),
    ("--layout zigzag-documents", "must have documents"),
    ("--out /proc/x/y.json", "burst-mcore draw: "),
]
OTHERS = [
    ("--unknown", "burst-mcore: No such option"),
    ("nosuch", "burst-mcore: No such command 'nosuch'"),
    ("plan", "burst-mcore plan: give --model MODEL"),
    ("explain --heads x", "burst-mcore explain: Invalid value"),
    ("explain --heads", "burst-mcore: Option '--heads' requires an argument"),
    ("explain --cluster h100:100000x8", "a cluster has at most 16384 ranks here, got 800000"),
    ("explain --head-dim 100000000", "kernels support heads of at most 256, got one of 100000000"),
    ("explain --heads 1000000000", "heads must be at most 65536, got 1000000000"),
    ("bench nosuch", "burst-mcore bench: argument SUBJECT: invalid choice"),
    ("calibrate --out /", "burst-mcore calibrate: cannot write /: Is a directory"),
    ("calibrate --ranks 1", ""),
    ("calibrate --repeats 0", ""),
    ("calibrate --device cuda", ""),
    ("calibrate --device tpu", ""),
    ("doctor ds.json --gpu memory=24GB,tflops=165", "--gpu needs gb and link for 1 node of 2"),
]
CASES = [
    *((f"plan --model 7b --seq 128K --cluster a800:1x8 {words}", told) for words, told in PLAN),
    *((f"doctor --seq 64K --device a800 {words}", told) for words, told in DOCTOR),
    *((f"draw {words}", told) for words, told in DRAW),
    *OTHERS,
]
"""(command, words of its error)."""
SECTION = {"bf16": {"enabled": True}, "sequence_parallel_size": 2, "zero_optimization": {"stage": 2}}
FAST = {"compute": 2e14, "intra": 1e11, "inter": 2e10, "latency": 1e-5, "memory": 1e12}
FILES = {
    "ds.json": SECTION | {"burst_attention": {}},
    "wrong.json": SECTION | {"burst_attention": {"layuot": "zigzag"}},
    "striped.json": SECTION | {"burst_attention": {"layout": "striped"}},
    "fast.json": {"rates": FAST},
}


def refused(words):
    """The line that a command ends with."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, (words, done.output)
    return done.output


@pytest.mark.parametrize("command", ["plan", "doctor", "draw", "another"])
def test_bad_input_is_one_line_and_status_2(command, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("the command began to work")

    monkeypatch.setattr("burst_bench.calibrate.in_processes", never)
    monkeypatch.chdir(tmp_path)
    for name, contents in FILES.items():
        Path(name).write_text(json.dumps(contents))
    cases = [case for case in CASES if (case[0].split()[0] if case not in OTHERS else "another") == command]
    assert len(cases) > 10
    for words, told in cases:
        assert told in refused(shlex.split(words)), words
        assert {file.name for file in tmp_path.iterdir()} == {*FILES}, words


CONFIGS = [
    ({"is_encoder_decoder": True}, "an encoder and a decoder"),
    ({"architectures": ["BertForMaskedLM"]}, "sees tokens on both sides"),
    ({"layer_types": ["linear_attention", "full_attention"]}, "are not predicted: linear_attention"),
    ({"mamba_d_state": 16}, "are not predicted: mamba_d_state"),
    ({"moe_num_experts": 64}, "not from moe_num_experts"),
    ({"hidden_size": "1024"}, "hidden_size must be an integer from 1, got '1024'"),
    ({"hidden_size": 1025}, "16 heads do not divide hidden_size 1025"),
    ({"hidden_size": 10**400}, "must be an integer from 1 to"),
    ({"vocab_size": None}, "it has no vocab_size"),
    ({"num_key_value_heads": 5}, "kv_heads must divide heads"),
    ("[]", "must be JSON objects"),
    ('{"text_config": "x"}', "must be JSON objects"),
    ("{", "describes no decoder"),
]


def test_other_models_are_refused_in_a_line_with_the_file(tmp_path):
    file = tmp_path / "config.json"
    for config, words in CONFIGS:
        file.write_text(config if isinstance(config, str) else json.dumps({**LLAMA, **config}))
        line = refused(["plan", "--model", str(tmp_path), "--seq", "8K"])
        assert f"{file} describes no decoder: " in line and words in line, line


def test_a_package_that_is_missing_is_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    words = ["plan", "--model", MEGATRON, "--seq", "8K", "--cluster", "a800:1x1", "--json", "plan.json"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["burst-mcore", *words])
    monkeypatch.setitem(sys.modules, "tabulate", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert "this needs the package tabulate, which is not installed: pip" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "burst_plan.cli")
    with pytest.raises(SystemExit) as ended:
        importlib.import_module("burst_plan.cli")
    told = "burst-mcore needs packages: pip install '.[cli]' in a clone, or 'FILE.whl[cli]'\n"
    assert ended.value.code == 2 and capsys.readouterr().err == told
