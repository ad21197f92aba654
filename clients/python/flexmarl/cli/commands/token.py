"""`flexmarl token`: tokens go to files that only their owner can read, never to a terminal."""

from __future__ import annotations

import secrets
from pathlib import Path

from flexmarl.cli.errors import CliError
from flexmarl.cli.output import print_line
from flexmarl.core.access import parse_role
from flexmarl.core.ids import check_name
from flexmarl.runtime.secret_files import read_secret, write_secret
from flexmarl.runtime.tokens import hash_token, make_run_key, make_token, read_tokens


def new(name: str, *, role: str, file: Path, out: Path) -> None:
    """Make a token and add its hash to the file, which is made with it.

    Raises:
        CliError: The name is taken, or a file is there already.
        ValueError: The name or the role is none; the file is not one of tokens.
    """
    check_name(name, what="token")
    parsed = parse_role(role)
    _check_free(out)
    if file.exists():
        known = read_tokens(file, what="--file")
        if any(grant.name == name for _, grant in known.grants):
            raise CliError(f"{file} has a token {name!r} already; choose another name")
        text = read_secret(file, what="--file").decode().rstrip() + "\n\n"
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = f'[run_keys]\nsecret = "{secrets.token_hex(32)}"\n\n'
    token = make_token()
    text += f'[tokens.{name}]\nrole = "{parsed.name.lower()}"\nsha256 = "{hash_token(token)}"\n'
    write_secret(out, token.encode() + b"\n")
    write_secret(file, text.encode())
    print_line(f"{out} holds the token of {name}; restart the services that read {file}")


def run(run_id: str, *, role: str, file: Path, out: Path) -> None:
    """Make the key of one run.

    Raises:
        CliError: The file has no secret for such keys, or `out` is there already.
        ValueError: The run's name or the role is none, or the role is admin.
    """
    check_name(run_id, what="run")
    parsed = parse_role(role)
    _check_free(out)
    secret = read_tokens(file, what="--file").run_secret
    if not secret:
        raise CliError(f"{file} has no [run_keys] secret, so runs have no keys")
    write_secret(out, make_run_key(secret, run_id, parsed).encode() + b"\n")
    print_line(f"{out} holds the key of run {run_id}")


def _check_free(out: Path) -> None:
    if out.exists():
        raise CliError(f"--out {out}: is there already")
    if not out.parent.is_dir():
        raise CliError(f"--out {out}: no folder {out.parent}")
