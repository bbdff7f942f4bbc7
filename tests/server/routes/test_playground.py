"""The playground in a real browser, with a real server and a tiny model: what is typed, streamed, stopped and shown."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slipstream.models.decoder import Decoder
from slipstream.server.config import ServerConfig
from tests.server.routes.browsing import PHONE, answered, ask, chromium, connected, growing, opened
from tests.serving import Served, served

SAME = {"temperature": 0, "max_completion_tokens": 320}  # as the page's settings are when it opens


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def server(tiny: str) -> Iterator[Served]:
    with served(tiny, drafters=["suffix", "ngram"], max_num_seqs=8) as running:
        yield running


@pytest.fixture
def page(browser: Any, server: Served) -> Iterator[Any]:
    with opened(browser, server.url) as found:
        yield connected(found)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that take their time, so that there is something to stop."""
    forward: Callable[..., Any] = Decoder.forward

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.03)
        return forward(*args, **named)

    monkeypatch.setattr(Decoder, "forward", slowly)


def whole(server: Served, text: str, **more: Any) -> dict[str, Any]:
    """The answer as the API gives it."""
    body = {"messages": [{"role": "user", "content": text}], **SAME, "return_origins": True, "return_trees": True}
    found: dict[str, Any] = server.answer("/v1/chat/completions", {**body, **more})["choices"][0]
    return found


def test_what_is_typed_is_answered(page: Any, server: Served) -> None:
    """Enter sends, Shift+Enter breaks the line; each token has the colour of the drafter that made it."""
    prompt = page.locator("#prompt")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("The quick")
    prompt.press("Shift+Enter")
    page.keyboard.type("brown fox")
    prompt.press("Enter")
    assert answered(page) == whole(server, "The quick\nbrown fox")["message"]["content"]
    assert page.locator(".message.user").text_content() == "The quick\nbrown fox"
    assert prompt.input_value() == ""
    expected = whole(server, "The quick\nbrown fox")
    drafted = [origin for origin in expected["origins"] if origin]
    assert drafted, "a model that repeats itself, or the test shows nothing"
    coloured = page.locator(".token[data-origin]")
    assert 0 < coloured.count() <= len(drafted)  # tokens without text of their own are not drawn
    assert set(coloured.evaluate_all("all => all.map(one => one.dataset.origin)")) == set(drafted)
    steps = len(expected["trees"])
    assert page.locator(".step").count() == steps
    assert f"in {steps} steps" in page.locator("#counts").text_content()
    assert page.locator("#per-step").text_content() == f"{len(expected['origins']) / steps:.2f}"
    assert float(page.locator("#rate").text_content()) > 0
    assert "suffix" in page.locator("#legend").text_content()
    assert "Answer complete" in page.locator("#status").text_content()


def test_a_conversation_goes_on(page: Any, server: Served) -> None:
    ask(page, "One")
    first = answered(page)
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Two")
    assert json.loads(sent.value.post_data)["messages"] == [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "Two"},
    ]
    answered(page)
    page.locator("#fresh").click()
    assert page.locator(".message").count() == 0 and page.locator("#welcome").is_visible()


@pytest.mark.parametrize("how", ["key", "button"])
def test_it_streams_and_stops(page: Any, server: Served, slow: None, how: str) -> None:
    ask(page, "The quick brown fox")
    growing(page)
    shown = page.locator(".message.assistant .text").text_content()
    page.wait_for_function("n => document.querySelector('.text').textContent.length > n", arg=len(shown))
    assert page.locator("#stop").is_visible() and server.llm.under_way == 1
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.locator("#stop").click()
    page.wait_for_selector("text=Stopped.")
    server.until_idle()
    text = answered(page)
    expected = whole(server, "The quick brown fox")["message"]["content"]
    assert text and expected.startswith(text) and len(text) < len(expected)


