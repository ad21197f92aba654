"""Reward rules that come with the project, to be named in a run's config.

    [workflow]
    reward = "flexmarl.rollout.rewards:exact_number"
    reward_args = { gold = "answer" }

Each takes the finished sample and the config's `reward_args`, and gives the team 1 or 0. The text
that the workflow returned is scored, or that of an agent's last call (`agent`). What cannot be
scored (no such column, no text) is an error that fails the sample, never a silent 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from flexmarl.rollout.json_check import check_schema, conforms
from flexmarl.rollout.number_text import final_answer
from flexmarl.rollout.workflow import FinishedSample, Output

__all__ = ["exact_number", "json_schema", "regex", "scored_text"]

_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n\s*```\s*\Z", re.DOTALL)


def exact_number(sample: FinishedSample, *, gold: str = "answer", agent: str = "") -> float:
    """1 when the text's final number is that of the query's column.

    Currency signs, thousands' commas, closing dots, signs and decimals are taken as people mean
    them, on both sides: "#### $1,234" equals "The answer is 1234.00 dollars."

    Args:
        sample: The finished sample.
        gold: Column of the query that holds the right answer, a number or a text with one.
        agent: Agent whose last call is scored; empty for what the workflow returned.

    Raises:
        LookupError: The query has no such column, or the agent was not called.
        ValueError: The column holds no number.
    """
    wanted = final_answer(str(_column(sample, gold)))
    if wanted is None:
        raise ValueError(f"column {gold!r} of the query holds no number")
    return float(final_answer(scored_text(sample, agent)) == wanted)


def regex(sample: FinishedSample, *, pattern: str = "", column: str = "", agent: str = "") -> float:
    """1 when a regular expression is found in the text.

    Args:
        sample: The finished sample.
        pattern: The expression; or else
        column: column of the query that holds it.
        agent: See `exact_number`.

    Raises:
        ValueError: Both or neither of `pattern` and `column` are given.
        LookupError: See `exact_number`.
    """
    if bool(pattern) == bool(column):
        raise ValueError("reward_args: give either pattern or column")
    expression = pattern or str(_column(sample, column))
    return float(re.search(expression, scored_text(sample, agent)) is not None)


def json_schema(sample: FinishedSample, *, schema: Mapping[str, Any], agent: str = "") -> float:
    """1 when the text is JSON (also fenced, as models write it) and conforms to a schema.

    Args:
        sample: The finished sample.
        schema: JSON Schema; see `flexmarl.rollout.json_check` for its keywords.
        agent: See `exact_number`.

    Raises:
        ValueError: The schema has a keyword that is not built.
        LookupError: See `exact_number`.
    """
    check_schema(schema)
    text = scored_text(sample, agent)
    fenced = _FENCE.match(text)
    try:
        value = json.loads(fenced[1] if fenced else text, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # a model may well repeat "[" until its last token
        return 0.0
    return float(conforms(value, schema))


def scored_text(sample: FinishedSample, agent: str = "") -> str:
    """The text that a rule scores.

    Raises:
        LookupError: The agent was not called.
        TypeError: The workflow returned no text.
    """
    if agent:
        calls = sample.by_agent(agent)
        if not calls:
            raise LookupError(f"agent {agent!r} has no finished call")
        return calls[-1].text
    if isinstance(sample.output, (str, Output)):
        return str(sample.output)
    raise TypeError(
        f"the workflow returned {type(sample.output).__name__}, not a text: return one, or name an "
        "agent in reward_args"
    )


def _column(sample: FinishedSample, name: str) -> Any:  # noqa: ANN401 - as the dataset has it
    if name not in sample.query:
        known = ", ".join(sorted(sample.query)) or "none"
        raise LookupError(f"the query has no column {name!r}; its columns: {known}")
    return sample.query[name]


def _no_constant(name: str) -> Any:  # noqa: ANN401
    raise ValueError(f"{name} is not JSON")
