"""One file per question; README.md has the method and the last tables."""
