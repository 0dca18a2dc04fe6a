#!/usr/bin/env python3
"""Draws the pictures of the README from what the miniature model really computes, as SVG files in .github/.

    python tests/figures.py            draw all of them again (half a minute; cache.svg is a measurement, the rest repeats)
    python tests/figures.py lens rope  draw only these
    python tests/figures.py --check    exit code 1 if a picture is missing, or was drawn from another model

Every number in a picture comes from tests/Qwen3-mini through the functions of llm_inference.py; only cache.svg times a
model with random weights, because time does not depend on what the weights are. A picture brings its own background and
its colours for a light and for a dark page, loads nothing, and says in its last comment which model it was drawn from.
"""

import argparse
import contextlib
import hashlib
import math
import os
import re
import statistics
import subprocess
import sys
import textwrap
import time
import unicodedata
from html import escape
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import checkpoints
import mlx.core as mx

import llm_inference as llm

MINI, FOLDER = ROOT / "tests" / "Qwen3-mini", ROOT / ".github"
PROMPT = "The capital of France is"  # of all pictures but one
OPEN_PROMPTS = (
    "The",
    "What is",
    "Italy is",
)  # of sampling.svg: the first after which the miniature has a real choice
BY, TO = "\N{MULTIPLICATION SIGN}", "\N{RIGHTWARDS ARROW}"
COMMAND = "python -m examples.explain --model tests/Qwen3-mini --layer 3 --head 1"
WIDTH = 720  # units; with text of 15 units and more a phone can show it at half size

# ---- Drawing: a picture is a list of SVG elements; colours are names that the style sheet turns into light or dark ones.

STYLE = """
svg{--bg:#fbfaf6;--edge:#dcd9d0;--ink:#1d2733;--dim:#56616e;--line:#b9bfc8;--blue:#1f67b1;--orange:#b8540a;--teal:#14705f;
--soft:#e3edf8;--warm:#fbe8d6;--cool:#dcefe9;--heat:#6aa6e0;--screen:#171c24;--frame:#3a4452}
@media (prefers-color-scheme:dark){svg{--bg:#161b22;--edge:#343d49;--ink:#e7ebf0;--dim:#a3aebb;--line:#4a5563;--blue:#82b7f2;
--orange:#f2a65e;--teal:#63cbb2;--soft:#1f3147;--warm:#40301f;--cool:#1b3833;--heat:#2a6cb5;--screen:#0b0e13;--frame:#3a4452}}
text{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Noto Sans",sans-serif;
font-size:16px;fill:var(--ink)}
.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace;white-space:pre}
.head{font-size:18px;font-weight:600}.small{font-size:15px}.dim{fill:var(--dim)}.bold{font-weight:600}
.halo{paint-order:stroke;stroke:var(--bg);stroke-width:6px;stroke-linejoin:round}
.blue{fill:var(--blue)}.orange{fill:var(--orange)}.teal{fill:var(--teal)}
"""


