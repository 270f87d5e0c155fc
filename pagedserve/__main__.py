"""`python -m pagedserve`: the command line."""

from pagedserve.cli import main

main()
