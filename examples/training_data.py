"""What does a model learn from, number by number?

Each line of a file is a JSON object: {"text": ...}, {"prompt": ..., "completion": ...} or
{"messages": [{"role": "user", "content": ...}, ...]}. Of a text each token after the first is
learned. The others become a conversation, and only its last answer is: the question will be given.

    python -m examples.lora --data examples/lora_facts.jsonl --out /tmp/adapters   learns from one

Imported by other examples. Described in: github.com/ml-explore/mlx-lm, mlx_lm/LORA.md
"""

import json

from examples.chat_template import ChatTemplate
from examples.common import encode


def read_records(path, folder, config, tokenizer):
    """A pair for each line: ids, and the place in them from which they are learned."""
    records = []
    template = None
    for number, line in enumerate(path.read_text("utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if "text" in record:  # a document; the first stop id, <|endoftext|>, ends one
                ids = encode(record["text"], tokenizer) + config["eos_token_id"][:1]
                start = 1
            else:
                messages = conversation(record)
                template = template or ChatTemplate(folder, tokenizer)
                ids = template.encode(messages[:-1])  # as a chat has it, the empty thought included
                start = len(ids)
                ids += encode(messages[-1]["content"], tokenizer) + list(template.end_of_turn)
        except (KeyError, TypeError, IndexError, AttributeError, json.JSONDecodeError) as error:
            what = "a text, prompt and completion, or messages"
            raise ValueError(f"{path}, line {number} is not {what} ({error!r})") from None
        if not start < len(ids) <= config["max_position_embeddings"]:
            raise ValueError(f"{path}, line {number} has {len(ids)} tokens, none to learn or many")
        records.append((ids, start))
    if not records:
        raise ValueError(f"{path} is empty")
    return records


def conversation(record):
    if "messages" not in record:
        question = {"role": "user", "content": record["prompt"]}
        return [question, {"role": "assistant", "content": record["completion"]}]
    if record["messages"][-1]["role"] != "assistant":
        raise TypeError("the last message is not the assistant's")
    return record["messages"]
