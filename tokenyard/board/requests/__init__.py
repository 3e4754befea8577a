"""What the pages about requests read, show and do."""
