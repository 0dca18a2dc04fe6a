"""examples/explore.py in a real browser: type, hover, click, slide, step, keys, both languages,
narrow and dark.

Needs playwright and Debian's chromium. `python tests/reference_explore.py` draws
.github/explorer.png, the picture in the README.
"""

import json
import os
import shutil
import sys
import time

import httpx
import numpy as np
import pytest
from checkpoints import MINI
from terminal import ROOT, START

sys.path.append(str(ROOT))  # for the script; pytest's conftest.py does it, too
from test_explore import LONG, explored

import llm_inference as llm
from examples.common import encode

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium in PATH")
# Without the last ones it would ask for updates of its own.
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync"
PICTURE = ROOT / ".github/explorer.png"


@pytest.fixture(scope="module")
def site(model):
    with explored(*model, name="Qwen3-mini", seed=3) as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        yield launch(started)


def launch(started):
    """Without the OpenBLAS that .ci/run preloads: chromium ends with it."""
    outside = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return started.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split(), env=outside)


@pytest.fixture
def tab(browser, site):
    """Opens tabs. At the end none may have complained, or asked another site for something."""
    tabs = []
    trouble = []

    def opened(query="", width=1280, scheme="light"):
        size = {"width": width, "height": 900}
        page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda line: trouble.append(line.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda request: elsewhere(request.url))
        page.goto(f"{site}/{query}")
        tabs.append(page)
        wait(page)
        return page

    def elsewhere(url):
        if not url.startswith((site, "data:")):
            trouble.append(url)

    yield opened
    for page in tabs:
        page.context.close()
    expected = (
        "the server responded with a status of 400",  # how a browser logs what is refused
        "willReadFrequently",  # these tests read the canvas, the page does not
    )
    assert not [line for line in trouble if not any(part in line for part in expected)]


def wait(page):
    """Until a text is read and its next tokens are there."""
    page.wait_for_function("!document.getElementById('step').disabled")
    page.wait_for_function("document.querySelectorAll('.bar').length > 0")
    page.wait_for_function("document.querySelectorAll('#arcs path').length > 0")


def texts(page, selector):
    return page.locator(selector).all_text_contents()


def settled(page, selector, part):
    """The text of an element, when `part` is in it."""
    playwright.expect(page.locator(selector)).to_contain_text(part)
    return page.locator(selector).text_content()


def type_in(page, prompt):
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def slide_to_zero(page):
    """Greedy from here on."""
    page.focus("#temperature")
    page.keyboard.press("Home")


def step(page):
    count = page.locator(".chip").count()
    page.click("#step")
    playwright.expect(page.locator(".chip")).to_have_count(count + 1)
    wait(page)


def as_script(page, value):
    """JSON as a browser writes it: 1 where Python writes 1.0."""
    return page.evaluate("JSON.stringify", value)


def fields(page):
    return page.evaluate("settings()")


def test_type_and_read(tab, model):
    page = tab()
    ids = encode(START, model[2])
    assert texts(page, ".chip small") == [str(token_id) for token_id in ids]
    assert "".join(texts(page, ".chip > span")) == START.replace(" ", "·")
    assert texts(page, "#lens tbody tr:last-child td")[-1] == "·Paris"
    assert page.text_content("#model") == "Qwen3-mini"
    page.fill("#prompt", "Berlin is the capital of")
    page.press("#prompt", "Shift+Enter")
    assert page.input_value("#prompt").endswith("\n") and page.locator(".chip").count() == 5
    type_in(page, "Berlin is the capital of")
    settled(page, "#chips", "lin1004")
    wait(page)
    assert texts(page, "#lens tbody tr:last-child td")[-1] == "·Germany"
    assert "prompt=Berlin+is" in page.url
    page.reload()
    wait(page)
    assert page.input_value("#prompt") == "Berlin is the capital of"
    page.fill("#prompt", "Rome is")
    page.click("form button")
    settled(page, "#chips", "ome831")


