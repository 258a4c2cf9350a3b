"""Writes kvops/methods/functions.pyi: the functions that kvops/methods/functions.py generates, without their bodies."""

import argparse
from pathlib import Path

from kvops.methods.functions import module_text

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    path = Path(__file__).parents[1] / "kvops/methods/functions.pyi"
    path.write_text(module_text(calls=False))
