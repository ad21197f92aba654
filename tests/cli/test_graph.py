"""Drawings of a sample's graph."""

from __future__ import annotations

import json

import pytest
from cli.recorded import SAMPLE_ID, sample, vertex, vertices

from flexmarl.api.common.v1 import common_pb2
from flexmarl.cli.graph.draw import draw_dot, draw_json, draw_mermaid, draw_text
from flexmarl.cli.graph.tokens import TokenTexts
from flexmarl.cli.graph.view import SampleView, sample_view

LETTERS = "abc"


@pytest.fixture
def view() -> SampleView:
    return sample_view(
        sample(),
        vertices(),
        query_json=b'{"digits": "3102"}',
        decode=lambda policy, tokens: "".join(LETTERS[token] for token in tokens),
    )


def test_text_is_a_tree_with_the_second_parent_named(view):
    assert draw_text(view).splitlines() == [
        f"sample {SAMPLE_ID}  done  team reward 0.750",
        'query  {"digits": "3102"}',
        '└─ splitter 0:0  v0  "ab" → "bc"  reward 0.500  advantage +0.125  micro-batch m0',
        '   ├─ sorter 0.0:0  v0  "ab" → "bc"',
        '   └─ sorter 0.1:0  v0  "ab" → "bc"  void zero_variance',
        '      └─ merger 0:1  v0  "ab" → "bc"  (needs 0.0:0, 0.1:0)',
        'output  "0123"',
    ]


def test_json_has_vertices_and_edges(view):
    data = json.loads(draw_json(view))
    assert data["query"] == {"digits": "3102"}
    assert data["team_reward"] == 0.75
    assert [vertex["agent"] for vertex in data["vertices"]] == [
        "splitter",
        "sorter",
        "sorter",
        "merger",
    ]
    assert data["edges"] == [
        ["0:0", "0.0:0"],
        ["0:0", "0.1:0"],
        ["0.0:0", "0:1"],
        ["0.1:0", "0:1"],
    ]


def test_dot_and_mermaid_have_every_edge(view):
    dot = draw_dot(view)
    assert '"0.1:0" -> "0:1";' in dot
    assert dot.count("->") == 4
    mermaid = draw_mermaid(view)
    assert mermaid.startswith("flowchart TB\n")
    assert "  v2 --> v3" in mermaid
    assert mermaid.count("-->") == 4


def test_quotes_in_texts_do_not_break_drawings():
    hostile = sample_view(
        sample(), [vertex("0:0", "a")], query_json=b"", decode=lambda *_: 'x"\n];'
    )
    label = next(line for line in draw_dot(hostile).splitlines() if "shape" in line)
    assert label == (r'  "0:0" [shape=box, label="a 0:0\n\"x\\\"\\n];\" → \"x\\\"\\n];\""];')
    assert '"x' not in draw_mermaid(hostile)


def test_a_failed_sample_says_why():
    failed = sample()
    failed.status = common_pb2.SAMPLE_STATUS_FAILED
    failed.failure.message = "flow.py:3 raised ValueError"
    text = draw_text(sample_view(failed, [], query_json=b"", decode=lambda *_: ""))
    assert "failed" in text
    assert "failure  flow.py:3 raised ValueError" in text


def test_tokens_without_a_tokenizer_are_numbers(tmp_path):
    assert TokenTexts({"sorter": tmp_path})("sorter", [3, 1]) == "3 1"
    assert TokenTexts({})("other", [3, 1]) == "3 1"
