"""What the command line says when something is wrong, and the exit code it says it with.

2: bad input, nothing was started or written. 1: something that was started failed. 130: the user
interrupted. A person gets one line; the traceback only with `FLEXMARL_DEBUG=1`.
"""

from __future__ import annotations

from typing import Final

from flexmarl.core.errors import DomainError, ErrorFamily

EXIT_FAILED: Final = 1
EXIT_BAD_INPUT: Final = 2
EXIT_INTERRUPTED: Final = 130

_INPUT_FAMILIES: Final = frozenset(
    {
        ErrorFamily.INVALID,
        ErrorFamily.NOT_FOUND,
        ErrorFamily.EXISTS,
        ErrorFamily.USER_CODE,
        ErrorFamily.NOT_BUILT,
    }
)


class CliError(Exception):
    """An end of the command with one line for a person.

    Args:
        message: What is wrong, naming the key, file or agent, and what to do.
        exit_code: Exit code of the process.
        detail: Further lines, such as the end of a log.
    """

    def __init__(self, message: str, *, exit_code: int = EXIT_BAD_INPUT, detail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.detail = detail


def to_cli_error(error: Exception) -> CliError:
    """The line and exit code for any error that reached the top."""
    if isinstance(error, CliError):
        return error
    if isinstance(error, DomainError):
        bad_input = error.reason.family in _INPUT_FAMILIES
        return CliError(
            f"{error.message} ({error.reason}: {error.reason.remedy})",
            exit_code=EXIT_BAD_INPUT if bad_input else EXIT_FAILED,
        )
    if isinstance(error, ValueError):
        return CliError(str(error))
    if isinstance(error, OSError):
        return CliError(_os_error(error))
    return CliError(f"{type(error).__name__}: {error}", exit_code=EXIT_FAILED)


def _os_error(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