class Picture:
    """Elements are added with the methods below; `write` puts them on a rounded panel and into a file."""

    def __init__(self, name, height, title, description, style=""):
        self.name, self.height, self.title, self.description = name, height, title, description
        self.style, self.parts = STYLE + style, []

    def add(self, element):
        self.parts.append(element)

    def text(self, x, y, content, classes="", anchor="start", extra=""):
        """One line of text; y is its baseline."""
        classes = f' class="{classes}"' if classes else ""
        anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.add(
            f'<text x="{number(x)}" y="{number(y)}"{classes}{anchor}{extra}>{escape(content, quote=False)}</text>'
        )

    def centre(self, x, y, content, classes="", extra=""):
        self.text(x, y, content, classes, "middle", extra)

    def right(self, x, y, content, classes="", extra=""):
        self.text(x, y, content, classes, "end", extra)

    def heading(self, content, y=36):
        self.centre(WIDTH / 2, y, content, "head")

    def box(self, x, y, width, height, fill="bg", stroke="line", radius=6, extra=""):
        """A rectangle; fill and stroke are colour names, or none."""
        self.add(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" rx="{radius}" '
            f'fill="{color(fill)}" stroke="{color(stroke)}"{extra}/>'
        )

    def cell(self, x, y, width, height, share):
        """A cell of a table, the more coloured the larger the share (0 to 1) it stands for."""
        self.box(x, y, width, height, "heat", "line", 4, f' fill-opacity="{share:.2f}"')

    def path(self, points, stroke="line", width=2, arrow=False, extra=""):
        """A line through points [(x, y), ...], with an arrowhead at its end if asked for."""
        data = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self.add(
            f'<path d="{data}" fill="none" stroke="{color(stroke)}" stroke-width="{width}" '
            f'stroke-linejoin="round"{extra}/>'
        )
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            angle, size = math.atan2(y - y0, x - x0), 4 + 2.5 * width
            wings = [
                (x - size * math.cos(angle + turn), y - size * math.sin(angle + turn))
                for turn in (-0.45, 0.45)
            ]
            head = "L".join(f"{number(a)} {number(b)}" for a, b in [(x, y), *wings])
            self.add(f'<path d="M{head}Z" fill="{color(stroke)}"/>')

    def dot(self, x, y, radius, fill="ink", stroke="none", extra=""):
        self.add(
            f'<circle cx="{number(x)}" cy="{number(y)}" r="{number(radius)}" fill="{color(fill)}" '
            f'stroke="{color(stroke)}"{extra}/>'
        )

    def label_box(self, x, y, width, height, content, fill="soft", stroke="blue", classes=""):
        """A box with one or more centred lines of text in it."""
        self.box(x, y, width, height, fill, stroke)
        lines = content.split("\n")
        for index, line in enumerate(lines):
            self.text(
                x + width / 2,
                y + height / 2 + 5.5 + 19 * (index - (len(lines) - 1) / 2),
                line,
                "small dim" if index else classes or "bold",
                "middle",
            )

    def axes(self, left, right, top, bottom, across, low, high, marks):
        """Grid and numbers of a chart, 0..across by round steps between low and high; returns (x, y) -> its place."""
        rounds = (factor * 10**power for power in range(-1, 9) for factor in (1, 2, 5))
        step = next(step for step in rounds if (high - low) / step <= 6)
        low, high = math.floor(low / step), math.ceil(high / step)

        def place(x, y):
            return left + (right - left) * x / across, bottom - (bottom - top) * (
                y / step - low
            ) / (high - low)

        for index in range(low, high + 1):
            y = place(0, index * step)[1]
            self.path([(left, y), (right, y)], "line", 1)
            self.right(
                left - 10, y + 5, f"{index * step:g}".replace("-", "\N{MINUS SIGN}"), "small dim"
            )
        for mark in range(0, across + 1, marks):
            self.centre(place(mark, 0)[0], bottom + 22, str(mark), "small dim")
        return place

    def write(self, background="bg"):
        """The file: title and description for those who listen, style, panel, elements, and the model's fingerprint."""
        text = "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {number(self.height)}" width="{WIDTH}" '
                f'height="{number(self.height)}" role="img" aria-labelledby="title desc">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="desc">{escape(self.description)}</desc>',
                f"<style>{self.style}</style>",
                f'<rect x="1" y="1" width="{WIDTH - 2}" height="{number(self.height - 2)}" rx="12" fill="{color(background)}" '
                f'stroke="{color("edge")}"/>',
                *self.parts,
                f"<!-- drawn by tests/figures.py from tests/Qwen3-mini/model.safetensors, sha256 {fingerprint()} -->",
                "</svg>",
                "",
            ]
        )
        ElementTree.fromstring(text)
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{self.name}.svg").write_text(text, "utf-8")


def number(value):
    """A coordinate without needless digits."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def color(name):
    return name if name == "none" or name.startswith("url") else f"var(--{name})"


def quoted(token):
    """A token as the pictures show it: in quotes, so that its leading space is seen."""
    return repr(token)


def typed(text):
    """Running text in typographic quotes."""
    return f"\N{LEFT DOUBLE QUOTATION MARK}{text}\N{RIGHT DOUBLE QUOTATION MARK}"


def fitted(text, room):
    """The attribute that squeezes a monospaced text into `room` units, where it needs more."""
    return (
        f' textLength="{number(room)}" lengthAdjust="spacingAndGlyphs"'
        if 9.7 * cells(text) > room
        else ""
    )


def percent(p):
    return f"{100 * p:.0f}%" if p >= 0.005 else "<1%" if p > 0 else "0%"


# ---- The model: loaded once per type; what attention and RoPE are given is recorded by standing in for them for a while.


def fingerprint():
    return hashlib.sha256((MINI / "model.safetensors").read_bytes()).hexdigest()


class Model:
    """The miniature with the text helpers that the pictures need. dtype None keeps the type of the files."""

    def __init__(self, dtype=None):
        self.weights, self.config, self.tokenizer = llm.load(MINI, dtype)
        llm.FUSED = False  # the spelled-out math, on every device
        self.layers = self.config["num_hidden_layers"]

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def token(self, token_id):
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def cache(self, size):
        return llm.make_cache(self.weights, self.config, size)

    def probabilities(self, ids):
        """For the token after `ids`; with a filled cache, as examples/explain.py does it: even the last digit agrees."""
        cache = self.cache(len(ids))
        mx.eval(llm.forward(ids, self.weights, self.config, cache, 0))
        logits = llm.forward(ids[-1:], self.weights, self.config, cache, len(ids) - 1)
        return mx.softmax(logits.astype(mx.float32))


@contextlib.contextmanager
def recorded(name):
    """While this lasts, each call of the function llm_inference.<name> leaves its arguments in the list it yields."""
    original, calls = getattr(llm, name), []

    def stand_in(*args):
        calls.append(args)
        return original(*args)

    setattr(llm, name, stand_in)
    try:
        yield calls
    finally:
        setattr(llm, name, original)


def attention_maps(model, ids):
    """One (H, L, L) array per layer: row i holds how much the token at i takes from each token up to itself."""
    with recorded("attention_weights") as calls:
        mx.eval(llm.forward(ids, model.weights, model.config, model.cache(len(ids)), 0))
    return [llm.attention_weights(q, k).tolist() for q, k in calls]


def telling_head(maps, tokens, target):
    """(layer, head), from 0: where the last token looks at `target`, preferring heads whose other rows differ, too."""
    column = tokens.index(target)

    def variety(rows):
        return sum(-p * math.log(p) for row in rows[1:-1] for p in row if p > 0) / (len(rows) - 2)

    return max(
        ((layer, head) for layer in range(len(maps)) for head in range(len(maps[layer]))),
        key=lambda place: (
            maps[place[0]][place[1]][-1][column] * (0.3 + variety(maps[place[0]][place[1]]))
        ),
    )


# ---- demo.svg


def captured():
    """What a terminal shows when the command runs: the lines of stdout and stderr in the order they come in."""
    import pty

    ours, theirs = pty.openpty()
    command = [sys.executable, *COMMAND.split()[1:]]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL
    )
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # Linux reports the end of the other side as an error
        while piece := os.read(ours, 65536):
            output += piece
    os.close(ours)
    if process.wait():
        raise RuntimeError(f"{COMMAND} failed:\n{output.decode()}")
    return output.decode().replace("\r\n", "\n").rstrip("\n").split("\n")


def cells(text):
    """The columns that a terminal needs for the text: two for a Chinese character."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


