"""The page at /docs: whole, offline, and nothing in it can be made to run."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest


class Page(HTMLParser):
    """What a browser would see of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids = set()
        self.addresses = []
        self.events = []
        self.inside = {}
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src", "action"):
                self.addresses.append(value)
            elif name == "style" or name.startswith("on"):
                self.events.append(name)
        self._open = [tag]

    def handle_data(self, data):
        for tag in self._open:
            self.inside[tag] = self.inside.get(tag, "") + data
        self._open = []


@pytest.fixture
async def answer(serving):
    async with serving() as server:
        return await server.ask("GET", "/docs")


async def test_nothing_comes_from_elsewhere(answer):
    page = Page(answer.body.decode())
    assert page.addresses and all(address in ("data:,", "/openapi.json") for address in page.addresses)
    assert not re.search(r"https?://|@import|url\(", answer.body.decode())
    assert page.events == []


async def test_the_policy_allows_this_style_and_script_alone(answer):
    page = Page(answer.body.decode())
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))

    def digest(text):
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == digest(page.inside["script"])
    assert policy["style-src"] == digest(page.inside["style"])
    assert "unsafe" not in answer.headers["content-security-policy"]


async def test_what_the_script_looks_for_is_there(answer):
    page = Page(answer.body.decode())
    wanted = set(re.findall(r'byId\("([^"]+)"\)', page.inside["script"]))
    assert wanted and wanted <= page.ids
    assert "innerHTML" not in page.inside["script"]


async def test_the_document_has_what_the_page_reads_from_it_by_name(serving):
    async with serving() as server:
        script = Page((await server.ask("GET", "/docs")).body.decode()).inside["script"]
        document = (await server.ask("GET", "/openapi.json")).json
    paths = re.findall(r"\bapi((?:\.[a-z]\w*)+(?:\.[A-Z]\w*)?)", script)
    assert any(path.startswith(".components.responses.") for path in paths)
    for path in paths:
        here = document
        for name in path.split(".")[1:]:
            if not isinstance(here, dict):
                break  # a method of what was found
            assert name in here, path
            here = here[name]
