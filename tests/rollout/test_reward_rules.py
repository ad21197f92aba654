"""Rules that come with the project: numbers as models write them, expressions, JSON (cases H)."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from flexmarl.rollout import rewards
from flexmarl.rollout.json_check import check_schema, conforms
from flexmarl.rollout.number_text import final_answer
from flexmarl.rollout.workflow import FinishedSample, Output


def finished(output, *, calls: tuple[Output, ...] = (), **query) -> FinishedSample:
    return FinishedSample(query=query, output=output, calls=calls)


def said(text: str, agent: str = "solver") -> Output:
    return Output(text, (), "stop", "s/0:0", agent, "0:0", value=text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 72", 72),
        ("#### $18", 18),
        ("#### -5", -5),
        ("#### 1,234", 1234),
        ("#### 2,280,000", 2280000),
        ("Answer: 18", 18),
        ("Answer: 18.", 18),
        ("Answer: 18.00", 18),
        ("Answer: $18.50", Fraction("18.5")),
        ("Answer: -$5", -5),
        ("Answer: $-5", -5),
        ("Answer: \u22125", -5),
        ("Answer: .5", Fraction(1, 2)),
        ("answer:72 clips, altogether", 72),
        ("The answer is 72 clips, altogether", 72),
        ("Answer: 18\n" + "And so the story of 3 ducks goes on. " * 20, 18),
        ("Answer: 1\nNo, wait.\nAnswer: 2", 2),
        ("She sold 48 + 24 = 72", 72),
        ("10-5=5", 5),
        ("Answer: N", None),
        ("", None),
        ("no number at all", None),
        ("It is 7. Answer: N", 7),
        (r"so \boxed{1,200} it is, at 3 each", 1200),
        ("#### 72\n" + "Let me explain what I did. " * 30, 72),
        ("\ud800 Answer: 3", 3),
        pytest.param("9" * 5000, 10**5000 - 1, id="more digits than int() reads"),
    ],
)
def test_the_final_answer_is_found(text: str, number: Fraction | int | None) -> None:
    assert final_answer(text) == number


@pytest.mark.parametrize(
    ("text", "gold", "reward"),
    [
        ("Answer: 1234", "She pays 1,234.\n#### 1,234", 1.0),
        ("Answer: 1,234.00", 1234, 1.0),
        ("It is -5", "#### -5", 1.0),
        ("It is 5", "#### -5", 0.0),
        ("nothing", "#### 5", 0.0),
        ("", "#### 0", 0.0),
    ],
)
def test_exact_number_compares_both_sides_as_numbers(text, gold, reward) -> None:
    assert rewards.exact_number(finished(text, answer=gold)) == reward
    assert rewards.exact_number(finished(None, calls=(said(text),), g=gold), gold="g",
                                agent="solver") == reward  # fmt: skip


@pytest.mark.parametrize(
    ("sample", "args", "error", "words"),
    [
        (finished("1", reply="1"), {}, LookupError, "no column 'answer'; its columns: reply"),
        (finished("1", answer="none"), {}, ValueError, "holds no number"),
        (finished(3, answer="3"), {}, TypeError, "returned int, not a text"),
        (finished("3", answer="3"), {"agent": "judge"}, LookupError, "'judge' has no finished"),
    ],
)
def test_what_cannot_be_scored_is_an_error_not_a_zero(sample, args, error, words) -> None:
    with pytest.raises(error, match=words):
        rewards.exact_number(sample, **args)


def test_regex_takes_its_pattern_from_config_or_query() -> None:
    assert rewards.regex(finished("a b"), pattern=r"\bb$") == 1.0
    assert rewards.regex(finished("a b", want="^b"), column="want") == 0.0
    assert rewards.regex(finished(said("abc")), pattern="c") == 1.0
    for args in ({}, {"pattern": "a", "column": "want"}):
        with pytest.raises(ValueError, match="either"):
            rewards.regex(finished("a"), **args)


SCHEMA = {
    "type": "object",
    "description": "an order",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 8},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "kind": {"enum": ["a", 1]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "minItems": 1},
        "either": {"anyOf": [{"const": True}, {"type": "number"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"name": "pen"}, True),
        ({"name": "pen", "count": 3, "kind": 1, "tags": ["x", None], "either": 2.5}, True),
        ({"name": "pen", "count": 3.0}, True),
        ({}, False),
        ({"name": "Pen"}, False),
        ({"name": "toolongname"}, False),
        ({"name": "pen", "count": 0}, False),
        ({"name": "pen", "count": 10**400}, False),
        ({"name": "pen", "count": True}, False),
        ({"name": "pen", "count": 2.5}, False),
        ({"name": "pen", "kind": True}, False),
        ({"name": "pen", "tags": []}, False),
        ({"name": "pen", "tags": [1]}, False),
        ({"name": "pen", "either": False}, False),
        ({"name": "pen", "more": 1}, False),
        ([], False),
    ],
)
def test_json_is_checked_against_the_schema(value, fits) -> None:
    check_schema(SCHEMA)
    assert conforms(value, SCHEMA) is fits
    for text in (json.dumps(value), f"```json\n{json.dumps(value)}\n```"):
        assert rewards.json_schema(finished(text), schema=SCHEMA) == float(fits)


@pytest.mark.parametrize("text", ["", "{", "name: pen", '{"name": NaN}', "[1,]", "[" * 9999])
def test_text_that_is_no_json_earns_nothing(text) -> None:
    assert rewards.json_schema(finished(text), schema={}) == 0.0


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"oneOf": []}, "keyword 'oneOf' is not built"),
        ({"properties": {"a": {"format": "date"}}}, r"schema.properties.a: keyword 'format'"),
        ({"items": {"type": "text"}}, r"schema.items.type: no type 'text'"),
        ({"anyOf": [3]}, r"schema.anyOf\[0\]: a schema is an object"),
    ],
)
def test_a_schema_that_cannot_be_decided_by_is_refused(schema, words) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        rewards.json_schema(finished("{}"), schema=schema)
    assert conforms({}, True)
    assert not conforms({}, False)
