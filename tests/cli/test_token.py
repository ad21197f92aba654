"""`flexmarl token`: tokens go to files of their owner; services know them by their hash."""

import stat

import pytest

from flexmarl.cli.commands.token import new, run
from flexmarl.cli.errors import CliError
from flexmarl.core.access import Grant, Role
from flexmarl.runtime.tokens import read_tokens


def test_a_new_token_opens_what_its_role_may(tmp_path, capsys):
    file, alice, bob = tmp_path / "tokens.toml", tmp_path / "alice", tmp_path / "bob"
    new("alice", role="submit", file=file, out=alice)
    new("bob", role="read", file=file, out=bob)
    tokens = read_tokens(file)
    texts = [path.read_text().strip() for path in (alice, bob)]
    assert tokens.grant_of(texts[0]) == Grant(name="alice", role=Role.SUBMIT)
    assert tokens.grant_of(texts[1]) == Grant(name="bob", role=Role.READ)
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (file, alice, bob))
    shown = capsys.readouterr().out + file.read_text()
    assert not [text for text in texts if text in shown]


def test_a_key_of_a_run_is_derived(tmp_path):
    file, key = tmp_path / "tokens.toml", tmp_path / "key"
    new("root", role="admin", file=file, out=tmp_path / "root")
    run("run-1", role="read", file=file, out=key)
    grant = read_tokens(file).grant_of(key.read_text().strip())
    assert grant == Grant(name="key of run-1", role=Role.READ, run_id="run-1")


def test_wrong_input_is_one_line_and_writes_nothing(tmp_path):
    file = tmp_path / "tokens.toml"
    new("alice", role="read", file=file, out=tmp_path / "alice")
    before = file.read_text()
    out = tmp_path / "out"
    with pytest.raises(CliError, match="has a token 'alice' already"):
        new("alice", role="read", file=file, out=out)
    with pytest.raises(ValueError, match="unknown role 'root'"):
        new("bob", role="root", file=file, out=out)
    with pytest.raises(ValueError, match="token 'a/b'"):
        new("a/b", role="read", file=file, out=out)
    with pytest.raises(CliError, match="is there already"):
        new("bob", role="read", file=file, out=tmp_path / "alice")
    with pytest.raises(CliError, match="no folder"):
        new("bob", role="read", file=file, out=tmp_path / "missing" / "out")
    with pytest.raises(ValueError, match="read or submit, not admin"):
        run("run-1", role="admin", file=file, out=out)
    file.write_text(before.partition("[tokens")[2].join(("[tokens", "")))
    with pytest.raises(CliError, match="no \\[run_keys\\] secret"):
        run("run-1", role="read", file=file, out=out)
    assert not out.exists()
