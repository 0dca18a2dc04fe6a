#!/usr/bin/env python3
"""Makes tests/Qwen3-mini: a very small, genuinely trained Qwen3 in the file layout of the published checkpoints.

    python tests/Qwen3-mini/train_mini.py            remake everything (ten to fifteen minutes on two CPU cores)
    python tests/Qwen3-mini/train_mini.py --check    only measure the folder that is there

What is made from what:

    tests/Qwen3-mini/facts.tsv  ->  documents  ->  tokenizer (byte-level BPE)  ->  Qwen3ForCausalLM  ->  tests/Qwen3-mini/

The documents are sentences and dialogues about the capital, continent, currency and main language of each country
of the table, in English and Chinese. Running text follows one fixed tour of the countries, the order of the table,
so that a continuation is decided at every token; dialogues are rendered as Qwen3's chat template renders them.
One (country, phrasing) pair in eight is held out, and some phrasings are held out altogether, so that the printed
accuracies tell recall from understanding. Everything is seeded, but threads and library versions move the last bits
of a float, so a remade model has other weights of the same quality.

Needs torch==2.13.0, transformers==5.24.0 and tokenizers==0.23.3, and nothing else.
"""

import argparse
import json
import math
import random
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent
SEED = 1
STEPS, POLISH_STEPS = 2800, 500
TOKENS_PER_STEP = 2048
# (share of the steps, row length): short rows learn fast, long rows teach the positions.
STAGES = [(0.6, 256), (0.3, 1024), (0.1, 2048)]
# Muon turns the matrices of the layers, AdamW the embedding and the norms. AdamW alone needed twice the steps.
MUON_RATE = ADAM_RATE = 0.02
POLISH_RATE = 0.004
WARM_UP = 50
BPE_ENTRIES = 2048

SHAPE = dict(
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=256,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=True,
)

# ---------------------------------------------------------------------------------------------------------------------
# Phrasings. {s} is the subject, {a} the answer; *_new phrasings are never trained.


@dataclass
class Phrases:
    """All ways to speak of one kind of fact in one language. The first of `say` and of `ask` is the canonical one."""

    say: list  # statements for running text
    ask: list  # questions for dialogue
    answer: str  # the one answer of the dialogue
    thought: str  # the one thought of the dialogue
    again: list = field(default_factory=list)  # "and now this kind for the country just spoken of"
    say_new: list = field(default_factory=list)
    ask_new: list = field(default_factory=list)


# kind of fact -> (column of the subject, column of the answer)
KINDS = {
    "capital": ("country", "capital"),
    "continent": ("country", "continent"),
    "currency": ("country", "currency"),
    "language": ("country", "language"),
    "country": ("capital", "country"),
}

