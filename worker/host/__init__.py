"""The controller of a host: its pool of warm processes, and what operators want of them."""
