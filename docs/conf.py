"""Settings of the documentation site; ``make docs`` builds it.

With INTERSPHINX=1 in the environment, names of Python, torch, torchrl, tensordict, gymnasium and
numpy become links to their documentation. That needs the network, so it is off by default.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

from sphinx.util.logging import getLogger

import torchrl_hts
from torchrl_hts.collector.stock_attributes import StockAttributes

sys.path.insert(0, str(Path(__file__).parent))
import house

_logger = getLogger(__name__)

project = "torchrl_hts"
author = "the authors of torchrl_hts"
copyright = author
version = release = torchrl_hts.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
default_role = "code"  # `name` in a docstring is code, and a link where a role says so
nitpicky = False

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
autodoc_type_aliases = {"npt.ArrayLike": "ArrayLike"}  # not the dozen types that it stands for
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

if os.environ.get("INTERSPHINX") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "torchrl": ("https://docs.pytorch.org/rl/stable", None),
        "tensordict": ("https://docs.pytorch.org/tensordict/stable", None),
        "gymnasium": ("https://gymnasium.farama.org", None),
        "numpy": ("https://numpy.org/doc/stable", None),
    }

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

highlight_language = "text"  # what has no language of its own is a command, or a drawing
pygments_dark_style = "github-dark"  # furo's own underlines modules, as if they were links

html_theme = "furo"
html_title = "torchrl_hts"
html_static_path = ["_static"]
html_css_files = ["site.css"]


def _link_pages(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Make links of the pages that a docstring names, such as docs/explanation/theory.md."""
    for number, line in enumerate(lines):
        lines[number] = re.sub(r"`{0,2}docs/([\w/]+)\.md`{0,2}", r":doc:`/\1`", line)


def _hide_private_bases(
    _app: Any, _name: str, _object: Any, _options: Any, bases: list[Any]
) -> None:
    """Name no class as a base that nobody can import by a public name."""
    bases[:] = [base for base in bases if base is not StockAttributes]


def _shorten_signature(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, signature: Any, returns: Any
) -> tuple[Any, Any] | None:
    """Leave out modules where Sphinx can't, since a default is `<factory>`."""
    if signature is None or "<factory>" not in signature:
        return None
    return re.sub(r"~(?:\w+\.)+", "", signature), returns


def _link_pictures(_app: Any, document: Any) -> None:
    """Let a click on a picture show it as large as it is: Sphinx does so where a width is given."""
    from docutils import nodes

    for image in document.findall(nodes.image):
        image["width"] = "100%"


def _keep_figures_together(_app: Any, document: Any) -> None:
    """Let no line end within a range, a date, or between a number and its per cent."""
    from docutils import nodes

    for text in [*document.findall(nodes.Text)]:
        if not isinstance(text.parent, nodes.literal | nodes.literal_block | nodes.doctest_block):
            whole = re.sub(r"(?<=\d)-(?=\d)", "-\N{WORD JOINER}", text.astext())
            whole = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", whole)
            text.parent.replace(text, nodes.Text(whole))


PUBLIC = ("", ".env_state", ".envs", ".errors", ".testing", ".theory", ".configs")


def _check_reference(_app: Any, environment: Any) -> None:
    """Warn of public names, and methods of theirs, that the reference leaves out."""
    told = environment.get_domain("py").objects
    for module in (import_module(f"torchrl_hts{suffix}") for suffix in PUBLIC):
        for name in module.__all__:
            value = getattr(module, name)
            owners = {"torchrl_hts", module.__name__, getattr(value, "__module__", "")}
            for path in (name, *(f"{name}.{method}" for method in _methods(value))):
                if not any(f"{owner}.{path}" in told for owner in owners):
                    _logger.warning("docs/reference/api.md leaves out %s.%s", module.__name__, path)


def _methods(value: Any) -> list[str]:
    """A class's own public methods and properties that have docstrings."""
    kinds = (FunctionType, classmethod, property)
    members = vars(value).items() if inspect.isclass(value) else ()
    return [
        name
        for name, member in members
        if isinstance(member, kinds) and not name.startswith("_") and member.__doc__
    ]


def _draw_packages(app: Any) -> None:
    """Draw them as they are now."""
    Path(app.srcdir, "_static", "house.svg").write_text(house.picture())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _link_pages)
    app.connect("autodoc-process-signature", _shorten_signature)
    app.connect("autodoc-process-bases", _hide_private_bases)
    app.connect("doctree-read", _link_pictures)
    app.connect("doctree-read", _keep_figures_together)
    app.connect("builder-inited", _draw_packages)
    app.connect("env-check-consistency", _check_reference)
