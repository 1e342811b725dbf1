"""``python -m onchip`` is the ``onchip`` command."""
from onchip.cli.app import main

main()
