"""The page at /docs in a real browser, with a streamed answer of the real model."""

from __future__ import annotations

import re
import shutil

import pytest
from playwright.sync_api import sync_playwright

from tests.conformance.server import MODEL, base_url, serving

QUIET = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium here")
    with sync_playwright() as playwright:
        # it runs as root where tests run in a container, and what it shows is ours
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *QUIET])
        yield found
        found.close()


@pytest.fixture
def page(browser):
    page = browser.new_page()
    page.problems = []
    page.asked = []
    page.on("console", lambda message: page.problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    page.close()


def check_every_endpoint_and_object_is_shown(page):
    page.goto(f"{base_url()}/docs")
    page.wait_for_selector(".operation")
    document = page.evaluate("fetch('/openapi.json').then((answer) => answer.json())")
    ids = [entry["operationId"] for methods in document["paths"].values() for entry in methods.values()]
    assert page.locator(".operation").evaluate_all("all => all.map((one) => one.id)") == ids
    for name in document["components"]["schemas"]:
        assert page.locator(f"#object-{name}").count() == 1
    assert page.problems == []
    assert all(url.startswith(base_url()) for url in page.asked)


@pytest.mark.parametrize("endpoint", ["chat_completions", "completions", "responses", "messages"])
def check_a_streamed_answer(page, endpoint):
    page.goto(f"{base_url()}/docs#post_v1_{endpoint}")
    form = page.locator(f"#post_v1_{endpoint}")
    form.get_by_text("Try it").click()
    assert MODEL in form.locator("textarea").input_value()
    form.get_by_role("button", name="Send").click()
    form.locator(".status", has_text="ms").wait_for(timeout=120_000)
    assert form.locator(".status").text_content().startswith("200")
    assert form.locator("pre.text").text_content().strip()
    ends_with_done = endpoint.endswith("completions")
    assert form.locator("pre.raw").text_content().rstrip().endswith("data: [DONE]") == ends_with_done
    assert page.problems == []


def check_a_key_is_a_password(browser):
    with serving(MODEL, "--api-key", "sk-of-mine") as url:
        assert browser.new_page().request.get(f"{url}/docs").status == 401
        page = browser.new_page(http_credentials={"username": "anybody", "password": "sk-of-mine"})
        page.goto(f"{url}/docs#get_v1_models")
        form = page.locator("#get_v1_models")
        form.get_by_text("Try it").click()
        form.get_by_role("button", name="Send").click()
        form.locator(".status", has_text="ms").wait_for(timeout=120_000)
        assert form.locator(".status").text_content().startswith("200")
        assert MODEL in form.locator("pre.raw").text_content()


def check_an_answer_that_is_stopped(page):
    page.goto(f"{base_url()}/docs#post_v1_chat_completions")
    form = page.locator("#post_v1_chat_completions")
    form.get_by_text("Try it").click()
    body = '{"model": "%s", "messages": [{"role": "user", "content": "Count."}], "max_tokens": 4000, "ignore_eos": true, "stream": true}'
    form.locator("textarea").fill(body % MODEL)
    form.get_by_role("button", name="Send").click()
    form.locator("pre.text", has_text=re.compile(r"\S")).wait_for(timeout=120_000)
    form.get_by_role("button", name="Stop").click()
    form.locator(".status", has_text="stopped").wait_for()


def check_an_error(page):
    page.goto(f"{base_url()}/docs#post_v1_chat_completions")
    form = page.locator("#post_v1_chat_completions")
    form.get_by_text("Try it").click()
    form.locator("textarea").fill('{"model": "<img src=x onerror=alert(1)>", "messages": []}')
    form.get_by_role("button", name="Send").click()
    form.locator(".status", has_text="ms").wait_for(timeout=120_000)
    assert form.locator(".status").text_content().startswith("4")
    assert "invalid_request_error" in form.locator("pre.raw").text_content()
    assert page.locator("img").count() == 0
