"""The section's schema: what is legal, what an error says."""

import json

import pytest

from burst_mcore import BurstConfig
from burst_mcore.checkpointing import Full, KeepAttention, Offload, Segment
from burst_mcore.deepspeed.section import Section, SectionError, config_dict, section_of


def test_all_defaults_without_a_section():
    assert section_of({}) == Section()
    assert section_of({"burst_attention": {}}).attention == BurstConfig()


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, None),
        ({"policy": "full", "offload": False}, Full()),
        ({"policy": "attention", "offload": True}, Offload(KeepAttention())),
        ({"policy": "segment"}, Segment(0.5)),
        ({"policy": "segment", "keep": 1}, Segment(1.0)),
        ({"policy": "segment", "keep": "auto", "memory_gb": 4}, Segment("auto", 4.0)),
    ],
)
def test_checkpointing_makes_a_recompute_policy(given, policy):
    assert section_of({"burst_attention": {"checkpointing": given}}).checkpointing.recomputed() == policy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layuot": "zigzag"}, 'unknown key "burst_attention.layuot": did you mean "layout"?'),
        ({"mesh": "2x2"}, 'unknown key "burst_attention.mesh": it is removed; write ring='),
        ({"checkpointing": {"polcy": "full"}}, 'did you mean "policy"? Legal: policy, keep'),
        ({"checkpointing": {"policy": "segments"}}, "must be one of: none, full, attention, segment; got"),
        ({"checkpointing": {"policy": "segment", "keep": 1.5}}, "from 0 to 1, got 1.5"),
        ({"checkpointing": {"policy": "segment", "keep": "auto"}}, "keep='auto' needs memory_gb"),
        ({"checkpointing": {"policy": "segment", "keep": "auto", "memory_gb": 0}}, "above 0; got 0"),
        ({"checkpointing": {"policy": "segment", "memory_gb": 2}}, "memory_gb is for keep='auto'"),
        ({"checkpointing": {"policy": "full", "keep": 0.5}}, 'keep is for policy "segment", got it with'),
        ({"checkpointing": {"policy": "attention", "memory_gb": 2}}, 'memory_gb is for policy "segment"'),
        ({"checkpointing": {"offload": True}}, 'offload is for policy "attention" and "segment", got it'),
        ({"layout": "zigzags"}, "unknown layout 'zigzags'"),
        ({"kernel": "flash9"}, "must be one of: auto, aten-cpu"),
        ({"head_parallel": "all"}, "or 'auto', got 'all'"),
        ({"fused_loss": "yes"}, "must be true or false, got 'yes'"),
        ([], "must be a JSON object, got []"),
    ],
)
def test_errors_name_the_key_and_what_is_legal(given, words):
    with pytest.raises(SectionError) as error:
        section_of({"burst_attention": given})
    assert words in str(error.value)


def test_a_section_with_a_typing_error_in_its_name_is_not_ignored():
    with pytest.raises(SectionError, match='unknown section "burst": did you mean "burst_attention"'):
        section_of({"burst": {}})


def test_a_file_that_is_not_there_or_no_object(tmp_path):
    (tmp_path / "ds.json").write_text("[1]")
    for path in (tmp_path / "ds.json", tmp_path / "none.json"):
        with pytest.raises(SectionError):
            config_dict(path)
    (tmp_path / "twice.json").write_text('{"sequence_parallel_size": 4, "sequence_parallel_size": 1}')
    with pytest.raises(SectionError, match="sequence_parallel_size"):
        config_dict(tmp_path / "twice.json")
    (tmp_path / "ds.json").write_text(json.dumps({"a": 1}))
    assert config_dict(tmp_path / "ds.json") == {"a": 1}
