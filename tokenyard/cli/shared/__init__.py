"""What several commands share: options, connections, tables, questions, signals."""
