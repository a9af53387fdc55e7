"""The site of the pages: it builds without a warning, stands alone, and works in a browser."""

import html
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache, partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from test_docs import PAGES, README, ROOT, documented_names, name_of

pytest.importorskip("sphinx", reason="needs the extra docs")
ADDRESS = [name_of(page).removesuffix(".md") + ".html" for page in PAGES if page != README]
WIDTHS = (1280, 390)
#: Pages with what a theme has to colour: tables, code, formulas, signatures, figures.
COLOURED = ["docs/index", "docs/api/nero", "docs/guide/options", "docs/paper/mnist-deep", "source/src/nero/rule.py"]
MIN_CONTRAST = 4.5  # of WCAG 2, level AA
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
#: An address that a page or a style sheet loads by itself.
LOADED = re.compile(
    r'<(?:script|img|iframe|source)\b[^>]*\bsrc="(?:https?:)?//'
    r'|<link\b(?=[^>]*\brel="(?:stylesheet|preload|icon))[^>]*\bhref="(?:https?:)?//'
    r"|(?:@import|url\()\s*['\"]?(?:https?:)?//"
)
#: The words in tables that are on two lines. Code in the summaries of API pages may be.
BROKEN_WORDS = """
const broken = [];
for (const cell of document.querySelectorAll("article :is(td, th)")) {
  const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    if (walker.currentNode.parentElement.closest(".autosummary code")) continue;
    for (const word of walker.currentNode.data.matchAll(/[\\p{L}\\d]+/gu)) {
      const range = document.createRange();
      range.setStart(walker.currentNode, word.index);
      range.setEnd(walker.currentNode, word.index + word[0].length);
      if (range.getClientRects().length > 1) broken.push(word[0]);
    }
  }
}
return broken;
"""
#: The text on the page with the least contrast to the nearest background behind it.
LEAST_CONTRAST = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const linear = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
const behind = element => {
  for (; element; element = element.parentElement) {
    const colour = rgb(getComputedStyle(element).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.querySelector("article"), NodeFilter.SHOW_TEXT);
let least = [21, "nothing"];
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement, box = element.getBoundingClientRect();
  if (!walker.currentNode.data.trim() || !box.width || element.closest(".headerlink, .copybtn, script")) continue;
  const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))];
  const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (contrast < least[0]) least = [contrast, walker.currentNode.data.trim().slice(0, 40)];
}
return least;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, with warnings as errors: missing pages, links, anchors and names among them."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-c", "docs"]
    command += ["-d", str(folder / "doctrees"), ".", str(folder / "html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def plain(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", text))


class Links(HTMLParser):
    """The addresses in the tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Collect addresses."""
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def links_of(page: Path) -> list[str]:
    parser = Links()
    parser.feed(text_of(page))
    return parser.found


def test_site_has_every_page_and_name(site: Path):
    assert [page for page in ADDRESS if not (site / page).exists()] == []
    reference = "".join(text_of(path) for path in (site / "docs/api").glob("*.html"))
    assert [name for name in documented_names() if f'id="{name}"' not in reference] == []
    assert "lr=0.01" in plain(reference)


def test_api_pages_open_with_a_table_of_their_names(site: Path):
    for page in (ROOT / "docs/api").glob("*.md"):
        names = re.findall(r"^\.\. auto\w+:: (\S+)$", page.read_text(), re.MULTILINE)
        (table,) = re.findall(
            r'<table class="autosummary.*?</table>', text_of(site / f"docs/api/{page.stem}.html"), re.DOTALL
        )
        rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        assert [re.search(r'href="#([^"]+)"', row)[1] for row in rows] == names
        # Sphinx takes the full stop of an abbreviation for the end of the sentence
        assert [row for row in rows if plain(row).strip().endswith("Eq.")] == []


def test_sidebar_has_the_titles_of_the_pages(site: Path):
    entries = re.findall(r'<li class="toctree-l1.*?href="([^"#]+)">(.*?)</a>', text_of(site / "genindex.html"))
    assert len(entries) > 20
    for link, entry in entries:
        (title,) = re.findall(r"<h1>(.*?)<a class=\"headerlink", text_of(site / link))
        assert plain(entry) == plain(title)


def test_figures_link_to_their_files(site: Path):
    text = "".join(text_of(site / page) for page in ADDRESS)
    linked = re.findall(r'<a class="figure[^>]* href="([^"]+)"><img [^>]*src="([^"]+)"', text)
    assert len(linked) == text.count("<img ") > 20
    assert [pair for pair in linked if pair[0] != pair[1]] == []


