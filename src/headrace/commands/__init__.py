"""One module a command: ``add_arguments(parser)`` and ``run(args) -> int``. It is imported only when its command is chosen. No engine code lives here."""
