"""`python -m odmoe`: the command line where no console script was installed."""

from odmoe.cli.main import main

main()
