"""`python -m edgemoe`: the same as the command `edgemoe`."""

from edgemoe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
