"""Settings of the documentation site; ``make docs`` builds it."""

from __future__ import annotations

import torchrl_hts

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
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "torchrl_hts"
html_static_path = ["_static"]
html_css_files = ["site.css"]
