"""Lets the tests import llm_inference.py and each other, from wherever pytest is started."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
