"""The `dspark` command.

Results go to stdout, progress and remarks to stderr; with `--json` stdout is one line of JSON. A mistake of the user
is one line on stderr and exit status 2. Nothing heavy is imported before a command runs, so `--help` answers at once,
and so does a wrong path.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from dspark.cli_flags import check_backend_flags
from dspark.cli_parsers import build_parser
from dspark.terminal import say

INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        status = _run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        say("dspark: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Python flushes stdout once more at exit; point it where that cannot fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError) as error:
        say(f"dspark: {_message(error)}")
        return 2


def _run(options: argparse.Namespace) -> int:
    from dspark.cli_paths import check_paths, name_models

    logger = logging.getLogger("dspark")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, _Remarks) for handler in logger.handlers):
        logger.addHandler(_Remarks())
    check_backend_flags(options)
    name_models(options)
    check_paths(options)
    module, function = options.run
    return int(getattr(import_module(f"dspark.{module}"), function)(options))


class _Remarks(logging.Handler):
    """Log records as plain lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def _message(error: Exception) -> str:
    """One line, the first where another library wrote several; but all the problems of a checkpoint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_own = type(error).__module__.startswith("dspark.")
    return str(error) if is_own else lines[0]