def test_hover_over_the_lens(tab, site):
    """The three guesses of a cell are those of the server."""
    page = tab()
    answer = httpx.post(f"{site}/read", json={"prompt": START}).text.splitlines()
    for layer, at in (5, 4), (0, 1), (2, 3):
        page.locator(f"#lens tbody tr:nth-child({layer + 1}) td").nth(at).hover()
        guesses = json.loads(answer[1 + layer])["rows"][at]
        found = settled(page, "#lensInfo", f"layer {layer}")
        for guess in guesses:
            share = 100 * guess["share"]
            shown = f"{share:.2f} %" if share < 9.95 else f"{share:.1f} %"
            assert f"{guess['text'].replace(' ', '·')} {shown}" in found, (guess, found)


def test_click_a_token(tab):
    """It is marked in the chips and in the lens, and its lines begin there."""
    page = tab()
    before = page.inner_html("#arcs")
    page.locator(".chip").nth(3).click()
    pressed = [chip.get_attribute("aria-pressed") for chip in page.locator(".chip").all()]
    assert pressed == ["false"] * 3 + ["true", "false"]
    chosen = page.evaluate("[...document.querySelectorAll('td.chosen')].map(td => td.cellIndex)")
    assert chosen == [4] * 6
    assert page.inner_html("#arcs") != before
    page.locator("#lens tbody tr").nth(1).locator("td").nth(0).click()
    assert page.locator(".chip").nth(0).get_attribute("aria-pressed") == "true"


def test_a_head_is_picked(tab, site):
    """By list and by arrow keys; the shares under the pointer and the colours are the server's."""
    page = tab()
    page.select_option("#layer", "3")
    page.select_option("#head", "1")
    picked = {"text": fields(page)["text"], "layer": 3, "head": 1}
    rows = httpx.post(f"{site}/attention", json=picked).json()["rows"]
    page.wait_for_function("taken => JSON.stringify(rows) === taken", arg=as_script(page, rows))
    rows = np.array(rows)
    side, left = page.evaluate("[cell, gutter]")

    def pointed(row, column):
        at = {"x": left + 1 + (column + 0.5) * side, "y": 1 + (row + 0.5) * side}
        page.locator("#map").hover(position=at)
        x, y = at["x"] - side * 0.3, at["y"]
        colour = f"getContext('2d').getImageData({x}, {y}, 1, 1).data"
        colour = page.evaluate(f"Array.from(document.getElementById('map').{colour})")
        return page.text_content("#mapInfo"), np.array(colour[:3])

    told, strong = pointed(4, 3)
    assert f"·is takes {100 * rows[4, 3]:.1f} % from ·France" == told and rows[4, 3] > 0.9
    _, weak = pointed(4, 1)
    assert rows[4, 1] < 0.1 and strong.sum() < weak.sum() - 100
    assert pointed(1, 4)[0] == ""  # later: hatched, nothing to tell
    page.focus("#map")
    for key, wanted in ("ArrowUp", "21"), ("ArrowRight", "22"), ("ArrowDown", "32"):
        page.keyboard.press(key)
        assert page.input_value("#layer") + page.input_value("#head") == wanted
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#head") == "0"  # around
    picked |= {"layer": 3, "head": 0}
    again = httpx.post(f"{site}/attention", json=picked).json()["rows"]
    page.wait_for_function("taken => JSON.stringify(rows) === taken", arg=as_script(page, again))
    assert not np.allclose(again, rows)


def test_what_was_asked_of_another_text_is_not_drawn(tab):
    """The answers of /attention and /next, when a new text begins meanwhile."""
    page = tab()
    begun = {"text": "x", "tokens": [{"id": 1, "text": "a"}], "layers": 6, "heads": 4}
    drawn = page.evaluate(
        """async begun => {
          const late = [look(), predict()];
          receive(begun);
          await Promise.all(late);
          return [rows.length, document.querySelectorAll(".bar").length];
        }""",
        begun | {"cache_bytes": 1},
    )
    assert drawn == [0, 0]


