"""The site of these pages, made by Sphinx: ``make docs`` builds it into out/site.

The sources are the Markdown files of the repository, which read as they are; the root of the repository is Sphinx's
source folder, so that links between them hold. The site loads nothing from other hosts: formulas become MathML, and
source files that a page links to become pages.
"""

import gc
import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

gc.disable()  # the build holds nearly all that it makes, and collecting takes an eighth of its time

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # the docstrings of this checkout
import nero  # noqa: E402

#: The sidebar: captions, and below each its pages, which give their titles.
NAVIGATION = {
    "Guide": [
        "docs/guide/getting-started",
        "docs/guide/choosing",
        "docs/guide/from-adamw",
        "docs/guide/recipes",
        "docs/guide/sharding",
        "docs/guide/fine-tuning",
        "docs/guide/precision-and-graphs",
        "docs/guide/watching",
        "docs/guide/jax",
        "docs/guide/options",
        "docs/guide/roles",
        "docs/guide/constraints",
        "docs/guide/auto",
        "docs/guide/experiments",
    ],
    "Results": [
        "docs/paper/README",
        "docs/today/README",
        "docs/studies/claims",
        "docs/studies/depth",
        "docs/studies/starts",
        "docs/theory",
        "docs/speed",
    ],
    "Reference": [
        "docs/api/nero",
        "docs/api/jax",
        "docs/api/theory",
        "docs/architecture",
        "docs/rulings",
        "CONTRIBUTING",
        "CODE_OF_CONDUCT",
        "SECURITY",
        "CHANGELOG",
    ],
}
#: Pages with a page for each task below them.
TASKS = {
    "docs/paper/README": [
        "claims",
        "mnist-deep",
        "mnist-reparameterised",
        "cifar10-vgg11",
        "cifar10-resnet18",
        "cifar10-ablation",
        "cifar10-granularity",
        "wikitext2",
        "translation",
        "pong",
        "cgan",
        "imagenet",
    ],
    "docs/today/README": ["gpt", "vit", "airbench"],
}
#: A link to a file or folder of the repository.
LINK = re.compile(r"\]\(([^)#\s:]+)\)")
#: A name that an API page documents.
DOCUMENTED = re.compile(r"^\.\. auto(?:class|function):: (\S+)$", re.MULTILINE)
#: A bar of a norm, which browsers would stretch to the height of its line.
NORM = re.compile(r'<mo(?: class="[^"]*")?>‖</mo>')
#: Files that a browser shows as a page; others, such as records, are downloads.
READABLE = (".py", ".toml", ".txt", "Makefile")

project = "Nero"
author = "the Nero contributors"
release = version = nero.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"]
exclude_patterns = [".*", "out", "build", "dist", "src", "tests", "results", "benchmarks", "examples"]
suppress_warnings = ["config.cache"]  # settings that are functions

myst_enable_extensions = ["dollarmath", "tasklist"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "source"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autosummary_generate = False  # tables alone: the names have their place on the pages
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 80
add_module_names = False
highlight_language = "text"  # of blocks without a language, such as trees
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!nero\.).*")]  # names of other libraries, which no inventory here has
nitpick_ignore = [("py:class", "nero.watching.reading.BatchResult")]  # internal, in the signature of Reading

html_theme = "furo"
html_title = f"Nero {release}"
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True

log = logging.getLogger(__name__)


def setup(app: Sphinx) -> None:
    """Connect the functions below."""
    app.connect("autodoc-process-docstring", clear_field)
    app.connect("source-read", add_navigation)
    app.connect("source-read", add_names)
    app.connect("source-read", mark_source_links)
    app.connect("doctree-resolved", resolve_source_links)
    app.connect("doctree-resolved", link_figures)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", add_front_door)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))


def clear_field(_app: Sphinx, _what: str, _name: str, _value: object, _options: object, lines: list[str]) -> None:
    """Drop Python's docstring of a field of a named tuple, which says nothing."""
    if lines and lines[0].startswith("Alias for field number"):
        lines.clear()


def add_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """Add the tables of contents to pages, so that their files are plain Markdown."""
    if name == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += toctree([f"/{page}" for page in pages], caption)
    if name in TASKS:
        source[0] += toctree(TASKS[name])


def toctree(entries: list[str], caption: str = "") -> str:
    """Return a hidden table of contents."""
    options = [":hidden:", f":caption: {caption}"] if caption else [":hidden:"]
    return "\n".join(["", "", "```{toctree}", *options, "", *entries, "```", ""])