def demo():
    """A terminal: the command and what it prints, the answer's words lighting up one by one."""
    line_height, left, top = 23, 26, 78
    lines = captured()
    start = next(i for i, line in enumerate(lines) if line.startswith(PROMPT))
    answer = lines[start].removeprefix(PROMPT)
    head = lines[:start]
    columns = max(map(cells, ["$ " + COMMAND, *head]))
    advance = (WIDTH - 2 * left) / columns

    # As many whole sentences as fit into three lines; the rest of the answer is left out, and three dots say so.
    body = textwrap.wrap(PROMPT + answer, columns)
    if len(body) > 3:
        cut = " ".join(body[:3])
        body = textwrap.wrap((cut[: cut.rfind(". ") + 1] or cut) + " ...", columns)
    rows = 1 + len(head) + len(body)
    style = (
        f".mono{{font-size:{advance / 0.6:.1f}px;fill:#d5dbe3}}"
        + """
.mute{fill:#96a1af}.green{fill:#7fd49a}.sky{fill:#8cc0f5}.told{fill:#fff;font-weight:700}
@keyframes word{from{fill-opacity:.4}to{fill-opacity:1}}
.told{animation:word .15s both}@media (prefers-reduced-motion:reduce){.told{animation:none}}
"""
    )
    picture = Picture(
        "demo",
        top + rows * line_height + 14,
        "The program examples/explain.py in a terminal",
        f"A terminal. The command {COMMAND} prints the five tokens of '{PROMPT}', the likeliest next token "
        f"after each layer, the five likeliest next tokens, one head's attention weights, the size of the cache, and the answer: "
        f"{' '.join(body)}",
        style,
    )
    picture.path([(1, 42), (WIDTH - 1, 42)], "frame", 1)
    for index in range(3):
        picture.dot(26 + 20 * index, 22, 5.5, "frame")
    picture.add(
        f'<text x="{WIDTH / 2}" y="27" text-anchor="middle" class="mono mute small">Terminal</text>'
    )
    y = top

    def line(*spans):
        """One terminal line of (text, class) or (text, class, delay) pieces, as wide as its characters in any font."""
        nonlocal y
        spans = [(*span, None)[:3] for span in spans if span[0]]
        length = sum(cells(text) for text, *_ in spans)
        pieces = "".join(
            f'<tspan class="{kind}"'
            + (f' style="animation-delay:{delay:.2f}s"' if delay is not None else "")
            + f">{escape(text, quote=False)}</tspan>"
            for text, kind, delay in spans
        )
        if length:
            picture.add(
                f'<text xml:space="preserve" class="mono" x="{left}" y="{y}" '
                f'textLength="{number(length * advance)}">{pieces}</text>'
            )
        y += line_height

    line(("$ ", "mute"), (COMMAND, "green"))
    for text in head:
        bar = re.fullmatch(r"(.*% )(#*)( *)( .*)", text)
        if bar:
            line((bar[1], ""), (bar[2], "sky"), (bar[3], ""), (bar[4], ""))
        elif text.startswith("Prompt: "):
            line(("Prompt: ", "mute"), (text[8:], "green"))
        else:
            line((text, "mute" if not text.startswith("  ") or "bytes" in text else ""))
    delay, told = 1.0, 0
    for text in body:
        spans = []
        for piece in re.findall(r"\S+\s*", text):
            if told < len(PROMPT.split()):
                spans.append((piece, "green"))
            else:
                spans.append((piece, "told", delay))
                delay += 0.22
            told += 1
        line(*spans)
    picture.write("screen")


# ---- pipeline.svg


