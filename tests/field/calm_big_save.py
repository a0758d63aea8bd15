"""Writes a checkpoint of 1 GB in pieces, each forced to the disk, and removes it."""

import argparse
import os
import tempfile

from marking import mark

PIECE_MB = 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="100 MB for each; the disk decides how long it takes"
    )
    args = parser.parse_args()
    piece = os.urandom(PIECE_MB << 20)
    pieces = max(1, round(args.seconds * 1024 / 10 / PIECE_MB))
    mark("fault")
    with tempfile.NamedTemporaryFile(suffix=".pt") as checkpoint:
        for _ in range(pieces):
            checkpoint.write(piece)  # the long part
            checkpoint.flush()
            os.fsync(checkpoint.fileno())  # the long part ends
        size_mb = os.path.getsize(checkpoint.name) >> 20
    mark("over")
    print(f"done: {size_mb} MB")


if __name__ == "__main__":
    main()
