"""What does the board cost on a big yard? See `benchmarks.board.__main__`."""
