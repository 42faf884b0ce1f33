"""Models that a plan reads from a config.json: their sizes, their windows, and those that are refused."""

import json

import pytest
from typer.testing import CliRunner

from burst_plan.cli import app
from burst_plan.step.advice import of_windows
from burst_plan.step.model import from_config, model_of
from burst_plan.step.planned import planned

LLAMA = dict(
    model_type="llama", hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, vocab_size=32000,
    intermediate_size=2816, num_hidden_layers=8,
)  # fmt: skip
KINDS = (
    "bloom cohere2 deepseek_v2 falcon gemma2 gpt2 gpt_bigcode gptj gpt_oss llama mistral mixtral olmoe opt "
    "phi phi3 qwen2_moe qwen3 qwen3_moe starcoder2"
).split()


def _folder(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.CONFIG_MAPPING[kind]()
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    positions = [
        m.weight.numel() for name, m in model.named_modules() if name.endswith((".wpe", "positions"))
    ]
    counted = sum({id(p): p.numel() for p in model.parameters()}.values()) - sum(positions)
    assert model_of(str(tmp_path))[0].parameters == pytest.approx(counted, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 7.62),
        ("Qwen2.5-72B", 72.7),
        ("Qwen3-8B", 8.19),
        ("Qwen/Qwen3-32B", 32.8),
        ("Qwen3-30B-A3B-Instruct-2507", 30.5),
        ("qwen3-235b-a22b", 235.1),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7),
        ("deepseek-ai/DeepSeek-V3-0324", 671.0),
        ("openai/gpt-oss-20b", 20.9),
        ("GPT-OSS-120B", 116.8),
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("meta-llama/Llama-3.3-70B-Instruct", 70.6),
        ("Llama3-8B", 8.03),
        ("meta-llama/Llama-2-7b-hf", 6.74),
        ("7B", 6.74),
    ],
)
def test_models_have_the_names_and_the_parameters_that_their_makers_print(name, billions):
    assert model_of(name)[0].parameters / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("name", ["Llama-3.2-8B", "Qwen2-57B", "qwen3", "llama3-8b/", "Llama-4-8B"])
def test_other_names_are_no_preset(name):
    with pytest.raises(ValueError, match="unknown model .*: give one of 7b, .*gpt-oss-120b"):
        model_of(name)


def test_names_of_gpt2_are_read_as_its_config_json_has_them(tmp_path):
    gpt2 = dict(model_type="gpt2", n_embd=768, n_head=12, n_layer=12, vocab_size=50257, n_inner=None)
    model = model_of(_folder(tmp_path, gpt2))[0]
    assert (model.hidden, model.heads, model.layers, model.ffn) == (768, 12, 12, 3072)
    assert model.tied and not model.gated and model.parameters == pytest.approx(124e6, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 8),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 4096}, 0),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 6,
            },
            2,
        ),
        ({"model_type": "gemma2", "sliding_window": 4096}, 4),
        ({"model_type": "gemma3_text", "sliding_window": 4096}, 7),
        ({"sliding_window": 4096, "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 5}, 3),
    ],
)
def test_layers_with_a_window_are_counted(changes, windowed):
    model = from_config({**LLAMA, **changes}, "model")
    assert model.windowed == windowed and model.window == (4096 if windowed else 0)


def test_a_models_window_is_the_mask_of_its_plan(tmp_path):
    mistral = _folder(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 4096})
    answer = planned(mistral, "64K", "a800:1x4", 1, None)
    causal = planned(mistral, "64K", "a800:1x4", 1, None, "causal")
    assert answer.mask == "window:4096" and answer.chosen.seconds < causal.chosen.seconds
    assert not of_windows(answer.chosen) and "asks for sliding_window 4096" in of_windows(causal.chosen)[0]
    assert planned(mistral, "4K", "a800:1x4", 1, None).mask == "causal"
    gemma = _folder(tmp_path, {**LLAMA, "model_type": "gemma2", "sliding_window": 4096})
    answer = planned(gemma, "64K", "a800:1x4", 1, None)
    assert answer.mask == "causal" and "4 of 8 layers have a window" in of_windows(answer.chosen)[0]


