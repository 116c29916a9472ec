"""``python -m tieq``."""

from tieq.cli import main

if __name__ == "__main__":
    main()
