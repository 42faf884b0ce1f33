"""Vision-language models over a CP group, held to one process: losses, and gradients of every weight."""

from pathlib import Path

import pytest
from equal import compared
from families import FOURTEEN, class_of
from ranks import processes
from zoo import WITH_IMAGES, everything
from zoo_of_images import NAMES, TIMM, outcomes

LOSS, GRADIENT = 1e-5, 1e-4
FEW = ("qwen3_vl", "gemma3", "llava_next", "smolvlm")
"""Positions and features of several dims, blocks of images, tiles, rows of images."""
PAGE = Path(__file__).parents[2] / "docs" / "frameworks" / "models.md"
VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_onevision", "llava_next_video", "video_llava")


def check(size, names, case="plain", **options):
    assert all(map(class_of, names))  # which imports their files, here once: ranks are forked
    for found in processes(size, compared, names, case, options):
        assert found.keys() == set(names)
        for name, (loss, gradient, where) in found.items():
            assert loss < LOSS and gradient < GRADIENT, (name, loss, gradient, where)


def test_families_on_two_ranks():
    check(2, FOURTEEN, config={"layout": "zigzag"})


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("towers", ["shared", "whole"])
def test_families(size, layout, towers):
    check(size, FOURTEEN, config={"layout": layout}, towers=towers)


@pytest.mark.parametrize("layout", ["striped", "contiguous"])
def test_four_ranks_of_which_some_have_no_image(layout):
    check(4, ("qwen3_vl", "gemma3"), config={"layout": layout})


@pytest.mark.parametrize("case", ["packed", "text", "some rows", "padded", "lora", "frozen", "checkpointed"])
def test_batches_and_models_of_other_kinds(case):
    check(2, FEW, case, config={"layout": "striped"})


@pytest.mark.parametrize("policy", ["full", "attention", "segment"])
def test_layers_that_recompute(policy):
    check(2, ("qwen3_vl", "gemma3"), checkpointing=policy)


def test_the_models_own_loss():
    check(2, ("qwen3_vl", "gemma3"), loss="model")


def test_a_hybrid_text_tower():
    check(2, ("qwen3_5",))


def test_a_tower_that_gives_more_than_features_is_whole_on_each_rank():
    check(2, ("ovis2",))


def test_a_tower_that_normalizes_over_images_is_whole_on_each_rank():
    check(2, ("llava",), "normalized")


@pytest.mark.parametrize("case", ["videos", "both"])
@pytest.mark.parametrize("towers", ["shared", "whole"])
def test_videos_alone_and_beside_images(case, towers):
    check(2, VIDEOS if case == "both" else (*VIDEOS, "glm4v"), case, towers=towers)


def test_sound():
    check(2, ("voxtral",), "sound")


@pytest.mark.slow
def test_every_image_text_model_is_equal_or_unsupported_as_the_page_says():
    """Those with towers of timm are left out where it is not installed."""
    results = everything(outcomes, NAMES, at_once=5)
    outcome_of = {name: outcome for name, (outcome, words) in results.items() if TIMM not in words}
    equal, _, unsupported = PAGE.read_text().partition(WITH_IMAGES)[2].partition("**Unsupported")
    for name, outcome in outcome_of.items():
        assert f"`{name}`" in {"equal": equal, "unsupported": unsupported}[outcome], (name, outcome)