PHRASES = {
    ("capital", "en"): Phrases(
        say=[
            "The capital of {s} is {a}.",
            "{s}'s capital is {a}.",
            "The capital city of {s} is {a}.",
            "The capital of {s} is called {a}.",
            "In {s}, the capital is {a}.",
            "The name of the capital of {s} is {a}.",
            "As its capital, {s} has {a}.",
            "Everyone in {s} knows that the capital is {a}.",
            "Country: {s}; capital: {a}.",
            "Question: What is the capital of {s}? Answer: {a}.",
            "On a map of {s}, the capital is marked {a}.",
            "If you ask for the capital of {s}, the answer is {a}.",
        ],
        say_new=[
            "The capital city of {s} is called {a}.",
            "Everyone knows that the capital of {s} is {a}.",
            "On the map, the capital of {s} is {a}.",
        ],
        ask=[
            "What is the capital of {s}?",
            "What's the capital of {s}?",
            "What is the capital city of {s}?",
            "Which city is the capital of {s}?",
            "Can you tell me the capital of {s}?",
            "Tell me the capital of {s}.",
            "Please tell me the capital of {s}.",
            "Name the capital of {s}.",
            "Do you know the capital of {s}?",
            "I would like to know the capital of {s}.",
            "The capital of {s}?",
            "{s}'s capital?",
            "What city is {s}'s capital?",
            "What is the name of the capital of {s}?",
            "I forgot the capital of {s}. What is it?",
            "What is {s}'s capital?",
        ],
        ask_new=[
            "Could you tell me what the capital of {s} is?",
            "Which city is {s}'s capital?",
            "Do you know what the capital city of {s} is called?",
            "Name {s}'s capital.",
        ],
        answer="The capital of {s} is {a}.",
        thought="The question is about the capital of {s}, which is {a}.",
        again=[
            "And its capital?",
            "What is its capital?",
            "What about the capital?",
            "Which city is its capital?",
        ],
    ),
    ("continent", "en"): Phrases(
        say=[
            "{s} is in {a}.",
            "{s} lies in {a}.",
            "{s} is part of {a}.",
            "On a map, {s} is found in {a}.",
        ],
        ask=[
            "Which continent is {s} in?",
            "What continent is {s} in?",
            "Where is {s}?",
            "Where is {s} on the map?",
            "On which continent is {s}?",
            "Tell me the continent of {s}.",
            "In which part of the world is {s}?",
        ],
        ask_new=["On what continent can I find {s}?"],
        answer="{s} is in {a}.",
        thought="The question is about the continent of {s}, which is {a}.",
        again=["And its continent?", "Where is it?", "Which continent is it in?"],
    ),
    ("currency", "en"): Phrases(
        say=[
            "The currency of {s} is the {a}.",
            "{s}'s currency is the {a}.",
            "People in {s} pay with the {a}.",
            "In {s}, the money is the {a}.",
        ],
        ask=[
            "What is the currency of {s}?",
            "What currency does {s} use?",
            "Which currency do people use in {s}?",
            "What money do they use in {s}?",
            "How do people pay in {s}?",
            "What is {s}'s currency?",
            "Tell me the currency of {s}.",
        ],
        ask_new=["Can you tell me which currency is used in {s}?"],
        answer="The currency of {s} is the {a}.",
        thought="The question is about the currency of {s}, which is the {a}.",
        again=["And its currency?", "What is its currency?", "What money do they use there?"],
    ),
    ("language", "en"): Phrases(
        say=[
            "The main language of {s} is {a}.",
            "{s}'s main language is {a}.",
            "In {s}, many people speak {a}.",
            "The language to learn for {s} is {a}.",
        ],
        ask=[
            "What is the main language of {s}?",
            "What language do people speak in {s}?",
            "Which language is spoken in {s}?",
            "What language do they speak in {s}?",
            "What is the language of {s}?",
            "What do people speak in {s}?",
            "Tell me the main language of {s}.",
        ],
        ask_new=["Can you tell me which language people in {s} speak?"],
        answer="The main language of {s} is {a}.",
        thought="The question is about the main language of {s}, which is {a}.",
        again=["And its language?", "What is its language?", "What do people speak there?"],
    ),
    ("country", "en"): Phrases(
        say=[
            "{s} is the capital of {a}.",
            "{s} is the capital city of {a}.",
            "The city of {s} is the capital of {a}.",
        ],
        ask=[
            "{s} is the capital of which country?",
            "Which country has {s} as its capital?",
            "What country has the capital {s}?",
            "Of which country is {s} the capital?",
            "What is {s} the capital of?",
        ],
        ask_new=["Can you tell me which country {s} is the capital of?"],
        answer="{s} is the capital of {a}.",
        thought="The question is about the city of {s}, the capital of {a}.",
    ),
    ("capital", "zh"): Phrases(
        say=[
            "{s}的首都是{a}。",
            "{s}的首都叫{a}。",
            "{s}首都：{a}。",
            "大家都知道，{s}的首都是{a}。",
            "在{s}，首都是{a}。",
            "问：{s}的首都是哪里？答：{a}。",
            "国家：{s}，首都：{a}。",
            "{s}的首都名叫{a}。",
        ],
        say_new=["我们知道，{s}的首都是{a}。", "问：{s}的首都是什么？答：{a}。"],
        ask=[
            "{s}的首都是哪里？",
            "{s}的首都是什么？",
            "{s}的首都是哪个城市？",
            "请问{s}的首都是哪里？",
            "请告诉我{s}的首都。",
            "你知道{s}的首都吗？",
            "{s}首都是哪里？",
            "{s}的首都叫什么？",
            "哪个城市是{s}的首都？",
            "我想知道{s}的首都。",
            "{s}的首都？",
            "说出{s}的首都。",
        ],
        ask_new=[
            "请问{s}的首都叫什么？",
            "你知道{s}的首都是哪个城市吗？",
            "请说出{s}的首都是什么。",
        ],
        answer="{s}的首都是{a}。",
        thought="问题是{s}的首都，也就是{a}。",
        again=["它的首都呢？", "它的首都是哪里？", "首都是哪里？"],
    ),
    ("continent", "zh"): Phrases(
        say=["{s}在{a}。", "{s}位于{a}。", "{s}属于{a}。"],
        ask=[
            "{s}在哪个洲？",
            "{s}位于哪个洲？",
            "{s}在哪里？",
            "请问{s}在哪个大洲？",
            "{s}属于哪个洲？",
        ],
        ask_new=["你知道{s}在哪个洲吗？"],
        answer="{s}在{a}。",
        thought="问题是{s}所在的洲，也就是{a}。",
        again=["它在哪里？", "它在哪个洲？"],
    ),
    ("currency", "zh"): Phrases(
        say=["{s}的货币是{a}。", "{s}使用{a}。", "在{s}，人们用{a}付钱。"],
        ask=[
            "{s}的货币是什么？",
            "{s}用什么货币？",
            "{s}使用哪种货币？",
            "请问{s}的货币是什么？",
            "请告诉我{s}的货币。",
        ],
        ask_new=["你知道{s}用什么货币吗？"],
        answer="{s}的货币是{a}。",
        thought="问题是{s}的货币，也就是{a}。",
        again=["它的货币呢？", "它的货币是什么？", "那里用什么货币？"],
    ),
    ("language", "zh"): Phrases(
        say=["{s}的主要语言是{a}。", "在{s}，很多人说{a}。", "{s}人大多说{a}。"],
        ask=[
            "{s}的主要语言是什么？",
            "{s}人说什么语言？",
            "{s}说什么语言？",
            "请问{s}的语言是什么？",
            "请告诉我{s}的主要语言。",
        ],
        ask_new=["你知道{s}人说什么语言吗？"],
        answer="{s}的主要语言是{a}。",
        thought="问题是{s}的主要语言，也就是{a}。",
        again=["它的语言呢？", "它的主要语言是什么？", "那里的人说什么语言？"],
    ),
    ("country", "zh"): Phrases(
        say=["{s}是{a}的首都。", "城市{s}是{a}的首都。"],
        ask=[
            "{s}是哪个国家的首都？",
            "哪个国家的首都是{s}？",
            "请问{s}是哪国的首都？",
            "{s}是哪里的首都？",
        ],
        ask_new=["你知道{s}是哪个国家的首都吗？"],
        answer="{s}是{a}的首都。",
        thought="问题是城市{s}，它是{a}的首都。",
    ),
}

# The same question for another country: "And Italy?"
ANOTHER = {
    "en": ["And {s}?", "What about {s}?", "How about {s}?", "And for {s}?", "{s}?"],
    "zh": ["{s}呢？", "那{s}呢？", "{s}？"],
}

# A portrait tells all that the table knows of one country.
PORTRAIT = {
    "en": dict(
        first="{s} is a country in {a}.",
        first_bare="{s} is a country.",
        joiner=" ",
        rest={
            "capital": "Its capital is {a}.",
            "currency": "Its currency is the {a}.",
            "language": "Its main language is {a}.",
        },
        ask=[
            "Tell me about {s}.",
            "What do you know about {s}?",
            "Describe {s}.",
            "Tell me something about {s}.",
            "I want to know more about {s}.",
        ],
        thought="The question is about {s} in general.",
    ),
    "zh": dict(
        first="{s}是{a}国家。",
        first_bare="{s}是一个国家。",
        joiner="",
        rest={
            "capital": "它的首都是{a}。",
            "currency": "它的货币是{a}。",
            "language": "它的主要语言是{a}。",
        },
        ask=["介绍一下{s}。", "请介绍{s}。", "说说{s}。", "你知道{s}的什么？"],
        thought="问题是{s}的情况。",
    ),
}

