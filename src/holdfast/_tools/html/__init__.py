"""What the HTML pages of `holdfast inspect` and `holdfast report` share: one file each, which loads nothing
from elsewhere. What is shown goes into the page as JSON, and its script, the only one that the page lets run,
makes text nodes of it."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from pathlib import Path

from holdfast._core.base.values import Message

_HERE = Path(__file__).with_name("page")


def filled(data: Message, script: Path) -> str:
    """Return a page that shows `data`, which has a `title`, a `path` and the time `made`, by `page.js` and
    then this script."""
    code = _HERE.with_suffix(".js").read_text(encoding="utf-8") + script.read_text(encoding="utf-8")
    parts = {
        "title": html.escape(data["title"]),
        # With this escape nothing inside of the data can end its element.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": code,
        "hash": base64.b64encode(hashlib.sha256(code.encode()).digest()).decode(),
    }
    template = _HERE.with_suffix(".html").read_text(encoding="utf-8")
    return re.sub(r"\{(title|data|script|hash)\}", lambda found: parts[found[1]], template)
