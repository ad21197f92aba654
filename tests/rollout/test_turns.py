"""Conversations to tokens with a tokenizer that merges characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flexmarl.core.errors import DomainError, ErrorReason
from flexmarl.rollout.turns import SampledTurn, conversation


class Codec:
    """Byte-pairs "ab" and "abab"; "<e>" ends a turn; with `prefix`, a text begins with a space."""

    def __init__(self, *, prefix: bool = False) -> None:
        letters = [*"abcux", "\u2581"]
        vocab = {letter: n for n, letter in enumerate([*letters, "ab", "abab"])}
        bpe = models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab")])
        self.tokenizer = Tokenizer(bpe)
        if prefix:
            self.tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
            self.tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        else:
            self.tokenizer.decoder = decoders.Fuse()
        self.tokenizer.add_special_tokens(["<e>"])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special_tokens=True)

    def ids(self, *pieces: str) -> list[int]:
        return [self.tokenizer.token_to_id(piece) for piece in pieces]


def render(messages) -> str:
    return "".join(f"{m['role'][0]}{m['content']}<e>" for m in messages) + "a"


def talk(*contents: str):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]


def tokens(codec: Codec, messages, *turns: SampledTurn) -> list[int]:
    end = codec.ids("<e>")
    return conversation(messages, turns, render=render).tokens(codec=codec, end_tokens=end)


def test_sampled_tokens_stay_though_the_text_has_a_shorter_form():
    codec = Codec()
    sampled = codec.ids("a", "b", "ab", "<e>")
    messages = talk("x", "abab", "c")
    assert tokens(codec, messages) == codec.encode(render(messages), add_special_tokens=False)
    kept = tokens(codec, messages, SampledTurn(1, "abab", sampled))
    first = tokens(codec, talk("x"))
    assert kept[: len(first) + 4] == [*first, *sampled]
    assert kept[len(first) + 4 :] == codec.ids("u", "c", "<e>", "a")


def test_the_end_token_stands_once_whoever_wrote_it():
    codec = Codec()
    messages = talk("x", "c", "c")
    by_model = tokens(codec, messages, SampledTurn(1, "c", codec.ids("c", "<e>")))
    by_template = tokens(codec, messages, SampledTurn(1, "c", codec.ids("c")))
    assert by_model == by_template == tokens(codec, messages)


def test_several_turns_each_keep_theirs():
    codec = Codec()
    messages = talk("x", "ab", "c", "ab")
    sampled = codec.ids("a", "b")
    kept = tokens(codec, messages, SampledTurn(1, "ab", sampled), SampledTurn(3, "ab", sampled))
    assert kept == codec.ids(*"ux", "<e>", *"aab", "<e>", *"uc", "<e>", *"aab", "<e>", "a")


def test_a_tokenizer_that_knows_the_start_of_a_text_gets_the_whole_text():
    codec = Codec(prefix=True)

    def plain(messages) -> str:
        return "".join(m["content"] + "x" for m in messages)

    messages = talk("x", "ab", "c")
    whole = codec.encode(plain(messages), add_special_tokens=False)
    turn = SampledTurn(1, "ab", codec.ids("a", "b"))
    said = conversation(messages, [turn], render=plain)
    kept = said.tokens(codec=codec, end_tokens=())
    assert kept == whole


@pytest.mark.parametrize("said", ["", "c"])
def test_a_response_without_text_or_tokens(said: str):
    codec = Codec()
    messages = talk("x", said, "c")
    sampled = codec.ids("<e>") if not said else codec.ids("c", "<e>")
    kept = tokens(codec, messages, SampledTurn(1, said, sampled))
    assert kept == tokens(codec, messages)


def test_a_template_that_looks_into_what_was_said_is_not_asked_about_marks():
    def strict(messages) -> str:
        if any(m["role"] == "assistant" and "b" not in m["content"] for m in messages):
            raise DomainError(ErrorReason.INVALID_ARGUMENT, "the template refuses the messages")
        return render(messages)

    codec = Codec()
    turn = SampledTurn(1, "abab", codec.ids("a", "b", "ab", "<e>"))
    said = conversation(talk("x", "abab", "c"), [turn], render=strict)
    assert said.tokens(codec=codec, end_tokens=()) == codec.encode(
        render(talk("x", "abab", "c")), add_special_tokens=False
    )
