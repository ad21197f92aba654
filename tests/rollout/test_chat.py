"""Chat templates are filled as transformers fills them, and what they raise is told by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout.worker_harness import write_model
from transformers import PreTrainedTokenizerFast

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.chat import ChatTemplate

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
TOOLS = [{"name": "b\u00e4", "args": {"z": 1, "a": [2]}}]
SAID = "{% for m in messages %}\n  {% generation %}\n  {{ m.content }}{% set k = 1 %}\n  "


@pytest.mark.parametrize(
    "source",
    [
        "{{ tools | tojson }}",
        "{{ tools | tojson(separators=(',', ':')) }}",
        "{{ tools | tojson(True, 2, sort_keys=True) }}",
        SAID + "{% endgeneration %}\n{{ k is defined }}{% endfor %}",
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "offered"}],
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["alone", "tools"])
def test_the_text_is_that_of_transformers(tmp_path: Path, source, tools) -> None:
    folder = Path(write_model(tmp_path / "model"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        TALK, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(folder, config).render(TALK, agent="a", tools=tools) == theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.split('') }}",
        "{{ 1 // 0 }}",
        "{{ range(9999999) | list }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ nothing.at.all }}",
    ],
)
def test_whatever_a_template_raises_is_told_by_agent(tmp_path: Path, source: str) -> None:
    with pytest.raises(DomainError, match="agent 'a': the chat template refuses") as told:
        ChatTemplate(tmp_path, {"chat_template": source}).render(TALK, agent="a")
    assert told.value.reason is ErrorReason.INVALID_ARGUMENT


def test_a_template_that_is_no_text_is_told_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(DomainError, match=r"chat_template\.jinja") as told:
        ChatTemplate(tmp_path, {})
    assert told.value.reason is ErrorReason.MODEL_INVALID