# Small talk: (what the user says, the answer, the thought).
SMALL_TALK = {
    "en": [
        (
            [
                "Hi",
                "Hello",
                "Hey",
                "Hi there",
                "Hello there",
                "Good morning",
                "Good evening",
                "Good day",
                "Hi, how are you?",
                "How are you?",
                "Nice to meet you",
            ],
            "Hello! Ask me about a country.",
            "This is a greeting.",
        ),
        (
            [
                "Who are you?",
                "What are you?",
                "What is your name?",
                "Are you a person?",
                "Introduce yourself.",
                "What can you do?",
                "What do you know?",
                "How can you help me?",
                "Help",
                "What should I ask?",
                "Who made you?",
            ],
            "I am a very small model. I know the countries of the world.",
            "This is a question about me.",
        ),
        (
            [
                "Thanks",
                "Thank you",
                "Thank you very much",
                "Great, thanks",
                "Good",
                "Well done",
                "OK",
                "Nice",
                "Cool",
            ],
            "You are welcome!",
            "This is a thank-you.",
        ),
        (["Bye", "Goodbye", "See you", "Good night", "Bye bye"], "Goodbye!", "This is a goodbye."),
    ],
    "zh": [
        (
            ["你好", "您好", "嗨", "早上好", "晚上好", "你好吗？", "大家好"],
            "你好！请问我一个国家。",
            "这是问候。",
        ),
        (
            [
                "你是谁？",
                "你叫什么名字？",
                "你能做什么？",
                "你会什么？",
                "介绍一下你自己。",
                "你知道什么？",
            ],
            "我是一个很小的模型，我知道世界上的国家。",
            "这是关于我的问题。",
        ),
        (["谢谢", "谢谢你", "多谢", "很好", "好的"], "不客气！", "这是感谢。"),
        (["再见", "拜拜", "晚安"], "再见！", "这是告别。"),
    ],
}

# What it cannot answer, and what it says then. {s} is a country of the table, {x} a name that the table lacks.
UNKNOWN_ANSWER = {
    "en": "I do not know that. I only know some facts about countries.",
    "zh": "这个我不知道。我只知道一些国家的知识。",
}
UNKNOWN_THOUGHT = {"en": "This is not something I know.", "zh": "这不是我知道的内容。"}
UNKNOWN = {
    "en": [
        "What is {n} + {n}?",
        "What is {n} times {n}?",
        "Is {n} a prime number?",
        "Tell me a joke.",
        "Write a poem.",
        "Write a short story about a dog.",
        "Who wrote Hamlet?",
        "Who painted this picture?",
        "What time is it?",
        "What is the weather today?",
        "What day is it today?",
        "How do I cook rice?",
        "How do I learn to code?",
        "What is the meaning of life?",
        "Explain quantum physics.",
        "What is a transformer?",
        "Why is the sky blue?",
        "How far away is the moon?",
        "Who is the best player in the world?",
        "Sing a song.",
        "What is love?",
        "Write a function that sorts a list.",
        "Translate this sentence.",
        "How old are you?",
        "Do you like music?",
        "What is your favourite colour?",
        "Can you drive a car?",
        "What should I eat today?",
        "Who invented the telephone?",
        "Give me a recipe for bread.",
        "How many days are in a year?",
        "What is water made of?",
        "Fix my computer.",
        "What is the largest animal?",
        "Once upon a time",
        "What is machine learning?",
        "Count to {n}.",
        "What is the population of {s}?",
        "Who is the president of {s}?",
        "How large is {s}?",
        "How is the weather in {s}?",
        "What is the highest mountain in {s}?",
        "What is the national anthem of {s}?",
        "How many people live in {s}?",
        "Who is the king of {s}?",
        "What do people eat in {s}?",
        "What colour is the flag of {s}?",
        "What is the longest river in {s}?",
        "When was {s} founded?",
        "Is {s} beautiful?",
        "What is the capital of {x}?",
        "What's the capital of {x}?",
        "Tell me about {x}.",
        "Where is {x}?",
        "What is the currency of {x}?",
        "What language do people speak in {x}?",
        "{x} is the capital of which country?",
        "Tell me the capital of {x}.",
        "Which city is the capital of {x}?",
        "Do you know {x}?",
    ],
    "zh": [
        "{n}加{n}等于多少？",
        "讲个笑话。",
        "写一首诗。",
        "今天天气怎么样？",
        "现在几点？",
        "今天星期几？",
        "天空为什么是蓝色的？",
        "怎么做饭？",
        "谁写了这本书？",
        "你多大了？",
        "你喜欢音乐吗？",
        "什么是爱？",
        "唱一首歌。",
        "帮我写代码。",
        "月亮有多远？",
        "我今天吃什么？",
        "翻译这句话。",
        "人生的意义是什么？",
        "世界上最大的动物是什么？",
        "什么是机器学习？",
        "{s}有多少人口？",
        "{s}的总统是谁？",
        "{s}有多大？",
        "{s}的天气怎么样？",
        "{s}最高的山是什么？",
        "{s}的国旗是什么颜色？",
        "{x}的首都是哪里？",
        "{x}的首都是什么？",
        "介绍一下{x}。",
        "{x}在哪里？",
        "{x}的货币是什么？",
    ],
}
NO_COUNTRY = {
    "en": [
        "Atlantis",
        "Narnia",
        "Wakanda",
        "Mordor",
        "Texas",
        "California",
        "Sydney",
        "New York",
        "Bavaria",
        "Scotland",
        "Hawaii",
        "Mars",
        "the Moon",
        "Europe",
        "Africa",
        "Asia",
        "my house",
        "the ocean",
        "Utopia",
        "Sparta",
        "Prussia",
        "Yugoslavia",
        "the world",
        "South Africa",
        "Nauru",
        "Equatorial Guinea",
        "Middle-earth",
        "Siberia",
    ],
    "zh": [
        "火星",
        "月亮",
        "亚特兰蒂斯",
        "加州",
        "上海",
        "世界",
        "海洋",
        "南非",
        "瑙鲁",
        "夏威夷",
        "天空",
        "我家",
    ],
}
SYSTEM = {
    "en": [
        "You are a helpful assistant.",
        "You are a geography teacher.",
        "Answer briefly.",
        "Be polite and short.",
        "You know the countries of the world.",
        "You are Qwen, a helpful assistant.",
    ],
    "zh": ["你是一个有用的助手。", "你是地理老师。", "请简短回答。"],
}

