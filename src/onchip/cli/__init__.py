"""The ``onchip`` command. `onchip.cli.app` gathers the commands, one file each."""
