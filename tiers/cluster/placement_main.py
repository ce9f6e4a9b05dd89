"""The placement's main program, for the interpreter of the Ray environment: python placement_main.py JOBFILE.

This project comes last on the path: what Ray needs is its own environment's.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:1] = []  # this folder
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tiers.cluster.placement import main

    sys.exit(main(Path(sys.argv[1])))