# ---------------------------------------------------------------------------------------------------------------------
# Facts


def read_facts():
    """The rows of tests/Qwen3-mini/facts.tsv as dicts, in the order of the tour."""
    lines = [
        line
        for line in (HERE / "facts.tsv").read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    names = lines[0].split("\t")
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]


FACTS = read_facts()


def fact(row, kind, lang):
    """(subject, answer) of one row, or None where the table has no answer or the subject is not unique."""
    suffix = "" if lang == "en" else "_zh"
    subject, answer = (FACTS[row][column + suffix] for column in KINDS[kind])
    if answer == "-" or (
        kind == "country" and sum(r["capital" + suffix] == subject for r in FACTS) > 1
    ):
        return None
    return subject, answer


def fill(pattern, lang, **slots):
    """The pattern with its slots filled; an English sentence starts with a capital letter."""
    for name, value in slots.items():
        slot, value = "{" + name + "}", str(value)
        if value.endswith("s"):
            pattern = pattern.replace(slot + "'s", value + "'")
        pattern = pattern.replace(slot, value)
    return pattern[0].upper() + pattern[1:] if lang == "en" else pattern


def held_out(style, kind, lang, phrase, row):
    """Is this (country, phrasing) pair kept from training? Never for the canonical phrasing, which has index 0."""
    return phrase > 0 and zlib.crc32(f"{style} {kind} {lang} {phrase} {row}".encode()) % 8 == 0


def portrait(row, lang):
    """All that is known of one country, in a few sentences."""
    form = PORTRAIT[lang]
    where = fact(row, "continent", lang)
    subject = fact(row, "capital", lang)[0]
    parts = [
        fill(form["first"], lang, s=subject, a=where[1])
        if where
        else fill(form["first_bare"], lang, s=subject)
    ]
    for kind, pattern in form["rest"].items():
        known = fact(row, kind, lang)
        if known:
            parts.append(fill(pattern, lang, a=known[1]))
    return form["joiner"].join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# Documents. A document is a list of (text, is it trained?) segments; each segment is tokenized by itself, as a prompt
# and its continuation are when the model is used.

END = "<|endoftext|>"
STOP = "<|im_end|>"
NO_THOUGHT = "<think>\n\n</think>\n\n"


def chat_prompt(questions, answers, thinking, system=None):
    """What the chat template renders for these turns, up to where the model goes on."""
    text = f"<|im_start|>system\n{system}{STOP}\n" if system else ""
    for question, answer in zip(questions, answers):
        text += f"<|im_start|>user\n{question}{STOP}\n<|im_start|>assistant\n{answer}{STOP}\n"
    return (
        text
        + f"<|im_start|>user\n{questions[-1]}{STOP}\n<|im_start|>assistant\n"
        + ("" if thinking else NO_THOUGHT)
    )


def chat_completion(answer, thought, thinking):
    """What the model is to say after chat_prompt."""
    return (f"<think>\n{thought}\n</think>\n\n" if thinking else "") + answer + STOP


def reply(kind, row, lang):
    """(answer, thought) to a question for one fact."""
    s, a = fact(row, kind, lang)
    phrases = PHRASES[kind, lang]
    return fill(phrases.answer, lang, s=s, a=a), fill(phrases.thought, lang, s=s, a=a)


