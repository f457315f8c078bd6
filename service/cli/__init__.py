"""The `tailrace` command. Nothing heavy is imported before a command needs it."""

import sys


def main() -> None:
    """Run the command line; exit code 0 is success, 1 failure, 2 wrong use or settings, 130 Ctrl-C."""
    from kernels.errors import KernelsError
    from service.cli.app import app
    from service.errors import SettingsError, TailraceError

    try:
        app()
    except (SettingsError, KernelsError) as error:
        _say(error)
        sys.exit(2)
    except TailraceError as error:
        _say(error)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(error: BaseException) -> None:
    for line in str(error).splitlines():
        print(f"tailrace: {line}", file=sys.stderr)
