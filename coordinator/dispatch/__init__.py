"""From the intake onto the lanes: admission, the backlog and its order, the plan."""