def test_slide(tab, site):
    """Temperature, top-k and top-p by keys and mouse: which tokens survive is the server's word."""
    page = tab()
    assert "2,112 of 2,112" in page.text_content("#survivors")
    page.focus("#topK")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    settled(page, "#survivors", "3 of 2,112 tokens")
    assert texts(page, ".bar.out .word") == texts(page, ".bar .word")[3:]
    page.focus("#temperature")
    page.keyboard.press("End")
    assert fields(page)["temperature"] == 2
    box = page.locator("#topP").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    assert 0.4 < fields(page)["top_p"] < 0.8
    answer = httpx.post(f"{site}/next", json=fields(page)).json()
    settled(page, "#survivors", f"{answer['survivors']} of 2,112")
    left = [100 * candidate["left"] for candidate in answer["candidates"]]
    shown = [float(text.removesuffix(" %")) for text in texts(page, ".bar .share")]
    assert np.allclose(shown[: answer["survivors"]], left[: answer["survivors"]], atol=0.06)
    slide_to_zero(page)
    settled(page, "#survivors", "1 of 2,112 tokens")
    assert texts(page, ".bar:not(.out) .word") == ["·Paris"]


def test_step(tab, model):
    """The tokens are generate's; the lens has a column more, the cache a row more."""
    page = tab()
    slide_to_zero(page)
    for _ in range(6):
        step(page)
    weights, config, tokenizer = model
    ids = encode(START, tokenizer)
    wanted = list(llm.generate(ids, weights, config, (), max_tokens=6))
    assert texts(page, ".chip.drawn small") == [str(token_id) for token_id in wanted]
    assert page.locator("#lens thead th").count() == 12
    assert page.locator("#lens td").count() == 6 * 11
    each = 2 * 6 * 2 * 32 * 4
    cache = page.text_content("#cache")
    assert cache == f"KV cache: 11 tokens × {each:,} bytes = {11 * each:,} bytes"
    assert len(page.evaluate("rows")) == 11


def test_the_end_of_a_text(tab):
    page = tab()
    question = "<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n"
    type_in(page, question + "<|im_start|>assistant\n")
    settled(page, "#chips", "assistant")
    wait(page)
    slide_to_zero(page)
    for _ in range(40):
        page.click("#step")
        page.wait_for_load_state("networkidle")
        page.wait_for_function("!document.getElementById('step').disabled")
        if "ends its text" in page.text_content("#status"):
            break
    assert "<|im_end|>" in page.text_content("#status")
    assert page.locator(".chip").last.text_content().startswith(".")


def test_both_languages(tab):
    """Every word of the page is there in both, and a link opens in either one."""
    page = tab()
    english = set(texts(page, "[data-text]"))
    keys = "Object.keys(words.{}).sort().join()"
    assert page.evaluate(keys.format("en")) == page.evaluate(keys.format("zh"))
    page.click("#language")
    assert page.text_content("h1") == "模型内部" == page.title()
    assert "lang=zh" in page.url and page.locator("html").get_attribute("lang") == "zh-CN"
    chinese = set(texts(page, "[data-text]"))
    assert english & chinese == {"Top-p"} and all(chinese)
    assert "还有 2,112 个" in page.text_content("#survivors")
    page.reload()
    wait(page)
    assert page.text_content("h1") == "模型内部"
    page.click("#language")
    assert set(texts(page, "[data-text]")) == english
    page = tab("?prompt=法国的首都是&lang=zh")
    assert "".join(texts(page, ".chip > span")) == "法国的首都是"
    assert texts(page, "#lens tbody tr:last-child td")[-1] == "巴"
    page.locator("#lens td").last.hover()
    settled(page, "#lensInfo", "第 5 层")


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const light = colour => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const of = (front, back) => {
    const [a, b] = [light(probe(front)), light(probe(back))].sort((a, b) => b - a);
    return (a + 0.05) / (b + 0.05);
  };
  return [of("--ink", "--card"), of("--faint", "--card"), of("--faint", "--paper"),
          of("--on-accent", "--accent"), of("--accent", "--paper")];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 768, 1280])
def test_width_and_colours(tab, width, scheme):
    """Nothing sticks out sideways, texts have the contrast of WCAG AA (4.5), dark is dark."""
    page = tab("?prompt=" + LONG * 6, width, scheme)
    inner, outer = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert inner <= outer == width
    assert min(page.evaluate(CONTRAST)) >= 4.5
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, background[4:-1].split(",")))
    assert brightness < 120 if scheme == "dark" else brightness > 700
    page.locator(".chip").nth(2).click()  # and can be used there
    page.locator("#step").click()
    playwright.expect(page.locator(".chip.drawn")).to_have_count(1)


