"""Measures the cost of a request as workers, clients, yards and waiting requests grow."""
