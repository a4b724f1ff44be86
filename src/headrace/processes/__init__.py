"""Who runs beside us: starting child processes, speaking with them, ending them. What a child does lives in the room that needs it."""
