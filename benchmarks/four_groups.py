"""The published figures of base, one adapter, 8 mixed and churn: `mural bench four-groups`."""

import sys

from mural_server.bench.command import main

if __name__ == "__main__":
    sys.exit(main(["four-groups", *sys.argv[1:]]))
