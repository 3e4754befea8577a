"""From the intake onto the lanes: validation, the backlog, its order, the turn."""
