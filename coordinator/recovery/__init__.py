"""What crashes and slips leave behind: taken back, tried again, ended, swept."""
