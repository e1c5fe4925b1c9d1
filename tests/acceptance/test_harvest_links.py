"""Links to the files of a job: for anybody, in parts, for a while, signed anew on request; over real connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.blobs import BlobStore
from streamtap.errors import TransferFailed
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.xdist_group("harvest links")

PROMPTS = [f"prompt {number}" for number in range(10)]
LINK_SECONDS = 5


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return {"id": "tiny", "checkpoint": str(folder), "dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def service(start_lasting_service: Any, table: dict[str, Any]) -> Any:
    return start_lasting_service(table, engines="shared")


def finished(service: Any) -> str:
    with service.client() as client:
        body = {"model": "tiny", "prompts": PROMPTS, "shard_size": 4}
        job_id: str = client.post("/harvest", json=body).json()["job_id"]
        while (told := client.get(f"/harvest/{job_id}", params={"wait": 30}).json())["status"] in (
            "pending",
            "running",
        ):
            pass
    assert told["status"] == "done", told
    return job_id


@pytest.fixture(scope="module")
def job_id(service: Any) -> str:
    return finished(service)


def signed(service: Any, job_id: str, **headers: str) -> dict[str, str]:
    with service.client() as client:
        result = client.get(f"/harvest/{job_id}", headers=headers).json()["result"]
    urls = [result["manifest_url"], result["stats_url"], *result["shard_urls"]]
    return {httpx2.URL(url).path.rpartition("/")[2]: url for url in urls}


#: One for all, so that each answer leaves its connection fit for the next.
ANYBODY = httpx2.Client(trust_env=False)


def get(url: str, method: str = "GET", **headers: str) -> httpx2.Response:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return ANYBODY.request(method, url, headers=told)


def opened(service: Any, job_id: str) -> HarvestedRun:
    def fetch(url: str, headers: Any) -> tuple[int, bytes]:
        answer = httpx2.get(url, headers=dict(headers), trust_env=False, verify=False)
        return answer.status_code, answer.content

    return HarvestedRun.open(LinkedPlace(signed(service, job_id), fetch, lambda: signed(service, job_id)))


def test_links_point_to_where_the_caller_reached_the_server(service: Any, job_id: str) -> None:
    found = signed(service, job_id)
    assert set(found) == {"manifest.json", "stats.safetensors", *(f"shard_0000{n}.safetensors" for n in range(3))}
    assert all(url.startswith(f"{service.base_url}/harvest/files/") for url in found.values())

    behind = signed(service, job_id, **{"Host": "harvests.example", "X-Forwarded-Proto": "https"})
    assert all(url.startswith("https://harvests.example/v1/harvest/files/") for url in behind.values())


def test_parts_of_a_file_without_a_key(service: Any, job_id: str) -> None:
    url = signed(service, job_id)["shard_00001.safetensors"]
    whole = get(url)
    size = len(whole.content)
    assert (whole.status_code, whole.headers["accept-ranges"]) == (200, "bytes")

    head = get(url, "HEAD")
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(size), b"")
    for asked, start, stop in [("0-7", 0, 8), ("8-", 8, size), ("-5", size - 5, size), (f"5-{10 * size}", 5, size)]:
        part = get(url, Range=f"bytes={asked}")
        assert (part.status_code, part.content) == (206, whole.content[start:stop])
        assert part.headers["content-range"] == f"bytes {start}-{stop - 1}/{size}"
    outside = get(url, Range=f"bytes={size}-")
    assert (outside.status_code, outside.headers["content-range"]) == (416, f"bytes */{size}")
    assert outside.json()["error"]["code"] == "invalid_request"


def test_what_the_caller_has_already_is_not_sent_again(service: Any, job_id: str) -> None:
    url = signed(service, job_id)["manifest.json"]
    etag = get(url).headers["etag"]

    same = get(url, If_None_Match=etag)
    assert (same.status_code, same.content) == (304, b"")
    # It stays the same where the link is another.
    time.sleep(1)
    later = signed(service, job_id)["manifest.json"]
    assert later != url
    assert get(later, If_None_Match=etag).status_code == 304


def test_a_download_that_broke_goes_on(service: Any, job_id: str) -> None:
    url = signed(service, job_id)["shard_00000.safetensors"]
    whole = get(url)

    first = get(url, Range="bytes=0-99")
    rest = get(url, Range="bytes=100-", If_Range=first.headers["etag"])
    changed = get(url, Range="bytes=100-", If_Range='"another"')

    assert first.content + rest.content == whole.content
    assert (changed.status_code, changed.content) == (200, whole.content)


def test_a_link_that_was_changed_is_refused(service: Any, job_id: str) -> None:
    found = signed(service, job_id)
    url = found["manifest.json"]
    stats = httpx2.URL(found["stats.safetensors"])
    base = url.partition("/v1/")[0]
    for forged in (
        url.partition("?")[0],
        url[:-1] + ("0" if url[-1] != "0" else "1"),
        url.replace("expires=", "expires=9"),
        f"{url.partition('?')[0]}?{stats.query.decode()}",
        f"{base}/v1/harvest/files/../../streamtap.db?{stats.query.decode()}",
        f"{base}/v1/harvest/files/x/..%2F..%2Fstreamtap.db?{stats.query.decode()}",
        f"{base}/v1/harvest/files/x/.link-secret?{stats.query.decode()}",
    ):
        answer = get(forged)
        assert answer.status_code in (403, 404), forged
        assert answer.json()["error"]["code"] in ("access_denied", "not_found")
        assert "result" not in answer.text


def test_nothing_of_a_link_is_in_the_log(service: Any, job_id: str) -> None:
    url = signed(service, job_id)["manifest.json"]
    get(url)

    log = (service.folder / "service.log").read_text()
    assert '"/v1/harvest/files"' in log
    assert "signature" not in log
    assert httpx2.URL(url).params["signature"] not in log


@pytest.fixture(scope="module")
def hasty(start_lasting_service: Any, table: dict[str, Any]) -> Any:
    """A server whose links soon end."""
    return start_lasting_service(table, engines="shared", harvest={"link_days": LINK_SECONDS / 86_400})


def test_an_expired_link_is_refused_and_signed_anew(hasty: Any) -> None:
    job_id = finished(hasty)
    old = signed(hasty, job_id)["manifest.json"]
    with hasty.client() as client:
        expires = datetime.fromisoformat(client.get(f"/harvest/{job_id}").json()["urls_expire_at"])
    assert 0 < (expires - datetime.now(UTC)).total_seconds() <= LINK_SECONDS
    first = get(old)
    assert first.status_code == 200

    time.sleep(LINK_SECONDS + 1)
    ended = get(old)
    assert (ended.status_code, ended.json()["error"]["code"]) == (403, "access_denied")
    assert get(old, Authorization=f"Bearer {hasty.key}").status_code == 403

    assert get(signed(hasty, job_id)["manifest.json"]).content == first.content


def test_v58_a_reader_outlives_its_links(hasty: Any) -> None:
    run = opened(hasty, finished(hasty))
    before = run.prompt(0)

    time.sleep(LINK_SECONDS + 1)

    for index in range(1, len(PROMPTS)):
        assert run.token_ids(index)[0] == 0
    assert {layer: rows.tobytes() for layer, rows in run.prompt(0).items()} == {
        layer: rows.tobytes() for layer, rows in before.items()
    }


def test_every_gateway_of_a_folder_takes_the_links_of_all(
    start_service: Callable[..., Any], table: dict[str, Any], tmp_path: Path, postgres: Any
) -> None:
    shared = {"database": postgres.new_database(), "harvest": {"store": str(tmp_path / "runs")}, "engines": "shared"}
    one, other = start_service(table, **shared), start_service(table, **shared)
    url = signed(one, finished(one))["manifest.json"]

    elsewhere = get(url.replace(one.base_url, other.base_url))

    assert (elsewhere.status_code, elsewhere.content) == (200, get(url).content)


def test_a_removed_run_is_told(service: Any) -> None:
    run = opened(service, finished(service))
    folder = service.folder / "streamtap-data" / "harvest" / run.manifest.run_id
    for file in folder.iterdir():
        file.unlink()

    with pytest.raises((FileNotFoundError, TransferFailed)):
        run.place.get("stats.safetensors")


def test_files_in_an_object_store_are_linked_to_by_it(
    start_service: Callable[..., Any], table: dict[str, Any], s3_url: str, s3_endpoint: str
) -> None:
    where = {"store": s3_url, "link_days": LINK_SECONDS / 86_400}
    service = start_service(table, engines="shared", harvest=where)
    job_id = finished(service)

    found = signed(service, job_id)
    assert all(url.startswith(f"{s3_endpoint}/") for url in found.values())
    first = get(found["shard_00000.safetensors"])
    assert first.status_code == 200
    assert get(found["shard_00000.safetensors"], Range="bytes=8-15").content == first.content[8:16]
    opened(service, job_id).verify()

    time.sleep(LINK_SECONDS + 1)
    assert get(found["shard_00000.safetensors"]).status_code == 403
    assert get(signed(service, job_id)["shard_00000.safetensors"]).content == first.content

    # Nothing lies at the gateway, whose own links lead nowhere then.
    assert not (service.folder / "streamtap-data" / "harvest").exists()
    own = get(f"{service.base_url}/harvest/files/{opened(service, job_id).manifest.run_id}/manifest.json")
    assert (own.status_code, own.json()["error"]["code"]) == (404, "not_found")
    assert BlobStore(s3_url).entries()[1] in (["harvest"], ["harvest", "harvest-inputs"])