def pipeline(model):
    """From text to text: the residual stream is the straight line from top to bottom, all else hangs on it."""
    c, ids = model.config, model.encode(PROMPT)
    L, D, F, V, N = (
        len(ids),
        c["hidden_size"],
        c["intermediate_size"],
        c["vocab_size"],
        model.layers,
    )
    H, K, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    p = model.probabilities(ids)
    best = mx.argmax(p).item()
    picture = Picture(
        "pipeline",
        970,
        "The pipeline from text to the next token",
        f"'{PROMPT}' becomes {L} tokens, each token {D} numbers. These run down a straight line, the residual "
        f"stream, through {N} blocks. In each block attention, which reads the KV cache, and then SwiGLU add to "
        f"the stream. The head turns the last vector into {V} scores, sampling picks {quoted(model.token(best))}, "
        "and the new token goes round again.",
    )
    x, right = 206, 690  # the stream; the right edge of what hangs on it

    def shape(y, text):
        picture.right(x - 14, y, text, "small teal")

    # Text and tokens.
    picture.text(76, 42, "text", "dim")
    picture.text(x - 46, 42, typed(PROMPT), "head")
    picture.path([(x, 54), (x, 84)], "dim", 2, True)
    picture.text(x + 14, 74, "the tokenizer cuts it into known pieces", "small dim")
    edge = x - 46
    picture.text(76, 107, "tokens", "dim")
    picture.text(76, 136, "ids", "dim")
    for token_id in ids:
        name = quoted(model.token(token_id))
        width = 26 + 8.8 * len(name)
        picture.box(edge, 88, width, 56, "soft", "blue")
        picture.centre(edge + width / 2, 110, name, "mono small")
        picture.centre(edge + width / 2, 133, str(token_id), "mono small dim")
        edge += width + 6

    # Embedding, where the stream begins.
    picture.path([(x, 144), (x, 172)], "dim", 2, True)
    picture.path([(x, 210), (x, 762)], "blue", 7)
    picture.label_box(x - 62, 174, 124, 38, "embedding")
    picture.text(x + 76, 190, f"each id picks its row of {D} numbers", "small dim")
    picture.text(x + 76, 209, f"from a table of {V} rows", "small dim")
    shape(242, f"{L} {BY} {D}")

    # The block.
    picture.box(
        96,
        262,
        right - 96 + 12,
        410,
        "none",
        "line",
        12,
        ' stroke-width="2" stroke-dasharray="7 5"',
    )
    picture.right(right, 286, f"one block; there are {N}, one after the other", "small bold")
    picture.centre(
        x - 26, 472, "residual stream", "bold blue", f' transform="rotate(-90 {x - 26} 472)"'
    )

    def branch(y, name, sizes, plus):
        """Off the line into RMSNorm and the box beside it, and back onto the line at the plus."""
        picture.path([(x, y), (x + 48, y)], "blue", 2.5, True)
        picture.label_box(x + 50, y - 20, 106, 40, "RMSNorm", "bg", "dim")
        picture.path([(x + 156, y), (x + 180, y)], "blue", 2.5, True)
        picture.label_box(x + 182, y - 30, 132, 60, name, "warm", "orange")
        picture.path([(x + 248, y + 30), (x + 248, plus), (x + 16, plus)], "orange", 2.5, True)
        picture.dot(x, plus, 14, "bg", "blue", ' stroke-width="2.5"')
        picture.path([(x - 7, plus), (x + 7, plus)], "blue", 2.5)
        picture.path([(x, plus - 7), (x, plus + 7)], "blue", 2.5)
        picture.right(x + 236, plus - 14, sizes, "small teal")

    branch(334, "attention\nlooks back", f"{H} heads of {d} numbers", 424)
    branch(518, "SwiGLU\neach by itself", f"{D} {TO} {F} {TO} {D} numbers", 608)
    picture.box(x + 362, 304, 116, 60, "cool", "teal")
    picture.centre(x + 420, 330, "KV cache", "bold")
    picture.centre(x + 420, 350, "the past", "small dim")
    picture.path([(x + 314, 322), (x + 360, 322)], "teal", 2.5, True)
    picture.path([(x + 362, 346), (x + 316, 346)], "teal", 2.5, True)
    picture.centre(x + 420, 386, "of each token:", "small dim")
    picture.centre(x + 420, 405, f"{K} keys, {K} values", "small teal")
    picture.centre(x + 420, 424, f"of {d} numbers", "small teal")
    picture.right(right, 654, f"{L} {BY} {D} numbers go in, {L} {BY} {D} come out", "small teal")

    # Out of the stream.
    picture.text(x + 16, 724, "only the last token's vector goes on", "small dim")
    shape(724, f"1 {BY} {D}")
    picture.label_box(x - 62, 742, 124, 38, "RMSNorm", "bg", "dim")
    picture.path([(x, 780), (x, 802)], "dim", 2, True)
    picture.label_box(x - 62, 804, 124, 38, "head")
    picture.text(x + 76, 829, f"compares it with all {V} tokens", "small dim")
    picture.path([(x, 842), (x, 866)], "dim", 2, True)
    shape(860, f"{V} scores")
    picture.label_box(x - 62, 868, 124, 38, "sampling", "warm", "orange")
    picture.text(x + 76, 893, "scores become probabilities; one token is drawn", "small dim")
    picture.path([(x, 906), (x, 924)], "dim", 2, True)
    name = quoted(model.token(best))
    width = 30 + 9 * len(f"{name}  {best}")
    picture.box(x - width / 2, 926, width, 32, "soft", "blue")
    picture.centre(x, 947, f"{name}  {best}", "mono small")
    picture.text(x + width / 2 + 14, 947, f"probability {percent(p[best].item())}", "small dim")
    picture.path([(x - width / 2, 942), (44, 942), (44, 116), (x - 48, 116)], "orange", 2.5, True)
    picture.centre(
        32,
        540,
        "the new token is appended and goes round again",
        "small orange",
        ' transform="rotate(-90 32 540)"',
    )
    picture.write()


