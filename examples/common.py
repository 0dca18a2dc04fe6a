"""What several examples need around a model, beside what llm_inference.py has: texts and names.

Imported by other examples.
"""

from pathlib import Path


def encode(text, tokenizer):
    """The ids of a text. Bytes that are not UTF-8 become the replacement character."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return tokenizer.encode(text, add_special_tokens=False).ids


def read_stdin():
    """All of it, without a byte-order mark and the last line ends."""
    return Path("/dev/stdin").read_text("utf-8-sig", "replace").rstrip("\n")


def model_name(folder):
    """What a person calls it: in the hub's cache the name stands two folders above."""
    folder = Path(folder).resolve()
    if folder.parent.name == "snapshots":
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name
