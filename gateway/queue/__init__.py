"""The gateway's side of the queue: submit, read replies, cancel."""