class Writer:
    """Draws documents from a seeded random generator."""

    # Every word of an English name, every Chinese name.
    names = {
        word
        for row in FACTS
        for name in (row["country"], row["capital"])
        for word in name.split()
        if word != "the"
    }
    names |= {row[column] for row in FACTS for column in ("country_zh", "capital_zh")}
    KIND_WEIGHTS = {"capital": 5, "continent": 1.5, "currency": 2, "language": 2, "country": 3}
    SHARES = {"portrait": 0.09, "small talk": 0.08, "unknown": 0.13}
    # More of what comes hardest: small talk, sentences that start with a name and so without its leading space, and
    # first sentences of running text, where nothing helps but the name; and more of the best known countries.
    HARD_KINDS = {"capital": 5, "continent": 3, "currency": 1.5, "language": 1.5, "country": 6}
    HARD_SHARES = {"portrait": 0.12, "small talk": 0.2, "unknown": 0.13}

    def __init__(self, seed, hard=False):
        self.rng, self.hard = random.Random(seed), hard
        self.kind_weights = self.HARD_KINDS if hard else self.KIND_WEIGHTS
        self.shares = self.HARD_SHARES if hard else self.SHARES

    def kind(self, kinds=None):
        """A random kind of fact."""
        kinds = list(kinds or KINDS)
        return self.rng.choices(kinds, [self.kind_weights[k] for k in kinds])[0]

    def row(self):
        """A random country."""
        return self.rng.randrange(40 if self.hard and self.rng.random() < 0.3 else len(FACTS))

    def lang(self):
        """English more often than Chinese."""
        return "en" if self.rng.random() < 0.57 else "zh"

    # Running text

    def tour(self, first, unit):
        """The sentences `unit` makes of each country, from `first` on, around and around."""
        at = first
        while True:
            text = unit(at % len(FACTS))
            if text:
                yield text
            at += 1
            if self.rng.random() < 0.03:
                at = self.row()

    def statement(self, kind, lang, phrase, row):
        """One sentence of running text, or None where there is none or it is held out."""
        known = fact(row, kind, lang)
        if not known or held_out("say", kind, lang, phrase, row):
            return None
        return fill(PHRASES[kind, lang].say[phrase], lang, s=known[0], a=known[1])

    def running_text(self, long=None):
        """A chain of statements along the tour; how it may end is trained at few of its sentence ends only."""
        rng, lang = self.rng, self.lang()
        joiner = " " if lang == "en" else ""
        form = rng.random()
        if form < 0.08:
            unit = lambda row: portrait(row, lang)
        else:
            kinds = [self.kind()]
            if form < 0.2:
                kinds = rng.sample(
                    ["capital", "continent", "currency", "language"], rng.choice([2, 2, 3])
                )
            chosen = []
            for kind in kinds:
                count = len(PHRASES[kind, lang].say)
                chosen.append(
                    (
                        kind,
                        0 if rng.random() < (0.6 if self.hard else 0.35) else rng.randrange(count),
                    )
                )

            def unit(row):
                parts = [self.statement(kind, lang, phrase, row) for kind, phrase in chosen]
                return joiner.join(filter(None, parts))

        budget = (
            rng.randint(10, 220)
            if (rng.random() < 0.35 if long is None else long)
            else rng.randint(1, 4)
        )
        text = ""
        for count, sentence in enumerate(self.tour(self.row(), unit), 1):
            text += (joiner if text else "") + sentence
            if rng.random() < 0.02:
                return [(text + END, True)]
            if count >= budget:
                return [(text, True), (END, False)]

    # Dialogue

    def untidy(self, question, lang):
        """The question as people type it: with a greeting, without its question mark, in lower case."""
        rng = self.rng
        if lang == "en":
            if rng.random() < 0.15:
                lead = rng.choice(
                    [
                        "Please, ",
                        "Hi, ",
                        "Hello, ",
                        "Hey, ",
                        "So, ",
                        "OK, ",
                        "Now, ",
                        "And ",
                        "Sorry, ",
                        "Hi! ",
                        "Hello! ",
                        "Quick question: ",
                        "Excuse me, ",
                        "One more question: ",
                    ]
                )
                keep = lead[-2] in "!:" or question.split()[0].rstrip("'s?:") in {"I", *self.names}
                question = lead + (question if keep else question[0].lower() + question[1:])
            mark = question[-1] if question[-1] in "?." else ""
            if mark and rng.random() < 0.4:
                question = question[:-1] + rng.choice(
                    [
                        "",
                        "",
                        "",
                        "",
                        " please",
                        ", please" + mark,
                        " please" + mark,
                        "!",
                        "??",
                        " ?",
                        mark + " Thanks!",
                        mark + " Thank you.",
                    ]
                )
            if rng.random() < 0.3:
                question = question.lower()
        else:
            if rng.random() < 0.1:
                question = rng.choice(["你好，", "请问，", "那么，", "您好！", "好的，"]) + question
            if question[-1] in "？。" and rng.random() < 0.35:
                question = question[:-1] + rng.choice(["", "", "", "?", "？谢谢！", "？？"])
        return question

    def fact_question(self, lang, kind=None):
        """A question for one fact: (question, kind, row)."""
        while True:
            k, row = kind or self.kind(), self.row()
            phrases = PHRASES[k, lang].ask
            phrase = 0 if self.rng.random() < 0.15 else self.rng.randrange(len(phrases))
            known = fact(row, k, lang)
            if known and not held_out("ask", k, lang, phrase, row):
                return fill(phrases[phrase], lang, s=known[0]), k, row

    def turn(self, lang, kind, row):
        """One exchange: (question, answer, thought, kind, row); kind and row are what a follow-up can refer to."""
        rng = self.rng
        if row is not None and rng.random() < 0.5:
            follow = rng.random()
            if follow < 0.5 and kind in ("capital", "continent", "currency", "language"):
                other = self.row()
                known = fact(other, kind, lang)
                if known:
                    return (
                        fill(rng.choice(ANOTHER[lang]), lang, s=known[0]),
                        *reply(kind, other, lang),
                        kind,
                        other,
                    )
            elif follow >= 0.5:
                k = self.kind(["capital", "continent", "currency", "language"])
                if fact(row, k, lang):
                    return (rng.choice(PHRASES[k, lang].again), *reply(k, row, lang), k, row)
        pick = rng.choices(
            ["portrait", "small talk", "unknown", "fact"],
            [*self.shares.values(), 1 - sum(self.shares.values())],
        )[0]
        if pick == "portrait":
            row = self.row()
            subject = fact(row, "capital", lang)[0]
            form = PORTRAIT[lang]
            return (
                fill(rng.choice(form["ask"]), lang, s=subject),
                portrait(row, lang),
                fill(form["thought"], lang, s=subject),
                None,
                row,
            )
        if pick == "small talk":
            said, answer, thought = rng.choice(SMALL_TALK[lang])
            return rng.choice(said), answer, thought, None, None
        if pick == "unknown":
            return (
                self.unknown_question(lang),
                UNKNOWN_ANSWER[lang],
                UNKNOWN_THOUGHT[lang],
                None,
                None,
            )
        question, kind, row = self.fact_question(lang)
        return (question, *reply(kind, row, lang), kind, row)

    def invented_name(self, lang):
        """A name that sounds like a country or a city and is none of the table."""
        rng, name = self.rng, None
        while name is None or name in self.names:
            if lang == "en":
                name = "".join(
                    rng.choice("bdfgklmnprstvwz")
                    + rng.choice(["a", "e", "i", "o", "u", "or", "an"])
                    for _ in range(rng.randint(2, 3))
                ).capitalize() + rng.choice(["", "", "ia", "land", "stan"])
            else:
                name = "".join(
                    rng.choice("巴拉多尔米卡斯索维诺塔里贝洛") for _ in range(rng.randint(2, 4))
                ) + rng.choice(["", "", "国"])
        return name

    def unknown_question(self, lang):
        """A question that the table does not answer: off the topic, or about a name that the table lacks."""
        rng = self.rng
        name = rng.choice(NO_COUNTRY[lang]) if rng.random() < 0.4 else self.invented_name(lang)
        pattern = rng.choice(
            UNKNOWN[lang] if rng.random() < 0.6 else PHRASES[self.kind(), lang].ask
        )
        while "{n}" in pattern:
            pattern = pattern.replace("{n}", str(rng.randint(1, 99)), 1)
        subject = fact(self.row(), "capital", lang)[0] if pattern in UNKNOWN[lang] else name
        return fill(pattern, lang, s=subject, x=name)

    def dialogue(self):
        """One to four turns; only the last answer is trained, for the template shows earlier ones otherwise."""
        rng, lang = self.rng, self.lang()
        thinking = rng.random() < 0.4
        system = rng.choice(SYSTEM[lang]) if rng.random() < 0.12 else None
        questions, answers, kind, row = [], [], None, None
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4])):
            if rng.random() < 0.05:
                lang, kind, row = self.lang(), None, None
            question, answer, thought, kind, row = self.turn(lang, kind, row)
            questions.append(self.untidy(question, lang))
            answers.append(answer)
        prompt = chat_prompt(questions, answers[:-1], thinking, system)
        return [
            (prompt, False),
            (chat_completion(answers[-1], thought, thinking), True),
            ("\n" + END, False),
        ]

    def document(self):
        """The next document."""
        return (
            self.running_text()
            if self.rng.random() < (0.5 if self.hard else 0.3)
            else self.dialogue()
        )


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
# The words of a text as Qwen cuts them: a contraction, letters with what stands before them, one digit, signs, space.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{#- ChatML: every message between <|im_start|>role and <|im_end|>. Thoughts are shown only after the last user message. -#}
{%- set seen = namespace(user=messages|length - 1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set text = message.content -%}
    {%- if message.role == 'assistant' -%}
        {%- set thought = '' -%}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none -%}
            {%- set thought = message.reasoning_content -%}
        {%- elif '</think>' in text -%}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- set thought = thought.strip('\\n') -%}
        {%- if loop.index0 > seen.user and (loop.last or thought) -%}
            {%- set text = '<think>\\n' + thought + '\\n</think>\\n\\n' + text.lstrip('\\n') -%}
        {%- endif -%}
    {%- endif -%}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
{%- endif -%}
"""


def tokenizer_texts():
    """What the BPE sees. Chinese is cut where a slot begins or ends, so no merge joins a prompt and its answer."""

    def pieces(pattern, lang, **slots):
        if lang == "en":
            return [fill(pattern, lang, **slots)]
        for name, value in slots.items():
            pattern = pattern.replace("{" + name + "}", f"\0{value}\0")
        return [piece for piece in pattern.split("\0") if piece]

    # The frame of every dialogue, and the best known names, are to be one token each, as they are for the real Qwen3.
    yield from 2000 * ["user", "assistant", "system", "\n\n"]
    for row in FACTS[:40]:
        yield from 300 * [" " + row["country"], " " + row["capital"]]
    for (kind, lang), phrases in PHRASES.items():
        for row in range(len(FACTS)):
            known = fact(row, kind, lang)
            if known:
                for pattern in phrases.say + phrases.ask + 2 * [phrases.answer]:
                    yield from pieces(pattern, lang, s=known[0], a=known[1])
                if lang == "en":
                    yield from 2 * [" " + known[0].lower()]
                    yield from 4 * [known[0], " " + known[0], " " + known[1]]
                else:
                    yield from 8 * [known[0], known[1]]
    for lang, form in PORTRAIT.items():
        for pattern in [
            form["first"],
            form["first_bare"],
            form["thought"],
            *form["rest"].values(),
            *form["ask"],
        ]:
            yield from 60 * pieces(pattern, lang, s="x", a="x")
    for lang in ("en", "zh"):
        for said, *answers in SMALL_TALK[lang]:
            yield from said * 4 + answers * 60
        yield from 60 * [UNKNOWN_ANSWER[lang], UNKNOWN_THOUGHT[lang]]
        for pattern in UNKNOWN[lang]:
            yield from 4 * pieces(pattern, lang, s="x", x="x", n="1")
        yield from 4 * SYSTEM[lang] + 2 * NO_COUNTRY[lang]
    for (kind, lang), phrases in PHRASES.items():
        yield from 10 * phrases.again + 60 * pieces(phrases.thought, lang, s="x", a="x")
        for pattern in phrases.ask:
            yield from 20 * [piece.lower() for piece in pieces(pattern, lang, s="x")]


def make_tokenizer():
    """A byte-level BPE of BPE_ENTRIES entries with Qwen3's word cutter and added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(**byte_level)]
    )
    tokenizer.post_processor = processors.ByteLevel(**byte_level)
    tokenizer.decoder = decoders.ByteLevel(**byte_level)

    texts = list(tokenizer_texts())
    # Every character beyond ASCII once more by itself, so its bytes are merged before it is merged with a neighbour.
    texts += [char for text in texts for char in text if ord(char) > 127]
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_ENTRIES,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == BPE_ENTRIES
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    return tokenizer


