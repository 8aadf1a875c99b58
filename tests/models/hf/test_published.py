"""Published shapes against the numbers of parameters that their authors name."""

import pytest

from rsearch.models.hf.published import PUBLISHED

BILLIONS = {  # of parameters, by the model cards
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-3B-Instruct": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen2.5-7B-Instruct": 7.62,
    "Qwen/Qwen2.5-14B-Instruct": 14.8,
    "Qwen/Qwen2.5-32B-Instruct": 32.8,
    "Qwen/Qwen2.5-72B-Instruct": 72.7,
    "Qwen/QwQ-32B-Preview": 32.8,
    "Qwen/QwQ-32B": 32.8,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.2-3B-Instruct": 3.21,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 0.1345,
    "zai-org/glm-4-9b-chat-hf": 9.4,
    "THUDM/glm-4-9b-chat-hf": 9.4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(name):
    assert PUBLISHED[name].num_params / 1e9 == pytest.approx(BILLIONS[name], rel=0.004)


def test_all_named_models_have_a_shape():
    assert set(BILLIONS) == set(PUBLISHED)


def test_heads_of_published_shapes_share_keys_and_values_evenly():
    for spec in PUBLISHED.values():
        assert spec.num_heads % spec.num_kv_heads == 0
