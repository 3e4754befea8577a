"""The clients: one core without I/O, driven by threads (`sync`) or by asyncio (`aio`)."""
