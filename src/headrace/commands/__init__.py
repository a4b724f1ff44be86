"""The commands, one module each: ``add_arguments(parser)`` and ``run(args) -> int``. A module is imported only when its
command is chosen.

What lives here: reading arguments, calling the engine's public interface, printing. What may not: anything another
command or a library needs.
"""
