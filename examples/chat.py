"""How does a model that continues texts hold a conversation?

The whole conversation is one text: a template that came with the model writes messages and answers
one after the other, and the model continues it with the next answer. Keys and values of what was
read before are still in the cache. So only what is new, or now written differently, is fed.

    python -m examples.chat "What is the capital of France?"
    python -m examples.chat --think        a conversation: Ctrl-C stops an answer, Ctrl-D ends it

In a terminal, arrow keys, history and pasted lines work, and /clear starts over. In a pipe, each
line is a message. The ways of drawing below are those that Qwen3 recommends (arXiv 2505.09388).
"""

import itertools
import os
import sys
import time
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.output import create_output

import llm_inference as llm
from examples.chat_template import ChatTemplate
from examples.common import read_stdin

ANSWERING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "max_tokens": 2000}
THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 4000}
HISTORY = Path("~/.llm_inference_history").expanduser()


def main():
    parser = llm.argument_parser(
        "Chat with Qwen3: temperature 0.7, top-p 0.8, top-k 20; with --think 0.6, 0.95, 20. "
        'Example: python -m examples.chat "Hi" --think'
    )
    parser.add_argument("message", nargs="*", help="- reads it from stdin; none: a conversation")
    parser.add_argument("--think", action="store_true", help="think before each answer")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all else")
    parser.set_defaults(**ANSWERING)
    args = parser.parse_intermixed_args()
    if args.think:
        parser.set_defaults(**THINKING)
        args = parser.parse_intermixed_args()  # once more: the defaults are others now
    only = " ".join(args.message)
    if only == "-":
        only = read_stdin()
    if args.message and not only.strip():
        parser.error("the message is empty")

    folder = llm.find_model(args.model)
    args.model = str(folder)
    weights, config, tokenizer = llm.load_model(args)
    template = ChatTemplate(folder, tokenizer, think=args.think)
    stop = template.end_of_turn.union(config["eos_token_id"])
    beginning = [{"role": "system", "content": args.system}] if args.system else []
    messages = list(beginning)
    cache = llm.make_cache(weights, config, 0)
    held = []  # the ids whose keys and values are in the cache
    for message in [only] if only else incoming_messages():
        if message == "/clear" and sys.stdin.isatty():
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": message})
        ids = template.encode(messages)
        # The last id is fed in any case: what the model says behind it is the question.
        offset = len(os.path.commonprefix([held, ids[:-1]]))
        if only:
            llm.note(f"Prompt: {only}\n{'-' * 60}")
        if only and len(ids) > llm.CHUNK:
            llm.note(f"(reading {len(ids)} tokens)")
        answer = []
        start = time.perf_counter()
        try:
            tokens = llm.generate(
                ids[offset:], weights, config, stop, cache=cache, offset=offset, **llm.options(args)
            )
            first = list(itertools.islice(tokens, 1))  # here the message is read
            if only:
                llm.note("Output: ", end="")
            llm.stream(itertools.chain(first, tokens), tokenizer, answer)
        except KeyboardInterrupt:
            if only:
                raise
        if len(answer) == min(args.max_tokens, config["max_position_embeddings"] - len(ids) + 1):
            llm.note("(cut: --max-tokens or the context is used up)")
        if only:
            seconds = time.perf_counter() - start
            llm.note(f"Time: {seconds:.2f}s ({len(ids)} tokens read, {len(answer)} written)")
        # The last token of an answer was chosen, but not fed.
        held = ids + answer[:-1] if answer else ids[:offset]
        messages.append({"role": "assistant", "content": template.answer_content(answer)})


def incoming_messages():
    """What a person types, or the lines of a pipe, without blank ones."""
    if not sys.stdin.isatty():
        for line in sys.stdin.buffer:
            text = line.decode("utf-8-sig", "replace").rstrip("\r\n")
            if text.strip():
                yield text
        return
    try:
        HISTORY.touch()
        history = FileHistory(HISTORY)
    except OSError:  # nothing can be written there
        history = InMemoryHistory()
    output = create_output(sys.stdout if sys.stdout.isatty() else sys.stderr)
    session = PromptSession(history=history, output=output)
    while True:
        try:
            text = session.prompt("> ")
        except EOFError:  # Ctrl-D
            return
        if text.strip():
            yield text


if __name__ == "__main__":
    llm.run(main)