def add_names(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Add a table of all names, with their first sentences, before the first heading of an API page."""
    if names := DOCUMENTED.findall(source[0]):
        lines = ["```{eval-rst}", ".. autosummary::", "   :nosignatures:", ""]
        lines += [*(f"   ~{name}" for name in names), "```"]
        source[0] = source[0].replace("\n## ", "\n" + "\n".join(lines) + "\n\n## ", 1)


def mark_source_links(_app: Sphinx, name: str, source: list[str]) -> None:
    """Turn a link such as ``../src/nero/rule.py`` into ``source:src/nero/rule.py``, by its place in the repository."""

    def marked(link: re.Match[str]) -> str:
        path = source_of(name, link[1])
        return f"](<source:{path}>)" if is_readable(path) else link[0]

    source[0] = LINK.sub(marked, source[0])


def source_of(name: str, link: str) -> str:
    """Return the path from the root of the repository that a link of a page means."""
    return os.path.normpath(Path(name).parent / link)


def is_readable(path: str) -> bool:
    """Return whether a path is a folder, or a file that a browser shows as a page."""
    return path.endswith(READABLE) or (ROOT / path).is_dir()


def resolve_source_links(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Point links to source files and folders to their pages."""
    for link in doctree.findall(nodes.reference):
        if link.get("refuri", "").startswith("source:"):
            path = link["refuri"].removeprefix("source:")
            if not (ROOT / path).exists():
                log.warning("link to %s, which does not exist", path, location=link)
            link["refuri"] = app.builder.get_relative_uri(name, f"source/{path}")
            link["internal"] = True


def link_figures(app: Sphinx, doctree: nodes.document, name: str) -> None:
    """Link each figure to its file, which a browser shows in full size."""
    for image in list(doctree.findall(nodes.image)):
        if app.builder.format == "html" and not isinstance(image.parent, nodes.reference):
            file = f"_images/{app.env.images[image['uri']][1]}"
            link = nodes.reference(refuri=relative_uri(app.builder.get_target_uri(name), file), classes=["figure"])
            image.replace_self(link)
            link += image


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, str], str]]:
    """Make a page for each source file and folder that a page links to, and for the folders inside."""
    linked = {
        source_of(name, link)
        for name in app.env.found_docs
        for link in LINK.findall(Path(app.env.doc2path(name)).read_text())
    }
    pages = {ROOT / path for path in linked if (ROOT / path).exists() and is_readable(path)}
    pages |= {inner for path in pages for inner in path.rglob("*") if inner.is_dir() and inner.name != "__pycache__"}
    for path in sorted(pages):
        title = html.escape(str(path.relative_to(ROOT)))
        if path.is_dir():
            body = listing(path, Path(app.outdir) / "source" / path.relative_to(ROOT))
        else:
            language = {".py": "python", ".toml": "toml", "": "make"}.get(path.suffix, "text")
            body = app.builder.highlighter.highlight_block(path.read_text(), language, linenos=False)
        yield f"source/{title}", {"title": title, "body": f"<h1>{title}</h1>{body}"}, "page.html"


def listing(folder: Path, copies: Path) -> str:
    """List what a folder holds, and copy its files beside the page."""
    copies.mkdir(parents=True, exist_ok=True)
    items = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__pycache__")):
            continue
        if path.is_file():
            shutil.copyfile(path, copies / path.name)
        target = f"{folder.name}/{path.name}{'.html' if path.is_dir() else ''}"
        items.append(f'<li><a href="{target}">{path.name}</a></li>')
    return f"<ul>{''.join(items)}</ul>"


def add_front_door(app: Sphinx, error: Exception | None) -> None:
    """Lead from the root of the site to its home page."""
    if error is None and app.builder.format == "html":
        head = f'<!doctype html><meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>'
        icon = '<link rel="icon" href="_static/icon.svg">'
        (Path(app.outdir) / "index.html").write_text(f'{head}{icon}<a href="{root_doc}.html">{project}</a>\n')


def visit_math(translator: nodes.NodeVisitor, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers draw without a script."""
    is_block = isinstance(node, nodes.math_block)
    try:
        formula = tex2mathml(node.astext(), as_block=is_block)
    except MathError as error:
        log.warning("formula: %s", error, location=node)
        formula = html.escape(node.astext())
    formula = NORM.sub('<mo stretchy="false">‖</mo>', formula)
    translator.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode
