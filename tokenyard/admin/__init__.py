"""What operators see and change: snapshots, requests, control signals, dead letters."""
