"""Where the bytes of a slot lie in an engine's memory."""