def test_the_tree_of_a_step(page: Any, server: Served) -> None:
    """By pointer and by keyboard: what was drafted, what was accepted, and the model's own token."""
    ask(page, "The quick brown fox")
    answered(page)
    trees = whole(server, "The quick brown fox")["trees"]
    best = max(range(len(trees)), key=lambda i: len(trees[i]["accepted"]))
    tree = trees[best]
    step = page.locator(".step").nth(best)
    step.scroll_into_view_if_needed()
    step.hover()
    assert page.locator("#step-title").text_content() == f"Step {best + 1}"
    drafted, accepted = len(tree["tokens"]) - 1, len(tree["accepted"])
    assert page.locator("#step-facts").text_content() == f"{accepted} of {drafted} accepted"
    assert page.locator("#tree .node").count() == drafted + 2  # the root, and the model's own
    assert page.locator("#tree .node.accepted").count() == accepted
    assert page.locator("#tree .node.rejected").count() == drafted - accepted
    assert page.locator("#tree .edge").count() == drafted + 1
    first = page.locator("#tree .node.accepted title").first.text_content()
    assert first.startswith(json.dumps(tree["texts"][tree["accepted"][0]], ensure_ascii=False))

    step.click()  # chosen: pointing elsewhere changes nothing
    page.locator(".step:not(.shown):visible").first.hover()
    assert page.locator("#step-title").text_content() == f"Step {best + 1}"
    page.keyboard.press("ArrowLeft")
    assert page.locator("#step-title").text_content() == f"Step {best}"
    page.keyboard.press("End")
    assert page.locator("#step-title").text_content() == f"Step {len(trees)}"
    page.locator("#step-back").click()
    assert page.locator("#step-title").text_content() == f"Step {len(trees) - 1}"
    page.keyboard.press("Escape")
    page.locator(".step").nth(best).click()
    page.locator("#enlarge").click()
    assert page.locator("#large-tree .node").count() == drafted + 2


def test_the_race(page: Any, server: Served) -> None:
    page.locator("#mode-race").click()
    with page.expect_request(lambda r: '"speculate":false' in (r.post_data or "")):
        ask(page, "The quick brown fox")
    answered(page)
    expected = whole(server, "The quick brown fox")
    plain, drafted = page.locator(".lane .text").all_text_contents()
    assert plain == drafted == expected["message"]["content"]
    assert page.locator(".verdict").text_content() == f"Identical: all {len(expected['origins'])} tokens."
    clocks = [float(text.removesuffix(" s")) for text in page.locator(".clock").all_text_contents()]
    ratio = float(page.locator(".ratio").text_content().removesuffix("×"))
    assert all(clocks) and ratio == pytest.approx(clocks[0] / clocks[1], rel=0.2)
    assert page.locator(".lane").nth(0).locator(".token[data-origin]").count() == 0
    assert page.locator(".lane").nth(1).locator(".token[data-origin]").count() > 0


def test_a_race_is_stopped(page: Any, server: Served, slow: None) -> None:
    page.locator("#mode-race").click()
    ask(page, "The quick brown fox")
    growing(page)
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.")
    server.until_idle()


def test_texts_that_differ(page: Any) -> None:
    """Where arithmetic is not exact, the race says where the texts part, and how close the tokens were."""
    found = page.evaluate("""async () => {
        const { firstDifference, verdict } = await import("/playground/race.js");
        const tokens = (...ids) => ids.map((id) => ({ id, text: `t${id}` }));
        const told = (a, b, gap) => verdict(b.length, firstDifference(a, b), gap);
        return [
            told(tokens(1, 2, 3), tokens(1, 2, 3), null),
            told(tokens(1, 2, 3), tokens(1, 4, 3), 0.01234),
            told(tokens(1, 2), tokens(1, 2, 3), null),
        ];
    }""")
    assert found == [
        "Identical: all 3 tokens.",
        'The texts part at token 2: "t2" plain, "t4" drafted, 0.0123 nats apart.',
        'The texts part at token 3: its end plain, "t3" drafted.',
    ]


def test_the_gap_comes_from_the_server(page: Any, server: Served) -> None:
    ids = server.answer("/tokenize", {"prompt": "The quick brown"})["tokens"]
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 2, "return_token_ids": True}
    choice = server.answer("/v1/completions", body)["choices"][0]
    top = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
    scored = server.answer("/v1/completions", {**body, "prompt": [*ids, *choice["token_ids"]], "prompt_logprobs": 2})
    last = (scored.get("prompt_logprobs") or scored["choices"][0]["prompt_logprobs"])[-1]
    first, second = sorted(last, key=lambda id: last[id]["rank"])[:2]
    ask_gap = 'async ([model, ids, a, b]) => (await import("/playground/api.js")).gapInNats(model, ids, a, b)'
    name = server.service.config.names[0]
    assert page.evaluate(ask_gap, [name, ids, int(first), int(second)]) == pytest.approx(top[0] - top[1], abs=1e-4)
    assert page.evaluate(ask_gap, ["nobody", ids, 1, 2]) is None