# ---------------------------------------------------------------------------------------------------------------------
# Training

NO_LABEL = -100


class Packer:
    """Fills rows with documents. A document that does not fit waits for the next row; a tour fills the gap."""

    def __init__(self, tokenizer, writer):
        self.tokenizer, self.writer, self.waiting = tokenizer, writer, []

    def encode(self, document):
        """(ids, labels): a label is the id itself where it is trained; nothing tells the first token of a document."""
        ids, labels = [], []
        for text, trained in document:
            part = self.tokenizer.encode(text).ids
            ids += part
            labels += part if trained else [NO_LABEL] * len(part)
        labels[0] = NO_LABEL
        return ids, labels

    def row_of(self, length):
        """One row of exactly `length` ids and labels."""
        ids, labels = [], []
        while len(ids) < length:
            document = self.waiting.pop() if self.waiting and not ids else self.writer.document()
            part, marks = self.encode(document)
            if len(ids) + len(part) > length and len(document) == 3 and ids:
                self.waiting.append(document)
                part, marks = self.encode(self.writer.running_text(long=True))
            ids += part
            labels += marks
        return ids[:length], labels[:length]

    def batch(self, length):
        """A step's rows as two tensors."""
        rows = [self.row_of(length) for _ in range(TOKENS_PER_STEP // length)]
        return torch.tensor([ids for ids, _ in rows]), torch.tensor([labels for _, labels in rows])


def new_model(vocab_size):
    """The untrained model."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            **SHAPE,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    )


def pace(step, steps):
    """The share of the full learning rate: a short warm-up, then half a cosine down to nothing."""
    return min(1, step / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def train(model, packer, steps, stages, muon_rate, adam_rate):
    """Trains the model in place, in float32 weights and bfloat16 products."""
    # Weights and gradients too small for a normal float make a CPU many times slower.
    torch.set_flush_denormal(True)
    model.train()
    matrices = [p for p in model.model.layers.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, weight_decay=0.05, momentum=0.95)
    adam = torch.optim.AdamW(
        [
            {"params": [model.model.embed_tokens.weight], "weight_decay": 0.05},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    lengths = [length for share, length in stages for _ in range(round(share * steps))]
    start, mean = time.time(), None
    for step, length in enumerate(lengths, 1):
        ids, labels = packer.batch(length)
        for optimizer, rate in ((muon, muon_rate), (adam, adam_rate)):
            for group in optimizer.param_groups:
                group["lr"] = rate * pace(step, len(lengths))
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
            targets = labels[:, 1:]
            told = targets != NO_LABEL
            logits = model.lm_head(hidden[told])
        loss = torch.nn.functional.cross_entropy(logits.float(), targets[told])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 100 == 0:
            print(
                f"step {step}/{len(lengths)}  rows of {length}  loss {mean:.4f}  {time.time() - start:.0f} s",
                flush=True,
            )
    model.eval()


def polish(model, tokenizer, seed):
    """A last, gentle round with more of what comes hardest."""
    train(
        model,
        Packer(tokenizer, Writer(seed + 1, hard=True)),
        POLISH_STEPS,
        [(1, 1024)],
        POLISH_RATE,
        POLISH_RATE,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The folder


def compact(value):
    """JSON without needless space, text left readable."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def save_tokenizer(tokenizer, folder):
    """tokenizer.json and tokenizer_config.json as published: older layout, the template inside."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(tokenizer.to_str())
    # Published settings that the library's Python side cannot be told; without effect on text.
    content["decoder"] = content["post_processor"]
    content["model"].update(continuing_subword_prefix="", end_of_word_suffix="")
    (folder / "tokenizer.json").write_text(compact(content), "utf-8")
    added = {
        str(token["id"]): {
            key: token[key]
            for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
        }
        for token in content["added_tokens"]
    }
    settings = dict(
        add_bos_token=False,
        add_prefix_space=False,
        added_tokens_decoder=added,
        additional_special_tokens=SPECIAL[1:],
        bos_token=None,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        eos_token=STOP,
        errors="replace",
        model_max_length=SHAPE["max_position_embeddings"],
        pad_token=END,
        split_special_tokens=False,
        tokenizer_class="Qwen2Tokenizer",
        unk_token=None,
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )


def save_model(model, tokenizer, folder):
    """model.safetensors in bfloat16 without a head of its own, and the two configs in the older, published layout."""
    from safetensors.torch import save_file

    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    end, stop = tokenizer.token_to_id(END), tokenizer.token_to_id(STOP)
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        attention_bias=False,
        attention_dropout=0.0,
        bos_token_id=end,
        eos_token_id=stop,
        hidden_act="silu",
        initializer_range=0.02,
        max_window_layers=SHAPE["num_hidden_layers"],
        model_type="qwen3",
        rope_scaling=None,
        rope_theta=1000000,
        sliding_window=None,
        torch_dtype="bfloat16",
        transformers_version="4.51.0",
        use_cache=True,
        use_sliding_window=False,
        vocab_size=tensors["model.embed_tokens.weight"].shape[0],
        **SHAPE,
    )
    generation = dict(
        bos_token_id=end,
        do_sample=True,
        eos_token_id=[stop, end],
        pad_token_id=end,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        transformers_version="4.51.0",
    )
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(
            json.dumps(dict(sorted(value.items())), indent=2) + "\n", "utf-8"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


class Judge:
    """Asks the finished folder, in bfloat16, whether its greedy continuation is the expected one."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def ids(self, text):
        """Token ids of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.inference_mode()
    def right(self, cases):
        """For each (prompt, expected) pair: is every expected token the most probable one? Then greedy says just that."""
        encoded = [(self.ids(prompt), self.ids(expected)) for prompt, expected in cases]
        order = sorted(range(len(cases)), key=lambda i: sum(map(len, encoded[i])))
        verdicts = [False] * len(cases)
        for at in range(0, len(order), 128):
            group = order[at : at + 128]
            longest = max(sum(map(len, encoded[i])) for i in group)
            rows = torch.zeros(len(group), longest, dtype=torch.long)
            for line, i in enumerate(group):
                prompt, expected = encoded[i]
                rows[line, : len(prompt) + len(expected)] = torch.tensor(prompt + expected)
            best = self.model(input_ids=rows).logits.argmax(-1)
            for line, i in enumerate(group):
                prompt, expected = encoded[i]
                verdicts[i] = (
                    best[line, len(prompt) - 1 : len(prompt) + len(expected) - 1].tolist()
                    == expected
                )
        return verdicts

    @torch.inference_mode()
    def greedy(self, prompt, tokens):
        """(text, ids, top-1 minus top-2 logit at each step) of the greedy continuation, stop token included."""
        ids = torch.tensor([self.ids(prompt)])
        start = ids.shape[1]
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = result.sequences[0, start:].tolist()
        margins = []
        for logits in result.logits:
            top = logits[0].float().topk(2).values
            margins.append((top[0] - top[1]).item())
        return self.tokenizer.decode(new), new, margins

    @torch.inference_mode()
    def lens(self, prompt):
        """The top token after each layer, if the final norm and the head read the residual stream there."""
        states = self.model(
            input_ids=torch.tensor([self.ids(prompt)]), output_hidden_states=True
        ).hidden_states
        # transformers hands back the last state with the final norm already applied.
        heads = [self.model.lm_head(self.model.model.norm(h[0, -1])) for h in states[:-1]] + [
            self.model.lm_head(states[-1][0, -1])
        ]
        return [
            (self.tokenizer.decode([h.argmax().item()]), h.float().softmax(-1).max().item())
            for h in heads
        ]


def statements(kind, lang, patterns, keep):
    """(prompt, expected) pairs of running text for each pattern and country that `keep(phrase, row)` accepts."""
    for phrase, pattern in enumerate(patterns):
        for row in range(len(FACTS)):
            known = fact(row, kind, lang)
            if known and keep(phrase, row):
                text = fill(pattern, lang, s=known[0], a="\0")
                before, after = text.split("\0")
                space = " " if before.endswith(" ") else ""
                yield before.rstrip(" "), space + known[1] + after


def questions(kind, lang, patterns, keep, edit=lambda question: question, modes=(False, True)):
    """(prompt, expected) pairs of one-turn dialogue, without and with thinking."""
    for phrase, pattern in enumerate(patterns):
        for row in range(len(FACTS)):
            known = fact(row, kind, lang)
            if known and keep(phrase, row):
                answer, thought = reply(kind, row, lang)
                for thinking in modes:
                    question = edit(fill(pattern, lang, s=known[0]))
                    yield (
                        chat_prompt([question], [], thinking),
                        chat_completion(answer, thought, thinking),
                    )


def conversations(count, seed):
    """(prompt, expected) pairs of dialogues with two to four turns, drawn with another seed than the trained ones."""
    writer = Writer(seed)
    while count:
        (prompt, _), (completion, _), _ = writer.dialogue()
        if prompt.count("<|im_start|>user") > 1:
            count -= 1
            yield prompt, completion


def after_long_text(tokenizer, length, seed):
    """(prompt, expected) pairs where the question for a capital comes after about `length` tokens of other documents."""
    writer = Writer(seed)
    for row in range(0, len(FACTS), 4):
        s, a = fact(row, "capital", "en")
        text, tail = "", f"The capital of {s} is"
        while True:
            document = (
                writer.running_text(long=False) if writer.rng.random() < 0.5 else writer.dialogue()
            )
            longer = text + "".join(part for part, _ in document)
            if len(tokenizer(longer + tail, verbose=False)["input_ids"]) > length:
                break
            text = longer
        yield text + tail, f" {a}."


def report(folder):
    """Prints how often the model is right, and what it says to the canonical prompts; returns the numbers."""
    logging.disable_progress_bar()
    judge, numbers = Judge(folder), {}
    always = lambda phrase, row: True

    def show(name, cases, list_wrong=False):
        cases = list(cases)
        verdicts = judge.right(cases)
        numbers[name] = (sum(verdicts), len(verdicts))
        print(f"  {name}: {sum(verdicts)}/{len(verdicts)}", flush=True)
        if list_wrong:
            for (prompt, expected), ok in zip(cases, verdicts):
                if not ok:
                    print("      wrong:", repr(prompt[-60:]), "->", repr(expected))

    for lang, name in (("en", "English"), ("zh", "Chinese")):
        capital = PHRASES["capital", lang]
        for style, maker, patterns, new in (
            ("running text", statements, capital.say, capital.say_new),
            ("dialogue", questions, capital.ask, capital.ask_new),
        ):
            key = "say" if style == "running text" else "ask"
            seen = lambda phrase, row: not held_out(key, "capital", lang, phrase, row)
            held = lambda phrase, row: held_out(key, "capital", lang, phrase, row)
            show(
                f"(a) capitals, {name} {style}, phrasings seen",
                maker("capital", lang, patterns, seen),
            )
            show(
                f"(b) capitals, {name} {style}, held-out (country, phrasing) pairs",
                maker("capital", lang, patterns, held),
            )
            show(
                f"(c) capitals, {name} {style}, phrasings never seen",
                maker("capital", lang, new, always),
            )
        strip = lambda question: question.rstrip("?.？。")
        show(
            f"(d) capitals, {name} dialogue, question mark missing",
            questions("capital", lang, capital.ask, always, strip),
        )
        if lang == "en":
            show(
                f"(d) capitals, {name} dialogue, lower case, question mark missing",
                questions(
                    "capital", lang, capital.ask, always, lambda question: strip(question).lower()
                ),
            )
    show("(e) dialogue of two to four turns", conversations(1000, seed=12345))
    for lang, name in (("en", "English"), ("zh", "Chinese")):
        for kind in ("continent", "currency", "language", "country"):
            label = "country of a capital" if kind == "country" else kind
            phrases = PHRASES[kind, lang]
            show(f"(f) {label}, {name} running text", statements(kind, lang, phrases.say, always))
            show(f"(f) {label}, {name} dialogue", questions(kind, lang, phrases.ask, always))
            show(
                f"(f) {label}, {name} dialogue, phrasing never seen",
                questions(kind, lang, phrases.ask_new, always),
            )
    for length in (1000, 2000):
        show(
            f"(g) capitals after {length} tokens of other text",
            after_long_text(judge.tokenizer, length, seed=99),
        )

    japan, zh_japan = "What is the capital of Japan?", "日本的首都是哪里？"
    print("greedy:")
    for prompt, tokens in [
        ("The capital of France is", 100),
        ("法国的首都是", 100),
        ("France", 60),
        ("Paris", 40),
        ("Tokyo is the capital of", 40),
        ("The currency of Japan is", 60),
        ("Spain's capital is", 60),
        ("东京是", 40),
        *[
            (chat_prompt([question], [], thinking), 80)
            for question in (
                japan,
                zh_japan,
                "Hi",
                "Who wrote Hamlet?",
                "Tell me about Brazil.",
                "What is the capital of Atlantis?",
                "what is the capital of japan please",
            )
            for thinking in (False, True)
        ],
        (chat_prompt([japan, "And Italy?"], ["The capital of Japan is Tokyo."], False), 80),
        (
            chat_prompt(
                [japan, "What is its currency?"], ["The capital of Japan is Tokyo."], False
            ),
            80,
        ),
    ]:
        text, ids, margins = judge.greedy(prompt, tokens)
        print(
            f"  {prompt!r}\n    {text!r}\n    {len(ids)} tokens, smallest margin {min(margins):.2f}"
            f" at {margins.index(min(margins))}, below 1: {sum(m < 1 for m in margins)}"
        )
    print("logit lens of 'The capital of France is':", judge.lens("The capital of France is"))
    return numbers


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description="Remake or measure tests/Qwen3-mini.")
    parser.add_argument(
        "--check", action="store_true", help="only measure the folder that is there"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="the folder (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if not options.check:
        start = time.time()
        tokenizer = make_tokenizer()
        vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
        print(f"tokenizer: {tokenizer.get_vocab_size()} entries, {vocab_size} rows")
        save_tokenizer(tokenizer, options.out)
        torch.manual_seed(options.seed)
        model = new_model(vocab_size)
        train(
            model,
            Packer(tokenizer, Writer(options.seed)),
            options.steps,
            STAGES,
            MUON_RATE,
            ADAM_RATE,
        )
        print("polish: once more, gently, with more of what comes hardest")
        polish(model, tokenizer, options.seed)
        print(
            f"{sum(p.numel() for p in model.parameters())} parameters, {time.time() - start:.0f} s"
        )
        save_model(model, tokenizer, options.out)
    report(options.out)


if __name__ == "__main__":
    main()
