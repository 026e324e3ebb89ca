"""`python -m sandmill.cli`."""

from sandmill.cli import main

main()