def test_links_of_the_site_hold(site: Path):
    """Check links between built pages: those of the sidebar and to source files are not in the Markdown."""
    broken = []
    for page in site.rglob("*.html"):
        for link in links_of(page):
            parts = urlsplit(link)
            if parts.scheme or not (parts.path or parts.fragment):
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            is_there = target.exists() and (
                not parts.fragment or target.suffix != ".html" or f'id="{unquote(parts.fragment)}"' in text_of(target)
            )
            if not is_there:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


def test_site_loads_nothing_from_other_hosts(site: Path):
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert [str(path) for path in files if LOADED.search(text_of(path))] == []
    assert LOADED.search('<script async src="https://example.org/mathjax.js">')


def test_no_formula_or_check_box_is_left_raw(site: Path):
    assert text_of(site / "docs/theory.html").count("<math") > 30
    assert text_of(site / "CONTRIBUTING.html").count("task-list-item-checkbox") > 5
    raw = re.compile(r"\$\$|\[[ x]\]|\\(?:frac|lVert|leftarrow|operatorname|begin)\b")
    pages = [
        page for page in ADDRESS if raw.search(re.sub(r"<pre>.*?</pre>", "", text_of(site / page), flags=re.DOTALL))
    ]
    assert pages == []


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start Chromium, which logs its requests and the errors of pages."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no browser: install chromium and chromedriver (Debian: chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


def set_width(browser: Any, width: int) -> None:
    shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)


def requests_of(browser: Any) -> list[str]:
    """Return the addresses that the browser asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent if params["request"]["url"].startswith(("http", "ws"))]


@pytest.mark.browser
def test_pages_fit_and_load_in_a_browser(browser: Any, address: str):
    wrong = []
    for page in (*ADDRESS, "index.html", "genindex.html", "source/src/nero/rule.py.html"):
        set_width(browser, WIDTHS[0])
        browser.get(f"{address}/{page}")
        for width in WIDTHS:
            set_width(browser, width)
            root = "document.documentElement"
            needed, given = browser.execute_script(f"return [{root}.scrollWidth, {root}.clientWidth]")
            if needed > given:
                wrong.append(f"{page} is {needed} wide in a window of {width}")
            wrong += [f"{page} breaks {word} at {width}" for word in browser.execute_script(BROKEN_WORDS)]
        empty = "[...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
        flat = "[...document.querySelectorAll('math')].filter(each => !each.getBoundingClientRect().width).length"
        images, formulas = browser.execute_script(f"return [{empty}, {flat}]")
        wrong += [f"{page} does not load {image}" for image in images]
        wrong += [f"{page} has {formulas} formulas without a size"] if formulas else []
        wrong += [f"{page} logs {entry['message']}" for entry in browser.get_log("browser")]
        wrong += [f"{page} loads {url}" for url in requests_of(browser) if not url.startswith(address)]
    assert wrong == []


@pytest.mark.browser
@pytest.mark.parametrize(("page", "column"), [("docs/today/README", 1), ("docs/today/gpt", 2)])
def test_names_stay_in_sight_when_a_table_scrolls(browser: Any, address: str, page: str, column: int):
    set_width(browser, WIDTHS[-1])
    browser.get(f"{address}/{page}.html")
    moved, left = browser.execute_script(
        "const box = [...document.querySelectorAll('.table-wrapper')].find(box => box.scrollWidth > box.clientWidth);"
        "box.scrollLeft = 100;"
        "const name = box.querySelector(`td:nth-child(${arguments[0]})`);"
        "return [box.scrollLeft, name.getBoundingClientRect().left - box.getBoundingClientRect().left]",
        column,
    )
    assert moved == 100
    assert left == pytest.approx(0, abs=1)


@pytest.mark.browser
def test_search_finds_a_function(browser: Any, address: str):
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(f"{address}/search.html?q=balance_after_step")
    found = WebDriverWait(browser, 20).until(
        lambda browser: browser.execute_script(
            "return [...document.querySelectorAll('ul.search li a')].map(link => link.getAttribute('href'))"
        )
    )
    assert any(link.startswith("docs/api/nero.html") for link in found)
    assert any(link.startswith("docs/guide/constraints.html") for link in found)


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_figures_are_readable_in_the_theme(browser: Any, address: str, theme: str):
    set_width(browser, WIDTHS[0])
    for page in COLOURED:
        browser.get(f"{address}/{page}.html")
        browser.execute_script("document.body.dataset.theme = arguments[0]", theme)
        contrast, text = browser.execute_script(LEAST_CONTRAST)
        assert contrast >= MIN_CONTRAST, f"{page}: {text!r} has a contrast of {contrast:.2f}"
        cards = browser.execute_script(
            "return [...document.querySelectorAll('article img')].map(image => getComputedStyle(image).backgroundColor)"
        )
        assert set(cards) <= {"rgb(255, 255, 255)"}
    dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (theme == "dark")
