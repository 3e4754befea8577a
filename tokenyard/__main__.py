"""``python -m tokenyard`` is the command `tokenyard`."""

from tokenyard.cli import main

if __name__ == "__main__":
    main(prog_name="tokenyard")
