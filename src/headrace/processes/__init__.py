"""Child processes: starting them, communicating with them, ending them. What a child does lives in the room that needs
it."""
