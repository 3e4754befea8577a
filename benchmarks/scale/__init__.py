"""What a request costs as workers, clients, yards and waiting requests grow."""
