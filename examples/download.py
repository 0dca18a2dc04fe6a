"""How do the weights get onto this disk?

A model on the hub (huggingface.co) is a folder of files under a name such as Qwen/Qwen3-0.6B. What
is here and can be loaded needs no network; only for the rest is the hub asked, with a time limit.
Files that are whole are kept, so that an interrupted download goes on with the next one.

    python -m examples.download          Qwen3-0.6B, into its folder here
    python llm_inference.py --model "$(python -m examples.download mlx-community/Qwen3-0.6B-4bit)"

With a name, files go into the hub's cache, which all programs share. stdout gets only the folder.
Described in: huggingface.co/docs/huggingface_hub/guides/download
"""

import argparse
import fnmatch
import os
import re
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_VERBOSITY", "error")  # read when the next line runs
from huggingface_hub import HfApi, hf_hub_download, snapshot_download

from examples.check import check
from llm_inference import note, run

USUAL = "Qwen/Qwen3-0.6B"
BESIDE = Path(__file__).resolve().parent.parent / "Qwen3-0.6B"
NEEDED = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model*.safetensors",
]
TIME_LIMIT = 2  # seconds; the hub's library tries twice, and without a limit may wait for ever


def main():
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        description="Get a model from the hub; print its folder.",
        epilog="Example: python -m examples.download mlx-community/Qwen3-0.6B-4bit",
    )
    parser.add_argument("name", nargs="?", help=f"on the hub ({USUAL}, into {BESIDE.name}/ here)")
    name = parser.parse_args().name
    if name is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        parser.error(f"{name!r} is no name on the hub, such as {USUAL}")
    folder = cached_folder(name) if name else BESIDE
    if not is_complete(folder):
        try:
            folder = download(name or USUAL, None if name else BESIDE)
        except Exception as error:  # no network, no such model, no room, no right to write here
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{name or USUAL} cannot be downloaded: {reason[:300]}") from None
        check(folder, stretched_rope=True)  # says what is wrong with it
    print(folder, flush=True)


def cached_folder(name):
    """Where the hub's cache has the model, be it whole or in part; None if nowhere."""
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except OSError:
        return None


def is_complete(folder):
    """Files have their names only when they are whole, but any of them may still be missing."""
    try:
        return bool(folder) and bool(check(folder, stretched_rope=True))
    except ValueError:
        return False


def download(name, local_folder):
    """Fetch what is missing into local_folder, or into the hub's cache for None; return where."""
    info = HfApi().model_info(name, files_metadata=True, timeout=TIME_LIMIT)
    sizes = {}
    for file in info.siblings:
        if any(fnmatch.fnmatchcase(file.rfilename, pattern) for pattern in NEEDED):
            sizes[file.rfilename] = file.size or 0
    if "config.json" not in sizes:
        raise ValueError("there is no config.json: a GGUF or another format cannot be run")
    place = local_folder or f"the hub's cache ({os.environ.get('HF_HOME', '~/.cache/huggingface')})"
    note(f"{name}: {sum(sizes.values()) / 1e9:.2g} GB in {len(sizes)} files, to {place}")
    for file in sorted(sizes, key=sizes.get):  # the weights last: their index says what is missing
        path = hf_hub_download(name, file, local_dir=local_folder)
        if os.path.getsize(path) != sizes[file]:  # cut by something else than a download
            path = hf_hub_download(name, file, local_dir=local_folder, force_download=True)
    return Path(path).parent


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the hub's: what matters is raised as an error
    run(main)
