"""Programs and processes: command lines, children, embedded programs, the service manager."""
