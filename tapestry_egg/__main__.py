"""`python -m tapestry_egg` is the command line."""

from tapestry_egg.cli import main

if __name__ == "__main__":
    main()
