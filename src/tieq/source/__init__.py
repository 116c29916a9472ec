"""Where models come from: find one, read its config and weights lazily, tell the roles, run the reference."""
