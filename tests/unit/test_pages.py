"""The HTTP port of a worker: whoever looks at a page gets it, whatever other pages and other clients do."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest

from eventbus.errors import ConfigurationError
from eventbus.plugins import Answer, Page
from eventbus.runtime import pages as pages_module
from eventbus.runtime.pages import PageServer
from tests.waiting import wait_until


@dataclass(frozen=True)
class Reply:
    status: int
    body: str
    headers: Mapping[str, str]


def ask(port: int, path: str, method: str = "GET", timeout: float = 10.0, host: str = "127.0.0.1") -> Reply:
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return Reply(response.status, response.read().decode(), dict(response.getheaders()))
    finally:
        connection.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve pages of a plugin ``test`` and return the port."""
    with ExitStack() as stack:

        def start(*pages: Page, **others: Sequence[Page]) -> int:
            server = PageServer("127.0.0.1", 0, {"test": pages, **others})
            stack.callback(server.stop)
            return server.start()

        yield start


def hello(_query: Mapping[str, str]) -> Answer:
    return Answer(b"hello")


def test_a_page_is_served_with_its_type_and_is_never_cached_or_guessed(serve: Serve) -> None:
    port = serve(Page("/graph", lambda _: Answer(b"<b>x</b>", "text/html; charset=utf-8", 202)))
    reply = ask(port, "/graph")
    assert (reply.status, reply.body) == (202, "<b>x</b>")
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    assert reply.headers["Cache-Control"] == "no-store"
    assert reply.headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'self'" in reply.headers["Content-Security-Policy"]
    assert "Python" not in reply.headers["Server"]


def test_a_page_gets_the_last_value_of_each_parameter(serve: Serve) -> None:
    port = serve(Page("/echo", lambda query: Answer(repr(dict(query)).encode())))
    assert ask(port, "/echo?a=1&b=x%20y&a=2&empty=").body == "{'a': '2', 'b': 'x y', 'empty': ''}"
    assert ask(port, "/echo").body == "{}"


def test_the_root_and_every_wrong_address_tell_which_pages_there_are(serve: Serve) -> None:
    port = serve(Page("/one", hello, "The first"), other=[Page("/two", hello)])
    root, wrong = ask(port, "/"), ask(port, "/thre<e>")
    assert (root.status, root.body) == (200, "/one  The first\n/two  other\n")
    assert wrong.status == 404
    assert root.body in wrong.body
    assert "<e>" not in wrong.body
    assert ask(serve(), "/").body == "(no plugin has a page)\n"


def test_a_slash_at_the_end_does_not_hide_a_page(serve: Serve) -> None:
    assert ask(serve(Page("/one", hello)), "/one/").body == "hello"


def test_head_tells_the_length_and_sends_nothing(serve: Serve) -> None:
    with connected(serve(Page("/one", hello))) as client:
        client.sendall(b"HEAD /one HTTP/1.0\r\n\r\n")
        reply = b"".join(iter(lambda: client.recv(1_000), b""))
    assert b"200 OK" in reply
    assert b"Content-Length: 5\r\n" in reply
    assert reply.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed_through_a_page(serve: Serve, method: str) -> None:
    asked: list[Mapping[str, str]] = []

    def page(query: Mapping[str, str]) -> Answer:
        asked.append(query)
        return Answer(b"")

    reply = ask(serve(Page("/one", page)), "/one", method)
    assert (reply.status, reply.headers["Allow"], asked) == (405, "GET, HEAD", [])


@pytest.mark.parametrize("problem", [ValueError("the secret"), SystemExit(3)])
def test_a_page_that_fails_says_nothing_of_its_reasons_and_the_others_go_on(
    serve: Serve, caplog: pytest.LogCaptureFixture, problem: BaseException
) -> None:
    def broken(_query: Mapping[str, str]) -> Answer:
        raise problem

    port = serve(Page("/one", hello), broken_plugin=[Page("/broken", broken)])
    with caplog.at_level(logging.ERROR, "eventbus"):
        reply = ask(port, "/broken")
        ask(port, "/broken")
    assert reply.status == 500
    assert "secret" not in reply.body
    assert ask(port, "/one").body == "hello"
    [record] = caplog.records  # the second time within a minute is only counted
    assert "plugin broken_plugin: page /broken failed" in record.message


@pytest.mark.parametrize("given", [None, "text", Answer("text")])  # type: ignore[arg-type]
def test_a_page_that_answers_with_something_else_is_named(
    serve: Serve, caplog: pytest.LogCaptureFixture, given: Answer
) -> None:
    port = serve(Page("/odd", lambda _: given))
    assert ask(port, "/odd").status == 500
    assert "an Answer whose body is bytes" in caplog.text


