"""The `tailrace` command. Imports nothing heavy before a command needs it."""

import errno
import os
import sys

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Run the command line; exit code 0 is success, 1 failure, 2 wrong use or settings, 130 Ctrl-C."""
    from kernels.errors import KernelsError
    from service.cli.app import app
    from service.errors import SettingsError, TailraceError

    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except (SettingsError, KernelsError) as error:
        _say(error)
        sys.exit(2)
    except TailraceError as error:
        _say(error)
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.EPIPE, *_OUTPUT_ERRORS):
            raise
        # The buffered rest would fail again at exit, with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            _say(f"output cannot be written: {error.strerror}")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(error: BaseException | str) -> None:
    for line in str(error).splitlines():
        print(f"tailrace: {line}", file=sys.stderr)
