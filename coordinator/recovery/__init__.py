"""After crashes, cancels, lost clients and lost writes: take back, try again, end, clean up."""
