"""The embedded engine on a real model: `FLEXMARL_GSM8K_MODEL` names its folder."""

import os
from pathlib import Path

import pytest
from rollout.engines.engine_kit import (
    drain,
    make_engine,
    reference_logprobs,
    request,
    write_segment,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL = os.environ.get("FLEXMARL_GSM8K_MODEL", "")

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not MODEL, reason="FLEXMARL_GSM8K_MODEL names no model folder"),
]

QUESTIONS = [
    "What is the capital of France? Answer in one word.",
    "Tom has 4 apples and buys 3. How many apples has he now? One short sentence.",
    "Say hello.",
    "Name three colours of the rainbow.",
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


# Processors without bfloat16 instructions take several times as long for it.
@pytest.mark.parametrize(
    ("dtype", "tolerance", "num_questions"), [("float32", 2e-4, 4), ("bfloat16", 0.3, 2)]
)
def test_it_answers_sensibly_with_the_plain_passes_logprobs(
    tmp_path, tokenizer, dtype, tolerance, num_questions
):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
    engine = make_engine(Path(MODEL), dtype=dtype, max_context=512)
    loaded = engine.load(write_segment(tmp_path / "w", model, version=0))
    assert not loaded.HasField("failure"), loaded
    prompts = {}
    for i, question in enumerate(QUESTIONS[:num_questions]):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        prompts[f"a{i}"] = tokenizer.encode(text, add_special_tokens=False)
    end = tokenizer.eos_token_id
    engine.submit(
        request(name, prompt, max_tokens=24, temperature=0.0, stop=(end,))
        for name, prompt in prompts.items()
    )
    results = drain(engine)
    texts = {name: tokenizer.decode(results[name].tokens) for name in prompts}
    assert "Paris" in texts["a0"], texts
    # A chat model ends its turn by itself, and the end token is part of the response (D5).
    assert results["a0"].finish_reason == "stop" and results["a0"].tokens[-1] == end
    for name, prompt in prompts.items():
        expected = reference_logprobs(model, prompt, list(results[name].tokens))
        assert list(results[name].logprobs) == pytest.approx(expected, abs=tolerance), name
