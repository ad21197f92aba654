"""Conversations to tokens: rendered as a whole, with what the model itself said kept as it was.

An assistant's message whose content is an `Output` stands for sampled tokens. Text is not enough to
get them back (two token sequences may read the same), so they are put into the rendered prompt as
they were sampled. Then the prompt of the next turn begins with prompt and response of the last one,
and both can be trained on as one row.

A template that changes what was said (drops earlier thinking, trims white space) wins: its text is
tokenised as a whole, and the turns stay rows of their own. Either way the tokens are those that the
engine is given, so what is trained on is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from flexmarl.core.errors import DomainError

Message = dict[str, Any]
Render = Callable[[list[Message]], str]


class TokenCodec(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special ones left out."""
        ...


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A message whose content the model itself sampled.

    Attributes:
        place: Its place among the messages.
        text: Its text.
        tokens: Its tokens, the end token included where it was sampled.
    """

    place: int
    text: str
    tokens: Sequence[int]


class Conversation(NamedTuple):
    """A rendered conversation that the model is to continue; it makes its tokens in any thread.

    Attributes:
        text: All of it.
        turns: Which messages are sampled, in order.
        pieces: The text around the turns; None when the template changes what they say, or where
            there are none.
    """

    text: str
    turns: Sequence[SampledTurn] = ()
    pieces: Sequence[str] | None = None

    def tokens(self, *, codec: TokenCodec, end_tokens: Collection[int]) -> list[int]:
        """Its token ids.

        Args:
            codec: The model's tokenizer.
            end_tokens: Tokens that end a response; the template does not repeat one that was
                sampled.
        """
        whole = codec.encode(self.text, add_special_tokens=False)
        if self.pieces is None:
            return whole
        tokens = _spliced(self.pieces, self.turns, codec=codec, end_tokens=end_tokens)
        # A tokenizer may treat the start of a piece as the start of a text (by a space, say).
        return tokens if codec.decode(tokens) == codec.decode(whole) else whole


def conversation(
    messages: list[Message], turns: Sequence[SampledTurn], *, render: Render
) -> Conversation:
    """Renders a conversation.

    Args:
        messages: With texts for contents, also those of `turns`.
        turns: Which messages are sampled, in order.
        render: Fills the chat template.
    """
    text = render(messages)
    pieces = _around(messages, turns, render=render, text=text) if turns else None
    return Conversation(text, turns, pieces)


def _around(
    messages: list[Message], turns: Sequence[SampledTurn], *, render: Render, text: str
) -> list[str] | None:
    """The rendered text around the sampled turns; None when the template changes what they say."""
    marks = [f"\ue000turn {number}\ue001" for number in range(len(turns))]
    marked = [dict(message) for message in messages]
    for mark, turn in zip(marks, turns, strict=True):
        marked[turn.place]["content"] = mark
    try:
        rest = render(marked)
    except DomainError:  # it looks into what was said, and finds none of it in a mark
        return None
    pieces: list[str] = []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found or mark in rest:
            return None
        pieces.append(piece)
    pieces.append(rest)
    said = [turn.text for turn in turns]
    rebuilt = "".join(part for pair in zip(pieces, [*said, ""], strict=True) for part in pair)
    return pieces if rebuilt == text else None


def _spliced(
    pieces: Sequence[str],
    turns: Sequence[SampledTurn],
    *,
    codec: TokenCodec,
    end_tokens: Collection[int],
) -> list[int]:
    tokens = codec.encode(pieces[0], add_special_tokens=False) if pieces[0] else []
    for turn, piece in zip(turns, pieces[1:], strict=True):
        tokens.extend(turn.tokens)
        after = codec.encode(piece, add_special_tokens=False) if piece else []
        last = turn.tokens[-1] if turn.tokens else None
        if after and after[0] == last and last in end_tokens:
            del after[0]
        tokens.extend(after)
    return tokens
