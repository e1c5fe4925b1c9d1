"""What links that lead back to the gateway begin with."""

from __future__ import annotations

import pytest

from streamtap.server.surface.outside import base_url


def base(**headers: str) -> str:
    told = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    return base_url({"type": "http", "scheme": "http", "server": ("127.0.0.1", 8000), "headers": told})


def test_it_is_what_the_caller_asked_for() -> None:
    assert base(host="harvests.example") == "http://harvests.example"
    assert base(host="127.0.0.1:8000") == "http://127.0.0.1:8000"
    assert base(host="[::1]:8000") == "http://[::1]:8000"


def test_a_proxy_with_tls_says_so() -> None:
    assert base(host="a.example", x_forwarded_proto="https") == "https://a.example"
    assert base(host="a.example", x_forwarded_proto="HTTPS, http") == "https://a.example"
    assert base(host="a.example", x_forwarded_proto="gopher") == "http://a.example"


@pytest.mark.parametrize("host", ["", "a b", "a/b", "a@b", 'a"b', "a:b", "a\nb", "ä", "[::1", "a?b"])
def test_a_host_that_is_none_is_the_servers_own(host: str) -> None:
    assert base(host=host) == "http://127.0.0.1:8000"


def test_without_headers() -> None:
    assert base() == "http://127.0.0.1:8000"
    told = {"type": "http", "scheme": "https", "headers": []}
    assert base_url({**told, "server": ("::1", 1)}) == "https://[::1]:1"
