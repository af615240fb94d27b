"""The published figures of twice as many busy adapters as slots: `mural bench slots`."""

import sys

from mural_server.bench.command import main

if __name__ == "__main__":
    sys.exit(main(["slots", *sys.argv[1:]]))