def test_a_page_that_hangs_leaves_the_others_alone(serve: Serve) -> None:
    goes_on, waiting = threading.Event(), threading.Semaphore(0)

    def hangs(_query: Mapping[str, str]) -> Answer:
        waiting.release()
        goes_on.wait(30)
        return Answer(b"late")

    port = serve(Page("/hangs", hangs), Page("/one", hello))
    threads = [threading.Thread(target=ask, args=(port, "/hangs")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert waiting.acquire(timeout=10)
    assert ask(port, "/hangs").status == 503
    assert ask(port, "/one").body == "hello"
    goes_on.set()
    for thread in threads:
        thread.join(10)
    assert ask(port, "/hangs").body == "late"


def test_clients_that_send_nothing_are_cut_and_their_places_given_to_others(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_SILENCE", 0.3)
    port = serve(Page("/one", hello))
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(port)) for _ in range(16)]
        turned_away = stack.enter_context(connected(port))
        assert turned_away.recv(100).startswith(b"HTTP/1.0 503 ")
        assert silent[0].recv(100) == b""
        wait_until(lambda: ask(port, "/one").status == 200)


def has_ended(slow: socket.socket) -> bool:
    """Send one more letter; whether the server has had enough."""
    try:
        slow.sendall(b"x")
        return slow.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_client_that_sends_a_letter_now_and_then_is_cut_in_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages_module, "_LIFETIME", 0.3)
    port = serve(Page("/one", hello))
    with connected(port) as slow:
        slow.settimeout(0.02)
        began = time.monotonic()
        slow.sendall(b"GET /one HTTP/1.0\r\nX: ")
        while not has_ended(slow):
            assert time.monotonic() < began + 5
    assert ask(port, "/one").body == "hello"


def test_a_client_that_does_not_read_is_cut(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "_SILENCE", 0.3)
    asked = threading.Event()

    def large(_query: Mapping[str, str]) -> Answer:
        asked.set()
        return Answer(b"x" * 50_000_000)

    port = serve(Page("/large", large))
    with connected(port) as lazy:
        lazy.sendall(b"GET /large HTTP/1.0\r\n\r\n")
        assert asked.wait(10)
        wait_until(lambda: not any("process_request_thread" in thread.name for thread in threading.enumerate()))
        received = 0
        with suppress(ConnectionError):
            while piece := lazy.recv(1_000_000):
                received += len(piece)
        assert received < 50_000_000


def test_a_port_in_use_stops_the_start_and_says_what_to_do(serve: Serve) -> None:
    port = serve(Page("/one", hello))
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}: the port is in use; .*EVENTBUS_HTTP_PORT"):
        PageServer("127.0.0.1", port, {}).start()
    assert ask(port, "/one").body == "hello"


def test_an_address_of_another_host_stops_the_start() -> None:
    with pytest.raises(ConfigurationError, match="EVENTBUS_HTTP_HOST is no address of this host"):
        PageServer("192.0.2.1", 0, {}).start()


def test_an_address_can_be_one_of_ipv6(caplog: pytest.LogCaptureFixture) -> None:
    server = PageServer("::1", 0, {"test": [Page("/one", hello)]})
    with caplog.at_level(logging.INFO, "eventbus"):
        try:
            port = server.start()
        except ConfigurationError:
            pytest.skip("this machine has no IPv6")
    try:
        assert ask(port, "/one", host="::1").body == "hello"
        assert f"serving /one on http://[::1]:{port}/" in caplog.text
    finally:
        server.stop()


@pytest.mark.parametrize("path", ["metrics", "/", "/a/", "/a?b", "/a b"])
def test_a_path_that_nobody_could_ask_for_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="plugin test has a page"):
        PageServer("127.0.0.1", 0, {"test": [Page(path, hello)]})


def test_two_plugins_cannot_hide_each_others_page() -> None:
    with pytest.raises(ConfigurationError, match="plugins a and b both have a page /one"):
        PageServer("127.0.0.1", 0, {"a": [Page("/one", hello)], "b": [Page("/one", hello)]})


def test_stopping_takes_no_time_whatever_pages_and_clients_do_and_frees_the_port() -> None:
    entered, goes_on = threading.Event(), threading.Event()

    def hangs(_query: Mapping[str, str]) -> Answer:
        entered.set()
        goes_on.wait(30)
        return Answer(b"")

    server = PageServer("127.0.0.1", 0, {"test": [Page("/hangs", hangs)]})
    port = server.start()
    with connected(port) as silent, connected(port) as waiting:
        waiting.sendall(b"GET /hangs HTTP/1.0\r\n\r\n")
        assert entered.wait(10)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 0.5
        assert silent.recv(1) == b""
        assert waiting.recv(1) == b""
    server.stop()
    goes_on.set()
    with pytest.raises(ConnectionRefusedError):
        connected(port)
    again = PageServer("127.0.0.1", port, {})
    assert again.start() == port
    again.stop()