def test_settings_are_sent(page: Any) -> None:
    page.locator("#drafter").select_option("ngram")
    page.locator("#temperature").fill("0.7")
    page.locator("#length").fill("32")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello")
    body = json.loads(sent.value.post_data)
    assert (body["speculate"], body["temperature"], body["max_completion_tokens"]) == ("ngram", 0.7, 32)
    assert isinstance(body["seed"], int), "an answer that can be had again"
    answered(page)
    page.locator("#drafter").select_option("none")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Hello")
    assert json.loads(sent.value.post_data)["speculate"] is False
    answered(page)


def test_where_the_policy_decides(browser: Any, tiny: str) -> None:
    """Its drafters can be chosen, trees can be limited, and each step has its reason."""
    with served(tiny, speculate="auto") as running, opened(browser, running.url) as page:
        connected(page)
        first, *parts, last = page.locator("#drafter option").all_text_contents()
        assert (first, last) == ("auto (default)", "none: plain decoding") and "suffix" in parts
        assert parts == [name for name in running.llm.drafters if name not in ("auto", "none")]
        page.locator("#nodes").fill("3")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "The quick brown fox")
        assert json.loads(sent.value.post_data)["speculate"] == "auto:max_nodes=3"
        answered(page)
        assert page.locator("#tree .node").count() <= 3 + 2
        # Whether it drafts, and so how many steps there are, depends on the clock; not that it says why.
        page.locator("#bars [data-step]").last.click()
        assert page.locator("#decision").text_content().startswith("Policy: ")
        page.locator("#drafter").select_option("suffix")
        assert page.locator("#nodes").is_disabled()
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "Hello")
        assert json.loads(sent.value.post_data)["speculate"] == "suffix"
        answered(page)


def test_an_error_of_the_server_is_shown(page: Any) -> None:
    ask(page, "word " * 600)  # longer than the tiny model's context
    answered(page)
    assert "512" in page.locator(".error").text_content()
    ask(page, "Hello")
    assert answered(page), "the refused message is not sent again"


def test_code_to_copy_runs(page: Any, server: Served) -> None:
    """Both programs, as they are copied, print what the page shows."""
    pytest.importorskip("openai")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.locator("#drafter").select_option("ngram")
    ask(page, 'It\'s "quoted"\nhere')
    text = answered(page)
    page.locator("#show-code").click()
    page.locator("#copy").click()
    page.wait_for_selector("text=Copied")
    curl = page.evaluate("navigator.clipboard.readText()")
    page.locator("#as-python").click()
    python = page.locator("#code-text").text_content()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python, {})
    assert printed.getvalue() == text
    run = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60, check=True)
    chunks = [json.loads(line[6:]) for line in run.stdout.splitlines() if line.startswith("data: {")]
    assert "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"]) == text


def test_a_connection_that_is_lost(page: Any, server: Served, slow: None) -> None:
    ask(page, "The quick brown fox")
    growing(page)
    for connection in list(server.server.server_state.connections):
        connection.transport.abort()
    page.wait_for_selector("text=The connection to the server was lost")
    server.until_idle()
    page.wait_for_selector(".dot.on")  # it is there again, and the page has found it
    page.get_by_role("button", name="Try again").click()
    growing(page)
    assert page.locator(".message").count() == 2, "the failed answer makes room"
    page.keyboard.press("Escape")
    answered(page)


def test_a_server_that_goes_away(browser: Any, tiny: str) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(served(tiny, drafters=["suffix"]))
        page = connected(stack.enter_context(opened(browser, running.url)))
        ask(page, "Hello")
        assert answered(page)
        running.server.should_exit = True
        while running.server.servers and any(one.is_serving() for one in running.server.servers):
            time.sleep(0.02)
        ask(page, "Are you there?")
        page.wait_for_selector(".error")
        page.wait_for_selector("#away:not([hidden])")
        assert "Trying again" in page.locator("#away").text_content()
        assert page.locator(".dot.on").count() == 0


