"""Which worker holds which model."""
