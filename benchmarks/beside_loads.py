"""The published figures of decode steps while adapters load, and without: `mural bench loads`."""

import sys

from mural_server.bench.command import main

if __name__ == "__main__":
    sys.exit(main(["loads", *sys.argv[1:]]))