def test_a_server_with_keys(browser: Any, tiny: str) -> None:
    config = ServerConfig(model=tiny, api_keys=("open sesame",))
    with served(tiny, config) as running, opened(browser, running.url) as page:
        page.wait_for_selector("#key")
        page.locator("#key").fill("wrong")
        page.locator("#key").press("Enter")
        assert page.locator(".dot.on").count() == 0
        page.locator("#key").fill("open sesame")
        page.locator("#key").press("Enter")
        connected(page)
        assert page.locator("#away").is_hidden()
        ask(page, "Hello")
        assert answered(page)
        page.locator("#show-code").click()
        assert "SLIPSTREAM_API_KEY" in page.locator("#code-text").text_content()
        assert "sesame" not in page.locator("#code-text").text_content()


def test_on_a_phone(browser: Any, server: Served) -> None:
    """Nothing is wider than 360 pixels, and a tap on a step shows its tree."""
    with opened(browser, server.url, viewport=PHONE, has_touch=True, is_mobile=True) as page:
        connected(page)
        wide = "document.documentElement.scrollWidth"
        assert page.evaluate(wide) <= PHONE["width"]
        assert page.locator("#panel").is_hidden()
        ask(page, "The quick brown fox")
        answered(page)
        page.locator(".step:visible").nth(2).tap()
        page.wait_for_selector("#panel.open")
        assert page.locator("#tree").is_visible()
        page.locator("#close-panel").tap()
        page.wait_for_selector("#panel", state="hidden")
        page.locator("#mode-race").tap()
        ask(page, "The quick brown fox")
        answered(page)
        assert page.locator(".ratio").is_visible() and page.evaluate(wide) <= PHONE["width"]


def test_light_and_dark(browser: Any, server: Served) -> None:
    def paper(page: Any) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return int(colour.removeprefix("rgb(").split(",")[0])

    with opened(browser, server.url, color_scheme="dark") as page:
        assert paper(page) < 60
        page.locator("#theme").click()
        assert paper(page) > 240
        page.reload()
        assert paper(page) > 240, "it is remembered"
    with opened(browser, server.url, color_scheme="light") as page:
        assert paper(page) > 240


def test_everything_has_a_name_and_is_reached_by_tab(page: Any) -> None:
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input, select, textarea")]
        .filter((one) => !one.hidden && !(one.ariaLabel || one.textContent.trim() || one.labels?.length))
        .map((one) => one.outerHTML)""")
    assert nameless == []
    ask(page, "The quick brown fox")
    answered(page)
    page.locator("#prompt").focus()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert reached[:2] == ["send", "show-code"]
    page.locator("#prompt").focus()
    page.keyboard.press("Shift+Tab")
    assert "step" in page.evaluate("document.activeElement.className"), "one step of an answer is in the tab order"


def test_text_is_spread_over_its_tokens(page: Any) -> None:
    """Half characters, special tokens and text that was held back lose nothing and get no wrong colour."""
    spread = """async ([text, known]) => {
        const { spread } = await import("/playground/trace.js");
        const tokens = known.map(() => ({ text: "" }));
        spread(text, tokens, known.map((one) => one ?? undefined));
        return tokens.map((token) => token.text);
    }"""
    cases = [
        ("The cat", ["The", " cat"], ["The", " cat"]),
        ("The cat sat", ["The", " cat", None], ["The", " cat", " sat"]),
        ("a 👍 b", ["a", "\\xf0\\x9f", "\\x91\\x8d", " b"], ["a", " 👍", "", " b"]),
        ("done", ["done", "<|im_end|>"], ["done", ""]),
        ("", [None], [""]),
        ("held and new", [" new"], ["held and new"]),
    ]
    for text, known, expected in cases:
        assert page.evaluate(spread, [text, known]) == expected


def test_files_and_headers(server: Served, tiny: str) -> None:
    response = server.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert server.http.get("/playground/app.js").headers["content-type"].startswith("text/javascript")
    for missing in ("/playground/nothing.js", "/playground/..%2f..%2fapp.py", "/playground/"):
        assert server.http.get(missing).status_code == 404
    with served(tiny, ServerConfig(model=tiny, playground=False)) as bare:
        assert bare.http.get("/").status_code == 404