# ---- rope.svg


def rope(model):
    """Pairs of one real query, turned as RoPE turns them at positions 0 to 6, and what that does to the score."""
    ids, theta, d = model.encode(PROMPT), model.config["rope_theta"], model.config["head_dim"]
    tokens = [model.token(i) for i in ids]
    layer, head = telling_head(attention_maps(model, ids), tokens, " France")
    with recorded("apply_rope") as calls:
        mx.eval(llm.forward(ids, model.weights, model.config, model.cache(len(ids)), 0))
    group = model.config["num_attention_heads"] // model.config["num_key_value_heads"]
    heads = calls[layer][0]  # the queries of all heads, then the keys, before they are turned
    q = heads[head, -1]  # of " is": (d,)
    k = heads[model.config["num_attention_heads"] + head // group, tokens.index(" France")]

    def turned(x, position):
        return llm.apply_rope(x[None, None], position, theta)[0, 0]

    def score(m, n):
        return (turned(q, m) * turned(k, n)).sum().item() / math.sqrt(d)

    far, distances = 1000, list(range(61))
    curves = [[score(base + distance, base) for distance in distances] for base in (0, far)]
    assert max(abs(a - b) for a, b in zip(*curves)) < 1e-2, (
        "the score must depend on the distance alone"
    )

    slow, positions, radius = 3, range(7), 118
    picture = Picture(
        "rope",
        738,
        "RoPE turns pairs of numbers by an angle that grows with the position",
        f"Two circles show pairs of numbers of a real query at positions 0 to 6: numbers 0 and {d // 2} turn "
        f"by one radian a position, numbers {slow} and {slow + d // 2} by {theta ** (-2 * slow / d):.3f} radians. "
        f"Below, the score of query and key over their distance: the curve is the same for a key at position 0 "
        f"and one at {far}.",
    )
    picture.heading("The position turns each pair of numbers in a query")
    for pair, cx, name in ((0, 190, "fast"), (slow, 530, "slow")):
        cy, angle = 240, theta ** (-2 * pair / d)
        picture.centre(cx, 68, f"numbers {pair} and {pair + d // 2} of {d}: {name}", "bold")
        unit = "radian" if angle == 1 else "radians"
        picture.centre(
            cx,
            89,
            f"{angle:.3g} {unit} ({math.degrees(angle):.2g}\N{DEGREE SIGN}) a position",
            "small dim",
        )
        picture.dot(cx, cy, radius, "none", "line")
        picture.path([(cx - radius, cy), (cx + radius, cy)], "line", 1)
        picture.path([(cx, cy - radius), (cx, cy + radius)], "line", 1)
        for position in reversed(positions):
            vector = turned(q, position)
            a, b = vector[pair].item(), vector[pair + d // 2].item()
            length = math.hypot(a, b)
            ux, uy, first = a / length, -b / length, position == 0
            picture.path(
                [(cx, cy), (cx + ux * radius, cy + uy * radius)],
                "orange" if first else "blue",
                3 if first else 2,
                extra="" if first else f' opacity="{1 - 0.09 * position:.2f}"',
            )
            picture.dot(cx + ux * radius, cy + uy * radius, 5, "orange" if first else "blue")
            if pair == 0 or position in (0, positions[-1]):
                picture.text(
                    cx + ux * (radius + 17),
                    cy + uy * (radius + 17) + 5.5,
                    str(position),
                    "bold orange" if first else "blue",
                    "middle",
                )
    picture.centre(
        WIDTH / 2,
        402,
        "positions 0 to 6 of the same query: only the direction changes, never the length",
        "small dim",
    )

    # The score over the distance.
    left, right, top, bottom = 84, 690, 496, 668
    picture.heading("So the score of a query and a key knows only their distance", 450)
    picture.text(26, 480, "score", "small dim")
    place = picture.axes(
        left, right, top, bottom, distances[-1], min(curves[0]), max(curves[0]), 20
    )
    picture.centre(
        (left + right) / 2, bottom + 48, "distance: how many tokens the key is back", "small dim"
    )
    picture.path(
        [place(*point) for point in zip(distances, curves[0])], "orange", 7, extra=' opacity=".55"'
    )
    for distance, value in zip(distances, curves[1]):
        picture.dot(*place(distance, value), 3.4, "blue")
    picture.path([(left + 90, 475), (left + 122, 475)], "orange", 7, extra=' opacity=".55"')
    picture.text(left + 130, 480, "key at position 0", "small")
    for index in range(3):
        picture.dot(left + 304 + 12 * index, 475, 3.4, "blue")
    picture.text(left + 338, 480, f"key at position {far}: the same", "small")
    picture.write()


# ---- attention.svg, gqa.svg


def attention(model):
    """The attention weights of one head as a table; what causality forbids is hatched."""
    ids = model.encode(PROMPT)
    tokens, maps = [model.token(i) for i in ids], attention_maps(model, ids)
    layer, head = telling_head(maps, tokens, " France")
    rows, size = maps[layer][head], len(ids)
    left, top, width, height = 176, 132, 102, 62
    most = max(range(size), key=lambda column: rows[-1][column])
    picture = Picture(
        "attention",
        top + size * height + 66,
        "What each token takes from the tokens before it",
        f"A table of attention weights of layer {layer + 1}, head {head + 1}, for '{PROMPT}'. Each row adds up "
        "to 100%. The cells above the diagonal are hatched: no token sees later ones. "
        f"The last token, {quoted(tokens[-1])}, "
        f"takes {percent(rows[-1][most])} from {quoted(tokens[most])}.",
    )
    picture.add(
        f'<defs><pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path d="M0 0V8" stroke="{color("line")}" stroke-width="2"/></pattern></defs>'
    )
    picture.heading(
        f"Attention weights in layer {layer + 1} of {model.layers}, head {head + 1} of {len(maps[layer])}"
    )
    picture.centre(left + size * width / 2, 82, "takes this much from", "small dim")
    picture.right(left - 18, 118, "this token", "small dim")
    for i, token in enumerate(tokens):
        picture.centre(
            left + (i + 0.5) * width,
            top - 14,
            quoted(token),
            "mono",
            fitted(quoted(token), width - 8),
        )
        picture.right(left - 18, top + (i + 0.5) * height + 6, quoted(token), "mono")
        for j in range(size):
            x, y = left + j * width, top + i * height
            if j > i:
                picture.box(x + 2, y + 2, width - 4, height - 4, "url(#hatch)", "line", 4)
                continue
            picture.cell(x + 2, y + 2, width - 4, height - 4, rows[i][j])
            if i == size - 1 and j == most:
                picture.box(
                    x + 2, y + 2, width - 4, height - 4, "none", "orange", 4, ' stroke-width="3"'
                )
            picture.centre(
                x + width / 2,
                y + height / 2 + 6,
                percent(rows[i][j]),
                "bold" if rows[i][j] >= 0.5 else "",
            )
    y = top + size * height + 36
    picture.box(left + 2, y - 15, 26, 20, "url(#hatch)", "line", 4)
    picture.text(left + 38, y, "later tokens: never seen", "small dim")
    picture.right(left + size * width, y, "each row adds up to 100%", "small dim")
    picture.write()


def gqa(model):
    """Who shares keys and values with whom: MHA, GQA and MQA side by side."""
    H, K = model.config["num_attention_heads"], model.config["num_key_value_heads"]
    picture = Picture(
        "gqa",
        306,
        "Query heads share key/value heads",
        f"Three diagrams with {H} query heads each. Multi-head attention has {H} key/value heads, one per query "
        f"head. Grouped-query attention, which Qwen3 uses, has {K} here, each serving {H // K} query heads. "
        "Multi-query attention has one for all. Fewer key/value heads make the KV cache smaller.",
    )
    panel = WIDTH / 3
    kinds = ("MHA", "multi-head", H), ("GQA", "grouped-query", K), ("MQA", "multi-query", 1)
    for index, (name, long, heads) in enumerate(kinds):
        left, ours = 14 + index * (panel - 4), heads == K
        picture.box(
            left, 14, panel - 16, 278, "soft" if ours else "none", "blue" if ours else "line", 10
        )
        middle, step = left + (panel - 16) / 2, 50
        picture.centre(middle, 44, name + (" (Qwen3)" if ours else ""), "head")
        picture.centre(middle, 66, f"{long} attention", "small dim")
        group = H // heads
        tops = [middle + (i - (H - 1) / 2) * step for i in range(H)]
        lows = [sum(tops[i * group : (i + 1) * group]) / group for i in range(heads)]
        for i, x in enumerate(tops):
            picture.path([(x, 142), (lows[i // group], 184)], "dim", 2)
            picture.box(x - 19, 108, 38, 34, "warm", "orange", 6)
            picture.centre(x, 130, f"Q{i + 1}", "small bold")
        for i, x in enumerate(lows):
            picture.box(x - 22, 184, 44, 34, "cool", "teal", 6)
            picture.centre(x, 206, f"KV{i + 1}", "small bold")
        picture.centre(middle, 97, f"{H} query heads", "small dim")
        picture.centre(
            middle, 240, f"{heads} key/value head{'s' if heads > 1 else ''}", "small dim"
        )
        picture.centre(middle, 274, f"cache size: {percent(heads / H)}", "bold")
    picture.write()


# ---- lens.svg


def lens(model):
    """The logit lens: what each position would say next if the model ended after each layer."""
    ids = model.encode(PROMPT)
    cache = model.cache(len(ids))
    next(llm.generate(ids, model.weights, model.config, (), 1, cache=cache))
    left, top, width, height = 108, 128, 116, 56
    picture = Picture(
        "lens",
        top + model.layers * height + 76,
        "The logit lens: what the model would say after each layer",
        f"A table for '{PROMPT}' with one row per layer and one column per token. Each cell holds the likeliest "
        "next token if the model ended there, with more colour where it is surer. ",
    )
    picture.heading("What would come next if the model ended after this layer?")
    picture.right(left - 14, top - 18, "after", "small dim")
    picture.centre(left + len(ids) * width / 2, 74, "the text up to this token", "small dim")
    last = ""
    for i, token_id in enumerate(ids):
        picture.centre(
            left + (i + 0.5) * width, top - 18, quoted(model.token(token_id)), "mono bold"
        )
        for layer in range(model.layers):
            logits = llm.forward(
                [token_id], model.weights, model.config | {"num_hidden_layers": layer + 1}, cache, i
            )
            p = mx.softmax(logits.astype(mx.float32))
            best = mx.argmax(p).item()
            last, sure = quoted(model.token(best)), p[best].item()
            x, y = left + i * width, top + layer * height
            picture.cell(x + 2, y + 2, width - 4, height - 4, sure)
            picture.centre(x + width / 2, y + 24, last, "mono small bold", fitted(last, width - 12))
            picture.centre(x + width / 2, y + 44, percent(sure), "small")
    for layer in range(model.layers):
        picture.right(left - 14, top + (layer + 0.5) * height + 6, f"layer {layer + 1}")
    bottom = top + model.layers * height
    picture.box(
        left - 1,
        bottom - height - 1,
        len(ids) * width + 2,
        height + 2,
        "none",
        "orange",
        6,
        ' stroke-width="2.5"',
    )
    picture.right(left - 14, bottom + 32, "surer:", "small dim")
    for index in range(5):
        picture.cell(left + 2 + 52 * index, bottom + 17, 48, 22, index / 4)
        picture.centre(left + 26 + 52 * index, bottom + 57, f"{25 * index}%", "small dim")
    picture.right(
        left + len(ids) * width, bottom + 34, "framed: what the whole model says", "small orange"
    )
    picture.description += f"The last layer says {last} after the whole prompt."
    picture.write()


# ---- sampling.svg


def sampling(model):
    """One real distribution at three temperatures, and where top-k and top-p cut it."""
    top_k, top_p, shown = 5, 0.9, 9
    for prompt in OPEN_PROMPTS:
        ids = model.encode(prompt)
        logits = llm.forward(ids, model.weights, model.config, model.cache(len(ids)), 0).astype(
            mx.float32
        )
        order = mx.argsort(-logits)[:shown].tolist()
        columns = {T: mx.softmax(logits / T)[mx.array(order)].tolist() for T in (0.5, 1.0, 2.0)}
        nucleus = next(
            (count for count in range(1, shown) if sum(columns[1.0][:count]) >= top_p), shown
        )
        if columns[1.0][0] < 0.6 and nucleus not in (top_k, shown):
            break
    left, top, row, panel = 152, 146, 34, 184
    picture = Picture(
        "sampling",
        top + (shown + 1) * row + 62,
        "The same scores at three temperatures, and the cuts of top-k and top-p",
        f"Bars show how likely each next token is after '{prompt}' at temperature 0.5, 1 and 2: low sharpens, "
        f"high flattens. At temperature 1, top-k {top_k} keeps the first {top_k} tokens, top-p {top_p} the first "
        f"{nucleus}.",
    )
    picture.heading(f"What comes after {typed(prompt)}?")
    picture.centre(WIDTH / 2, 60, "the same scores at three temperatures", "small dim")
    most = max(max(*p, 1 - sum(p)) for p in columns.values())
    for index, token_id in enumerate(order):
        picture.right(
            left - 12, top + index * row + 22, quoted(model.token(token_id)), "mono small"
        )
    picture.right(left - 12, top + shown * row + 22, "all others", "small dim")
    for column, (T, p) in enumerate(columns.items()):
        x = left + column * (panel + 2)
        picture.text(x, 104, f"temperature {T:g}", "bold")
        picture.text(
            x, 125, {0.5: "sharper", 1.0: "as the model has it", 2.0: "flatter"}[T], "small dim"
        )
        picture.path([(x, top), (x, top + (shown + 1) * row)], "line", 1.5)
        for index, value in enumerate([*p, 1 - sum(p)]):
            length, y, rest = max((panel - 62) * value / most, 1), top + index * row, index == shown
            picture.box(x, y + 6, length, row - 12, "line" if rest else "blue", "none", 3)
            picture.text(x + length + 7, y + 22, percent(value), "small dim" if rest else "small")
    x = left + panel + 2
    for count, name, tone, shift in (
        (top_k, f"top-k {top_k}", "teal", 2),
        (nucleus, f"top-p {top_p}", "orange", -2),
    ):
        y = (
            top + count * row + (shift if top_k == nucleus else 0)
        )  # side by side where both cut at the same place
        picture.path([(x - 6, y), (x + panel - 12, y)], tone, 2.5, extra=' stroke-dasharray="6 4"')
        picture.right(x + panel - 14, y + (16 if shift > 0 else -6), name, f"small bold {tone}")
    picture.centre(
        WIDTH / 2,
        top + (shown + 1) * row + 38,
        "With top-k or top-p, no token below its dashed line can be drawn.",
        "small dim",
    )
    picture.write()


# ---- cache.svg


def measured(rounds=5):
    """{position: (with cache, without)}: seconds for the token at that position, medians over rounds that take turns.

    Without a cache the whole text is fed again for each token. The model is random and small, so that this takes seconds.
    On a CPU the process's own time is counted, which other programs on the machine hardly change.
    """
    cpu = mx.default_device().type == mx.cpu
    clock = time.process_time if cpu else time.perf_counter
    config = checkpoints.make_config(
        hidden_size=96, head_dim=24, num_hidden_layers=2, intermediate_size=288, vocab_size=512
    )
    llm.FUSED = not cpu
    weights, times = (
        checkpoints.random_weights(config),
        {position: ([], []) for position in (1, *range(100, 801, 100))},
    )
    cache = llm.make_cache(weights, config, max(times))

    def seconds(count, cache, offset):
        start = clock()
        mx.eval(llm.forward([5] * count, weights, config, cache, offset))
        return clock() - start

    for _ in range(rounds):
        for position, (cached, fresh) in times.items():
            cached += [seconds(1, cache, position - 1) for _ in range(20)]
            fresh.append(seconds(position, llm.make_cache(weights, config, position), 0))
    return {
        position: (statistics.median(cached), statistics.median(fresh))
        for position, (cached, fresh) in times.items()
    }


def cache():
    """Time per token with and without the KV cache, as multiples of the first token's time."""
    times = measured()
    first = times[1][0]
    positions = list(times)
    cached, fresh = ([times[position][kind] / first for position in positions] for kind in (0, 1))
    left, right, top, bottom = 92, 690, 92, 352
    picture = Picture(
        "cache",
        432,
        "Time per token with and without the KV cache",
        f"A measured curve. Without the cache the token at position {positions[-1]} takes {fresh[-1]:.0f} times "
        f"as long as the first one; with the cache {cached[-1]:.1f} times as long.",
    )

    picture.heading("Time for one more token")
    picture.text(22, 72, "times the first token\N{RIGHT SINGLE QUOTATION MARK}s time", "small dim")
    place = picture.axes(left, right, top, bottom, positions[-1], 0, max(fresh), 200)
    picture.centre(
        (left + right) / 2, bottom + 54, "position of the token in the text", "small dim"
    )
    for values, tone in ((fresh, "orange"), (cached, "blue")):
        points = [place(*point) for point in zip(positions, values)]
        picture.path(points, tone, 3)
        for point in points:
            picture.dot(*point, 4.5, tone)
    picture.right(
        place(430, 0)[0], place(0, fresh[5])[1] - 4, "without the cache", "halo bold orange"
    )
    picture.right(
        place(430, 0)[0],
        place(0, fresh[5])[1] + 16,
        "all tokens are computed again",
        "halo small dim",
    )
    picture.right(
        right,
        place(0, cached[-1])[1] - 32,
        f"with the cache: {cached[-1]:.1f} times at {positions[-1]}",
        "halo bold blue",
    )
    picture.right(
        right, place(0, cached[-1])[1] - 13, "only the new token is computed", "halo small dim"
    )
    picture.write()


# ---- Command line

# Name: (function, the type of the model that it is given: the files' own where the numbers stand in demo.svg, too).
PICTURES = {
    "demo": (demo, None),
    "pipeline": (pipeline, "own"),
    "rope": (rope, mx.float32),
    "attention": (attention, mx.float32),
    "gqa": (gqa, mx.float32),
    "lens": (lens, "own"),
    "sampling": (sampling, mx.float32),
    "cache": (cache, None),
}


def faults():
    """What is wrong with the pictures in .github/, one line each."""
    found, wanted = [], fingerprint()
    for name in PICTURES:
        path = FOLDER / f"{name}.svg"
        text = path.read_text("utf-8") if path.exists() else ""
        drawn_from = re.search(r"model\.safetensors, sha256 ([0-9a-f]{64}) -->", text)
        if not text:
            found.append(f"{path.name} is missing")
        elif not drawn_from or drawn_from[1] != wanted:
            found.append(f"{path.name} was drawn from another model")
        elif len(text.encode()) > 60_000:
            found.append(f"{path.name} has more than 60 kB")
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="pictures to draw; all of them if none is named", metavar="NAME"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="draw nothing; exit code 1 if a picture is missing or out of date",
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(PICTURES):
        parser.error(
            f"no such picture: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}"
        )
    if args.check:
        found = faults()
        print(
            "\n".join(
                [*found, "python tests/figures.py draws them again"]
                if found
                else ["The pictures are up to date"]
            )
        )
        return 1 if found else 0
    models = {}
    for name in args.names or PICTURES:
        draw, dtype = PICTURES[name]
        if dtype and dtype not in models:
            models[dtype] = Model(None if dtype == "own" else dtype)
        draw(*[models[dtype]] if dtype else [])
        print(FOLDER.name + f"/{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