@pytest.mark.parametrize(
    "prompt", ["<script>window.hit = 1</script>", "<img src=x onerror='window.hit = 1'>&lt;b>"]
)
def test_a_prompt_is_text(tab, prompt):
    page = tab()
    type_in(page, prompt)
    settled(page, "#chips", ">")
    wait(page)
    page.locator("#lens td").nth(1).hover()
    page.locator("#map").hover(position={"x": 100, "y": 10})
    slide_to_zero(page)
    for _ in range(3):
        step(page)
    assert "".join(texts(page, ".chip:not(.drawn) > span")) == prompt.replace(" ", "·")
    assert page.evaluate("window.hit") is None
    assert page.locator("main img, main script, main b:has(*)").count() == 0


def test_what_is_refused_is_said_in_the_page(tab):
    page = tab()
    type_in(page, LONG * 40)
    assert "1 to 200 can be shown" in settled(page, "#status.error", "tokens")
    type_in(page, "Rome is")
    settled(page, "#status:not(.error)", "3 tokens")
    page.evaluate("text.name = 'forgotten'")
    page.click("#step")
    settled(page, "#status.error", "read it again")


def test_keys_alone(tab):
    """Tab goes through all that can be used, what has the focus is seen, arrows move in a row."""
    page = tab()
    met = []
    for _ in range(12):
        page.keyboard.press("Tab")
        active = "document.activeElement"
        met.append(page.evaluate(f"{active}.id || {active}.className || {active}.type"))
        assert page.evaluate(f"getComputedStyle({active}).outlineStyle") == "solid", met
        if met[-1] == "step":
            break
    chip = "chip mono"
    assert met[:3] == ["language", "prompt", "main"] and met[3] == chip
    assert met[4:] == ["layer", "head", "map", "temperature", "topK", "topP", "step"]
    page.locator(".chip").nth(4).focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(
        "[chosen, [...document.activeElement.parentElement.children].indexOf("
        "document.activeElement)]"
    ) == [1, 1]


def test_two_tabs(tab):
    one = tab()
    two = tab("?prompt=Berlin is the capital of")
    for page in one, two:
        slide_to_zero(page)
    for page in one, two, one, two:
        step(page)
    assert "".join(texts(one, ".chip > span")) == (START + " Paris.").replace(" ", "·")
    assert "".join(texts(two, ".chip > span")) == "Berlin·is·the·capital·of·Germany."


def test_200_tokens_are_shown_within_a_second(tab, model):
    """From the key to the last layer's guesses and the map. Only thrice the time is a failure."""
    page = tab()
    weights, config, tokenizer = model
    prompt = tokenizer.decode(encode(LONG * 40, tokenizer)[:200])
    taken = []
    for _ in range(3):
        page.fill("#prompt", "Rome is")
        page.press("#prompt", "Enter")
        settled(page, "#status", "3 tokens")
        page.fill("#prompt", prompt)
        start = time.perf_counter()
        page.press("#prompt", "Enter")
        page.wait_for_function("text.tokens.length === 200 && rows.length === 200")
        taken.append(time.perf_counter() - start)
    print(f"\n200 tokens are shown after {min(taken):.2f} s (target 1)")
    assert min(taken) < 3


def test_a_program_that_has_ended_is_said(browser, model):
    with explored(*model) as address:
        page = browser.new_page()
        page.goto(address)
        wait(page)
    page.click("#step")
    settled(page, "#status.error", "Is it still running?")
    page.close()


def draw_picture():
    """The page as it opens, with a head that looks at the country; 1,160 pixels, light."""
    with (
        explored(*llm.load(MINI), name="Qwen3-mini") as address,
        playwright.sync_playwright() as started,
    ):
        page = launch(started).new_page(viewport={"width": 1160, "height": 800})
        page.goto(address)
        wait(page)
        page.select_option("#layer", "3")
        page.select_option("#head", "1")
        page.wait_for_load_state("networkidle")
        page.locator("#lens td").last.hover()
        page.screenshot(path=PICTURE, full_page=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    sys.exit(draw_picture())
