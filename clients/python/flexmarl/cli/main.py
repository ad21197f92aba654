"""Entry point of `flexmarl`: runs a command and turns its errors into one line and an exit code."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line; exits the process."""
    # gRPC's own notes on broken connections say nothing that the command does not say itself.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        from flexmarl.cli.app import app

        _show_credentials()
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output is gone; the flush at exit must not fail on that again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get("FLEXMARL_DEBUG") == "1":
            raise
        # Imported here: the error catalogue is not needed to show help.
        from flexmarl.cli.errors import to_cli_error

        failure = to_cli_error(error)
        sys.stderr.write(f"error: {failure.message}\n")
        if failure.detail:
            sys.stderr.write(f"{failure.detail}\n")
        sys.exit(failure.exit_code)


def _show_credentials() -> None:
    """Call services with what `FLEXMARL_CLIENT__CA`, `__CERT`, `__KEY`, `__TOKEN_FILE` name."""
    if not any(name.startswith("FLEXMARL_CLIENT__") for name in os.environ):
        return
    from flexmarl.core.peer_credentials import use_credentials
    from flexmarl.runtime.config import ClientConfig, load_config
    from flexmarl.runtime.tls import client_credentials

    use_credentials(client_credentials(load_config(ClientConfig, env_prefix="FLEXMARL_CLIENT")))


if __name__ == "__main__":
    main()
