"""`python -m edgemoe` runs the command line."""

from edgemoe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