def test_the_doctor_takes_the_models_window(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"bf16": {"enabled": true}, "sequence_parallel_size": 4, "burst_attention": {},'
        ' "zero_optimization": {"stage": 1}}'
    )
    lines = {}
    for window in (None, 4096):
        model = _folder(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": window})
        words = ["doctor", str(file), "--model", model, "--seq", "64K", "--world", "4", "--device", "a800"]
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        lines[window] = done.output.splitlines()
    told = {w: [line for line in told if line.startswith(("way", "step"))] for w, told in lines.items()}
    assert not any(line.startswith("note") for line in lines[4096])
    assert all(a != b for a, b in zip(told[None], told[4096], strict=True)) and len(told[4096]) == 2


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "is_encoder_decoder": True}, "an encoder and a decoder"),
        ({**LLAMA, "architectures": ["BertForMaskedLM"]}, "sees tokens on both sides"),
        (
            {**LLAMA, "layer_types": ["linear_attention", "full_attention"]},
            "are not predicted: linear_attention",
        ),
        ({**LLAMA, "mamba_d_state": 16}, "are not predicted: mamba_d_state"),
        ({**LLAMA, "moe_num_experts": 64}, "not from moe_num_experts"),
        ({**LLAMA, "hidden_size": "1024"}, "hidden_size must be an integer from 1, got '1024'"),
        ({**LLAMA, "hidden_size": 1025}, "16 heads do not divide hidden_size 1025"),
        ({**LLAMA, "hidden_size": 10**400}, "must be an integer from 1 to"),
        ({**LLAMA, "vocab_size": None}, "it has no vocab_size"),
        ({**LLAMA, "num_key_value_heads": 5}, "kv_heads must divide heads"),
        ("[]", "must be JSON objects"),
        ('{"text_config": "x"}', "must be JSON objects"),
        ("{", "describes no decoder"),
    ],
)
def test_other_models_are_refused_in_a_line_with_the_file(config, words, tmp_path):
    done = CliRunner().invoke(app, ["plan", "--model", _folder(tmp_path, config), "--seq", "8K"])
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1, done.output
    assert f"{tmp_path}/config.json describes no decoder: " in done.output and words in done.output


def test_the_doctor_takes_the_length_of_megatrons_arguments_or_a_default(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "sequence_parallel_size": 2, "burst_attention": {}}')
    sizes = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --vocab-size 1024 --swiglu"
    for words, told in (
        ([str(file), "--model", f"{sizes} --seq-length 8192"], "sequence: 8192 tokens"),
        ([str(file), "--model", sizes], "sequence: 131072 tokens"),
        (["--model", "7b", "--world", "2"], "--seq-length 131072"),
    ):
        done = CliRunner().invoke(app, ["doctor", *words, "--device", "h100"])
        assert done.exit_code == 0 and told in done.output, done.output


def test_what_the_doctor_says_is_said_once_and_without_exponents(tmp_path):
    gemma = {**LLAMA, "model_type": "gemma2", "sliding_window": 4096, "num_hidden_layers": 400}
    file = tmp_path / "ds.json"
    file.write_text('{"bf16": {"enabled": true}, "sequence_parallel_size": 2, "burst_attention": {}}')
    words = ["--model", _folder(tmp_path, gemma), "--seq", "1M", "--device", "l20", "--world", "2"]
    done = CliRunner().invoke(app, ["doctor", str(file), *words])
    assert done.exit_code == 0 and done.output.count("200 of 400 layers have a window") == 1, done.output
    told = next(line for line in done.output.splitlines() if line.startswith("step"))
    assert "e+" not in told and "nor would a shorter sequence" in done.output, done.output
