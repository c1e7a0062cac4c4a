"""The trace page and its figure: what is written, and what a real browser makes of it.

    pytest tests/reset/test_trace_page.py

The tests marked `browser` need Chromium, see tests/conftest.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reset.trace import Trace, render_page, write_page
from reset.trace.figure import write_figure
from reset.trace.page import written_aside
from tests.reset.trace_sample import PROMPT, STEPS, sample_policy, sample_trace

HOSTILE = "</script><!--<script><img src=x onerror=document.body.dataset.owned=1>&lt;@style@"


def hostile_trace() -> Trace:
    """The sample with markup wherever the page shows a text."""
    base = sample_trace()
    first = replace(base.tokens[0], text=HOSTILE, alternatives=((HOSTILE, 0.5),), probability=0.5)
    return replace(
        base,
        model=HOSTILE,
        prompt=HOSTILE,
        policy=sample_policy(estimator=HOSTILE),
        tokens=(first, *base.tokens[1:]),
        versions={HOSTILE: HOSTILE},
    )


def first_tokens(count: int, **changes) -> Trace:
    base = sample_trace()
    return replace(base, tokens=base.tokens[:count], **changes)


def data_block(page: str) -> str:
    return re.search(r'id="trace-data">(.*?)</script>', page, re.DOTALL).group(1)


# ---- the file -----------------------------------------------------------------------------------


def test_sample_is_the_text_it_says():
    trace = sample_trace()
    assert "".join(token.text for token in trace.tokens) == "\n\n".join(text for _, text in STEPS)
    assert sum((n * n + n) % 12 == 0 for n in range(1, 101)) == 33
    assert trace.prompt == PROMPT
    assert trace.summary()["steps"] == len(STEPS)


@pytest.mark.parametrize("trace", [sample_trace(), hostile_trace()], ids=["sample", "hostile"])
def test_page_carries_the_whole_trace_as_inert_json(trace):
    block = data_block(render_page(trace))
    assert "<" not in block
    data = json.loads(block)
    assert Trace.from_dict(data["trace"]) == trace
    assert data["summary"] == trace.summary()
    assert data["step_means_nats"] == list(trace.step_means_nats())
    assert data["at_t_high"] == [token.temperature == 1.0 for token in trace.tokens]


def test_page_asks_for_nothing_outside_itself():
    page = render_page(sample_trace())
    markup = page.replace(data_block(page), "")
    assert "default-src 'none'" in markup
    assert not re.findall(r"@(style|script|trace-data)@", markup)
    links = re.findall(r"(?:\bsrc|\bhref|\bimport|\burl)\s*[=(]\s*[\"']?([^\"')\s>]*)", markup)
    assert links == ["data:,"]
    assert set(re.findall(r"https?://[^\"'\s]+", markup)) == {"http://www.w3.org/2000/svg"}
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write", markup)


def test_write_page_replaces_a_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "out.html"
    path.write_text("old")
    assert write_page(sample_trace(), path) == path
    assert path.read_text(encoding="utf-8") == render_page(sample_trace())
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "out.html"
    path.write_text("old")

    def fill_the_disk() -> None:
        with written_aside(path) as partial:
            partial.write_text("half of a page")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        fill_the_disk()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", [write_page, write_figure])
def test_a_path_that_cannot_be_written_is_named(write, tmp_path):
    with pytest.raises(ValueError, match=r"missing does not exist; create it first"):
        write(sample_trace(), tmp_path / "missing" / "out")
    with pytest.raises(ValueError, match="is a folder; pass the path of a file"):
        write(sample_trace(), tmp_path)


# ---- the figure ---------------------------------------------------------------------------------


def colors_of(path: Path) -> set[tuple[int, int, int]]:
    from matplotlib.image import imread

    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return set(map(tuple, pixels.reshape(-1, 3).tolist()))


@pytest.mark.parametrize("policy", ["reset", "fixed"])
def test_figure_shows_every_series(policy, tmp_path):
    trace = replace(sample_trace(policy=policy), model="a $model$_with {signs")
    path = write_figure(trace, tmp_path / "out.png")
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1650, 630)
    colors = colors_of(path)
    low, high, step, mean = (47, 120, 183), (194, 80, 10), (138, 63, 168), (15, 127, 107)
    assert {low, step, mean} <= colors
    assert (high in colors) is (policy == "reset")


def test_figure_of_an_empty_text_has_axes(tmp_path):
    assert len(colors_of(write_figure(first_tokens(0), tmp_path / "out.png"))) > 1


def test_figure_without_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'reset-decoding\[plot\]'"):
        write_figure(sample_trace(), tmp_path / "out.png")
    assert not list(tmp_path.iterdir())


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, reset.trace.figure; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- the browser --------------------------------------------------------------------------------

VOID_TAGS = {"br", "hr", "img", "input", "link", "meta"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()


@dataclass
class Page(HTMLParser):
    """The dumped document: every element with its attributes and all text inside it."""

    elements: list[Element] = field(default_factory=list)
    _open: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag, attrs):
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID_TAGS:
            self._open.append(element)

    def handle_endtag(self, tag):
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data):
        for element in self._open:
            element.text += data

    def of_class(self, name: str) -> list[Element]:
        return [element for element in self.elements if name in element.classes]

    def having(self, attribute: str, value: str | None = None) -> list[Element]:
        found = [element for element in self.elements if attribute in element.attributes]
        return [e for e in found if value is None or e.attributes[attribute] == value]

    def one(self, attribute: str, value: str | None = None) -> Element:
        (element,) = self.having(attribute, value)
        return element

    @property
    def body(self) -> Element:
        (body,) = [element for element in self.elements if element.tag == "body"]
        return body


@pytest.fixture
def browse(chromium, tmp_path):
    """Open a trace in headless Chromium; `probe` is a script that runs after the page's own."""

    def dump(trace: Trace, fragment: str = "", probe: str = "") -> Page:
        path = tmp_path / "trace.html"
        write_page(trace, path)
        if probe:
            page = path.read_text(encoding="utf-8")
            path.write_text(page.replace("</body>", f"<script>{probe}</script></body>"), "utf-8")
        command = [
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,1600"),
            *("--virtual-time-budget=5000", "--dump-dom", f"{path.as_uri()}{fragment}"),
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        document = Page()
        document.feed(run.stdout)
        assert document.body.attributes.get("data-ready") == "1", run.stdout[-2000:]
        return document

    return dump


@pytest.mark.browser
def test_browser_draws_text_chart_and_numbers(browse):
    trace = sample_trace()
    page = browse(trace, "#t=91")

    spans = page.having("data-position")
    words = [span for span in spans if "t" in span.classes]
    assert [span.text for span in words] == [token.text for token in trace.tokens]
    high = ["high" in span.classes for span in words]
    assert high == [trace.is_at_t_high(token) for token in trace.tokens]
    assert len(page.of_class("step")) == 8
    assert len(page.of_class("bordered")) == 7
    margins = [element.text for element in page.of_class("margin")]
    means = zip(margins, trace.step_means_nats(), strict=True)
    for number, (margin, mean) in enumerate(means, start=1):
        assert f"Step {number}" in margin
        assert f"mean {mean:.2f} nats" in margin

    bars = {"entropy-low": high.count(False), "entropy-high": high.count(True)}
    for name, count in bars.items():
        assert page.one("data-series", name).attributes["d"].count("M") == count
    for name in ("step", "mean", "threshold"):
        assert page.one("data-series", name).attributes["d"].count("H") == len(trace.tokens)
    assert page.one("data-part", "borders").attributes["d"].count("M") == 7
    labels = page.one("data-part", "labels").text
    assert "output position (tokens)" in labels
    assert "entropy (nats)" in labels

    (current,) = page.of_class("current")
    assert current.attributes["data-position"] == "91"
    token = trace.tokens[91]
    for name in ("entropy_nats", "step_entropy_nats", "mean_entropy_nats", "threshold_nats"):
        assert page.one("data-field", name).text == f"{getattr(token, name):.3f}"
    assert page.one("data-field", "temperature").text == f"{token.temperature:.1f}"
    inspector = page.one("id", "inspector").text
    assert f"id {token.token_id} · step {token.step + 1} of 8" in inspector
    for text, _ in token.alternatives:
        assert json.dumps(text, ensure_ascii=False) in inspector
    assert f"{100 * token.probability:.3g} %" in inspector


@pytest.mark.browser
def test_browser_keeps_two_digits_of_small_entropies(browse):
    """A model that is sure has means of 0.00003 nats, which are not 0.000."""
    base = sample_trace()
    names = ("entropy_nats", "step_entropy_nats", "mean_entropy_nats", "threshold_nats")
    small = [
        replace(token, **{name: getattr(token, name) * 1e-4 for name in names})
        for token in base.tokens
    ]
    trace = replace(base, tokens=tuple(small))
    page = browse(trace, "#t=91")
    for name in names[:3]:
        value, shown = getattr(trace.tokens[91], name), page.one("data-field", name).text
        assert float(shown) == pytest.approx(value, rel=0.06), name
    mean = re.search(r"[0-9.]+", page.of_class("margin")[3].text.partition("mean ")[2]).group()
    assert float(mean) == pytest.approx(trace.step_means_nats()[3], rel=0.06)


@pytest.mark.browser
def test_browser_treats_every_text_as_text(browse):
    page = browse(hostile_trace(), "#t=0")
    assert "data-owned" not in page.body.attributes
    assert not [element for element in page.elements if element.tag == "img"]
    assert len([e for e in page.elements if e.tag == "script"]) == 2
    (word,) = page.of_class("current")
    assert word.text == HOSTILE
    assert page.one("id", "model").text == HOSTILE
    assert page.one("id", "prompt").text.endswith(HOSTILE)
    assert page.one("id", "versions").text == f"{HOSTILE} {HOSTILE}"
    assert page.one("id", "inspector").text.count(json.dumps(HOSTILE)) == 2


@pytest.mark.browser
@pytest.mark.parametrize(
    ("policy", "position", "verdict", "why"),
    [
        ("reset", 60, "Ht {h} < τt 0.650: Tlow = 0.1", "Confident {confident}, so τt = τ0."),
        ("reset", 91, "Ht {h} ≥ τt {tau}: Thigh = 1.0", "Uncertain {uncertain}, so τt = Hstep."),
        ("threshold", 91, "Ht {h} ≥ τt 0.650: Thigh = 1.0", "The threshold is τ0 for every token."),
        ("sliding", 91, "Ht {h} ≥ τt {tau}: Thigh = 1.0", "The threshold is {window}."),
        ("relative", 60, "Ht {h} < τt {tau}: Tlow = 0.1", "The threshold is Hstep {every}."),
        ("uniform", 60, "Tlow = 0.1", "Confident {confident}, so every token gets Tlow."),
        ("uniform", 91, "Ht {h} ≥ τt {tau}: Thigh = 1.0", "Uncertain {uncertain}, so τt = Hstep."),
        ("fixed", 91, "Tt = 0.6", "One temperature {every}."),
    ],
)
def test_browser_says_why(browse, policy, position, verdict, why):
    trace = sample_trace(policy=policy)
    token = trace.tokens[position]
    h, tau = token.entropy_nats, token.threshold_nats
    step, mean = token.step_entropy_nats, token.mean_entropy_nats
    words = {
        "h": f"{h:.3f}",
        "tau": "" if tau is None else f"{tau:.3f}",
        "confident": f"step: Hstep {step:.3f} ≤ Hbar {mean:.3f}",
        "uncertain": f"step: Hstep {step:.3f} > Hbar {mean:.3f}",
        "window": "the mean of the last 12 entropies",
        "every": "for every token",
    }
    (shown,) = browse(trace, f"#t={position}").of_class("verdict")
    assert shown.text == (verdict + why).format(**words)


PROBE = """
const log = [], inspector = document.getElementById("inspector");
const steps = document.getElementById("steps"), chart = document.getElementById("chart");
const note = () =>
  log.push(inspector.classList.contains("idle") ? -1 : Number(inspector.dataset.position));
const over = (n, pointerType) => { document.querySelectorAll(".words .t")[n].dispatchEvent(
  new PointerEvent("pointerover", { bubbles: true, pointerType })); note(); };
const key = (name) => { document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", { key: name, bubbles: true })); note(); };
const at = (x) => { chart.dispatchEvent(new PointerEvent("pointermove",
  { clientX: chart.getBoundingClientRect().left + x })); note(); };
note();
over(5, "mouse"); over(6, "touch");
document.querySelectorAll(".words .t")[6].click(); note();
log.push(location.hash);
["ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "End", "ArrowRight", "Home"].map(key);
over(91, "mouse");
const x91 = Number(/^M([0-9.]+)/.exec(document.querySelector(".cursor").getAttribute("d"))[1]);
at(-50); at(5000); at(x91);
key("Escape");
document.body.dataset.log = JSON.stringify(log);
"""


@pytest.mark.browser
def test_browser_follows_mouse_touch_keys_and_chart(browse):
    trace = sample_trace()
    last = len(trace.tokens) - 1
    second_step = next(token.position for token in trace.tokens if token.step == 1)
    page = browse(trace, probe=PROBE)
    log = json.loads(page.body.attributes["data-log"])
    assert log[:5] == [-1, 5, 5, 6, "#t=6"]
    assert log[5:12] == [7, 6, second_step, 0, last, last, 0]
    assert log[12:] == [91, 0, last, 91, -1]


@pytest.mark.browser
def test_browser_shows_odd_tokens_and_near_numbers(browse):
    base = first_tokens(3)
    near = replace(base.tokens[0], entropy_nats=0.6499, threshold_nats=0.65, temperature=0.1)
    base = replace(base, tokens=(near, *base.tokens[1:]))
    texts = ("\ufffd", "", " a\n")
    tokens = tuple(replace(t, text=text) for t, text in zip(base.tokens, texts, strict=True))
    page = browse(replace(base, tokens=tokens), "#t=0")
    words = [span for span in page.having("data-position") if "t" in span.classes]
    assert [word.text for word in words] == list(texts)
    assert "partial" in words[0].classes
    assert "empty" in words[1].classes
    assert "part of a character" in page.one("id", "inspector").text
    assert page.of_class("verdict")[0].text.startswith("Ht 0.6499 < τt 0.6500: Tlow = 0.1")


@pytest.mark.browser
def test_browser_draws_an_empty_text(browse):
    page = browse(first_tokens(0, seconds=None, seed=None), "#t=0")
    assert page.one("id", "steps").text == "The model produced no token."
    assert not page.of_class("current")


@pytest.mark.browser
def test_browser_draws_a_long_text(browse):
    trace = sample_trace(repeat=31)
    assert len(trace.tokens) > 8000
    page = browse(trace, "#t=8000", probe="document.querySelectorAll('#zoom button')[2].click()")
    assert page.of_class("current")[0].attributes["data-position"] == "8000"
    assert page.one("data-series", "mean").attributes["d"].count("H") == 200
