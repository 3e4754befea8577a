"""What Tokenyard costs beside an engine whose device takes a set time: see `__main__`."""
