"""`python -m monge` is the `monge` command."""

from monge.cli import main

if __name__ == "__main__":
    main()
