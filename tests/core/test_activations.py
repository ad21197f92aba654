"""The bound that a policy's passes have where its config names none."""

from flexmarl.core.activations import (
    MAX_TOKENS,
    LayerSizes,
    bytes_per_token,
    smaller_pass,
    tokens_that_fit,
)

SMOLLM_135M = LayerSizes(layers=30, width=576, query=576, key=192, inner=1536)
QUICKSTART = LayerSizes(layers=2, width=64, query=64, key=32, inner=128)


def test_a_pass_of_a_135m_model_has_one_row_of_256_tokens_or_many_when_layers_are_made_again():
    plain = tokens_that_fit(SMOLLM_135M, element_bytes=4, checkpointing=False)
    assert 256 <= plain < 512
    assert tokens_that_fit(SMOLLM_135M, element_bytes=4, checkpointing=True) > 8 * 256
    assert tokens_that_fit(SMOLLM_135M, element_bytes=2, checkpointing=False) >= 2 * plain


def test_a_token_takes_what_was_measured():
    """1.8 MiB per token in float32."""
    each = bytes_per_token(SMOLLM_135M, element_bytes=4, checkpointing=False)
    assert 1.7 < each / (1 << 20) < 1.9


def test_small_models_are_not_cut_and_large_ones_run_at_least():
    assert tokens_that_fit(QUICKSTART, element_bytes=4, checkpointing=False) == MAX_TOKENS
    huge = LayerSizes(layers=200, width=1 << 15, query=1 << 15, key=1 << 13, inner=1 << 17)
    assert tokens_that_fit(huge, element_bytes=8, checkpointing=False) >= 1
    nothing = LayerSizes(layers=0, width=0, query=0, key=0, inner=0)
    assert tokens_that_fit(nothing, element_bytes=4, checkpointing=False) == MAX_TOKENS


def test_a_pass_that_did_not_fit_is_followed_by_smaller_ones_whatever_is_asked():
    assert smaller_pass(400, asked=150) == 150
    assert smaller_pass(400, asked=8192) == 200
    assert smaller_pass(1, asked=8192) == 1
