"""The miniature's greedy ids are those that transformers gave in float32 (written by `python tests/reference.py --write`)."""

import hashlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import llm_inference

MINI = ROOT / "tests" / "Qwen3-mini"
EXPECTED = json.loads((ROOT / "tests" / "expected.json").read_text("utf-8"))


def test_the_file_is_of_these_weights():
    found = hashlib.sha256((MINI / "model.safetensors").read_bytes()).hexdigest()
    assert found == EXPECTED["sha256"], (
        "the miniature has changed: run python tests/reference.py --write"
    )


@pytest.fixture(scope="module", params=[mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def model(request):
    return llm_inference.load(MINI, request.param)


@pytest.mark.parametrize(
    "case", EXPECTED["cases"], ids=lambda case: ascii(case["prompt"].replace("\n", " "))
)
def test_greedy_ids(model, case):
    """Compared up to the first place where the two best logits are less than 1 apart: beyond it, rounding may choose."""
    weights, config, tokenizer = model
    assert tokenizer.encode(case["prompt"], add_special_tokens=False).ids == case["ids"]
    answer = list(
        llm_inference.generate(
            case["ids"], weights, config, config["eos_token_id"], case["max_tokens"]
        )
    )
    sure = next((step for step, margin in enumerate(case["margins"]) if margin < 1), None)
    if sure is None:
        assert (
            answer == case["answer"]
        )  # its length too: it ended with a stop id, or at the limit, where theirs did
    else:
        assert answer[:sure] == case["answer"][:sure]


def test_paris():
    paris = EXPECTED["cases"][0]
    assert paris["prompt"] == "The capital of France is" and paris["text"].startswith(" Paris.")
    assert paris["margins"][0] >= 1 and len(paris["answer"]) == 100
