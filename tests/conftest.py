"""Lets the tests import llm_inference.py and each other, from wherever pytest is started; the model
that several of them ask."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]


@pytest.fixture(scope="module")
def model():
    """The miniature in float32: weights, config, tokenizer."""
    import mlx.core as mx
    from checkpoints import MINI

    import llm_inference

    return llm_inference.load(MINI, mx.float32)
