"""The quickstart: its files are what its script writes, and its rewards mean what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.quickstart import make_files, team

FOLDER = Path(__file__).resolve().parents[2] / "examples/quickstart"


def test_the_committed_files_are_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_files.py", str(tmp_path)])
    make_files.main()
    written = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    assert len(written) == 4
    for path in written:
        assert path.read_bytes() == (FOLDER / path.relative_to(tmp_path)).read_bytes()


def test_there_are_96_different_queries() -> None:
    rows = [json.loads(line)["digits"] for line in (FOLDER / "queries.jsonl").open()]
    assert len(rows) == len(set(rows)) == 96
    assert all(sum(d in "01" for d in digits) == 2 for digits in rows)


def test_text_goes_through_the_tokenizer_unchanged() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(FOLDER / "model/tokenizer.json"))
    assert tokenizer.encode("3102>").ids == [3, 1, 0, 2, 4]
    assert tokenizer.decode([3, 5, 4, 0]) == "3.>0", "the end symbol is shown, nothing is added"


def test_the_model_is_small() -> None:
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    model = LlamaForCausalLM(AutoConfig.from_pretrained(FOLDER / "model"))
    assert sum(p.numel() for p in model.parameters()) == 54208
    assert model.config.rope_parameters["rope_theta"] == 10.0
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    assert tokenizer.decode(tokenizer.encode("01>23>", add_special_tokens=False)) == "01>23>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0123", ("01", "23")), ("0>23", ("0", "23")), ("01.3", ("01", "")), (".123", ("", ""))],
)
def test_pieces_end_at_the_end_symbol(text: str, expected: tuple[str, str]) -> None:
    assert team.pieces(text) == expected


@pytest.mark.parametrize(
    ("answer", "wanted", "expected"),
    [
        ("0123", "0123", 1.0),
        ("0132", "0123", 0.5),
        ("01", "0123", 0.5),
        ("", "", 1.0),
        ("0", "", 0),
    ],
)
def test_share_of_equal_positions(answer: str, wanted: str, expected: float) -> None:
    assert team.share(answer, wanted) == expected


@pytest.mark.parametrize(
    ("agent", "inputs", "text", "expected"),
    [
        ("splitter", {"digits": "3102"}, "1032", 1.0),
        ("splitter", {"digits": "3102"}, "3210", 0.25),
        ("splitter", {"digits": "3102"}, "....", 0.0),
        ("splitter", {"digits": "3102"}, "11>3", 0.75 * 2 / 4 + 0.25 * 3 / 4),
        ("sorter", {"digits": "10"}, "01", 1.0),
        ("sorter", {"digits": "10"}, "10", 0.0),
        ("sorter", {"digits": ""}, "..", 1.0),
        ("merger", {"left": "01", "right": "23"}, "0123", 1.0),
        ("merger", {"left": "1", "right": "23"}, "123.", 1.0),
    ],
)
def test_local_rewards(agent: str, inputs: dict[str, str], text: str, expected: float) -> None:
    assert team.local_reward(agent, inputs, text) == pytest.approx(expected)
