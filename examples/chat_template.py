"""What does a conversation look like to a model that continues texts?

A checkpoint brings a program in the template language jinja that writes it, with control marks such
as <|im_start|> between the messages, each of which is one token. What a person types stays text
even where it spells a mark: typed marks are hidden while the template runs. Then the template's own
marks get names that nobody can type, and a tokenizer with these names encodes all in one piece.

    python -m examples.explain --chat "What is the capital of France?"        shows the tokens

Imported by other examples. Described in: huggingface.co/docs/transformers/chat_templating
"""

import functools
import itertools
import json
import re
import secrets
from datetime import datetime

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from examples.common import encode

SECRET = str(secrets.randbits(64))  # nobody types this


class ChatTemplate:
    """encode: messages -> ids; answer_content: ids of an answer -> its message; end_of_turn: the
    ids that end an answer, a set of one or none.
    """

    def __init__(self, folder, tokenizer, think=False):
        source, names = read_template(folder)
        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        sandbox.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
        self.program = sandbox.from_string(source)
        self.variables = names | {"add_generation_prompt": True, "enable_thinking": think}
        self.tokenizer = tokenizer

        question = {"role": "user", "content": "question"}
        self.opening = self.render([question])
        tried = self.render([question, {"role": "assistant", "content": "ANSWER"}, question])
        written = source + tried  # some templates put a mark together: '<|' + role + '|>'
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        for mark in re.findall(r"<\|[^|<>\s.'\"]+\|>", written):
            if mark not in added:
                raise ValueError(f"{folder}: the chat template writes {mark}, which is no token")
        marks = [token for token in added if token in written or token in names.values()]
        marks.sort(key=len, reverse=True)  # where two begin at one place, the longer one counts
        self.pattern = "|".join(map(re.escape, marks)) or "(?!)"  # the latter is found nowhere
        self.mark_ids = {tokenizer.token_to_id(mark) for mark in marks}
        # A fine-tune of a base model may name no stop token. What follows an answer ends it.
        end = re.match(rf"\s*({self.pattern})", tried.partition("ANSWER")[2])
        self.end_of_turn = {tokenizer.token_to_id(end[1])} if end else set()

        stored = json.loads(tokenizer.to_str())
        for token in stored["added_tokens"]:
            token["content"] = self.rename(token["content"])
        self.renamed = Tokenizer.from_str(json.dumps(stored))
        renamed_id = self.renamed.token_to_id
        self.ids = {renamed_id(self.rename(name)): tokenizer.token_to_id(name) for name in added}

    def render(self, messages):
        """The conversation as one text, up to where the next answer begins."""
        try:
            return self.program.render(messages=messages, **self.variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from None

    def hide(self, text):
        """Marks in it with the secret behind their first character: the template's are without."""
        return re.sub(self.pattern, lambda mark: mark[0][0] + SECRET + mark[0][1:], text)

    def rename(self, text):
        """Marks in it with the secret in front of them; what was hidden appears."""
        pattern = f"{SECRET}|{self.pattern}"
        return re.sub(pattern, lambda got: "" if got[0] == SECRET else SECRET + got[0], text)

    def encode(self, messages):
        """Ids of the conversation. The assistant's messages are those of answer_content."""
        hidden = []
        for message in messages:
            typed = message["role"] != "assistant"
            content = self.hide(message["content"]) if typed else message["content"]
            hidden.append({"role": message["role"], "content": content})
        ids = encode(self.rename(self.render(hidden)), self.renamed)
        return [self.ids.get(token_id, token_id) for token_id in ids]

    def answer_content(self, answer):
        """The text of an answer's ids; marks that are merely spelled are hidden in it. A thought
        that did not come to its end is left out.
        """
        text = ""
        for is_mark, ids in itertools.groupby(answer, self.mark_ids.__contains__):
            part = self.tokenizer.decode(list(ids), skip_special_tokens=False)
            text += part if is_mark else self.hide(part)
        so_far = self.opening + text
        if so_far.rfind("<think>") > so_far.rfind("</think>"):
            return text.rpartition("<think>")[0]
        return text


class Generation(Extension):
    """{% generation %} shows a training program what to learn; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def read_template(folder):
    """The template, and the marks that tokenizer_config.json names: bos_token, eos_token, ..."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes()) if path.exists() else {}
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, for different uses
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if (folder / "chat_template.jinja").exists():
        source = (folder / "chat_template.jinja").read_text("utf-8")
    if not isinstance(source, str):
        raise ValueError(f"{folder} has no chat template: this model only continues texts")
    names = {}
    for kind in ("bos_token", "eos_token", "pad_token"):
        token = settings.get(kind)
        if token:  # a text, or in older files a description of it
            names[kind] = token["content"] if isinstance(token, dict) else token
    return source, names


def refuse(message):
    raise jinja2.TemplateError(message)
