"""`python -m service.cli`, for where the package is not installed."""

from service.cli import main

main()
