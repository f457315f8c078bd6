"""Runs `python -m service.cli`, where the package is not installed."""

from service.cli import main

main()
