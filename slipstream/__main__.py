"""`python -m slipstream` is the command `slipstream`."""

from slipstream.cli import main

if __name__ == "__main__":
    main()
