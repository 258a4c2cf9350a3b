"""Writes kvops/methods/functions.pyi, what kvops/methods/functions.py generates: python tools/functions.py"""

from pathlib import Path

from kvops.methods.functions import module_text

if __name__ == "__main__":
    path = Path(__file__).parents[1] / "kvops/methods/functions.pyi"
    path.write_text(module_text(calls=False))
