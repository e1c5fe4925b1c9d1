"""``NdifServer``: NDIF's endpoints on this machine, for nnsight's real client."""

from __future__ import annotations

import json
import threading
import traceback
import uuid
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Self

from nnsight.schema.request import RequestModel
from nnsight.schema.response import ResponseModel, Status

from streamtap.testing.ndif_server.executing import Served
from streamtap.testing.ndif_server.handling import Handler
from streamtap.testing.ndif_server.sockets import ClientSocket
from streamtap.testing.ndif_server.watching import FaultKind, NdifFault, NdifJobSeen, Watch

HOST = "127.0.0.1"
#: Results up to this size ride on the last word of the socket, larger ones are fetched.
_INLINE_BYTES = 20 << 20


class NdifServer:
    """NDIF on 127.0.0.1: it takes serialised traces and runs them, one at a time; nothing that it says is canned.

    ::

        with NdifServer({"org/model": Served.over(module, tokenizer)}, key=KEY) as ndif:
            engine = NnsightEngine.load("org/model", remote=ndif.url, api_key=KEY)

    ``POST /request`` takes a job, ``/subscribe`` is the websocket that tells of it, ``GET /response/{id}`` its last
    word where nobody subscribed, and ``GET /result/{id}`` what it saved. A request may need nothing that no server has:
    its modules are torch's, transformers' and nnsight's alone.

    Args:
        models: What is served, by Hub id.
        key: The API key that is asked for; None takes every request.
        inline_bytes: The largest result that comes over the socket.
    """

    def __init__(
        self, models: Mapping[str, Served], *, key: str | None = None, inline_bytes: int = _INLINE_BYTES
    ) -> None:
        self._models, self._key, self._inline_bytes = dict(models), key, inline_bytes
        self._watch = Watch()
        self._listener: ThreadingHTTPServer | None = None
        self._jobs: ThreadPoolExecutor | None = None
        self._subscribed: dict[str, ClientSocket] = {}
        self._responses: dict[str, str] = {}
        self._results: dict[str, bytes] = {}
        self._seen: dict[str, NdifJobSeen] = {}

    def start(self) -> Self:
        """Listen on a free port."""
        self._listener = ThreadingHTTPServer((HOST, 0), partial(Handler, self))
        self._listener.daemon_threads = True
        self._jobs = ThreadPoolExecutor(1, thread_name_prefix="ndif-job")
        threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def stop(self) -> None:
        """End what runs and close the port."""
        if self._jobs is not None:
            self._jobs.shutdown(cancel_futures=True)
        for client in list(self._subscribed.values()):  # a thread takes those out that leave
            client.close()
        if self._listener is not None:
            self._listener.shutdown()
            self._listener.server_close()
        self._jobs = self._listener = None

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    @property
    def url(self) -> str:
        """The address that a client is given; the server runs."""
        assert self._listener is not None
        return f"http://{HOST}:{self._listener.server_address[1]}"

    @property
    def jobs(self) -> list[NdifJobSeen]:
        """The jobs that were taken, in the order in which they came."""
        return list(self._watch.jobs)

    def fail(self, kind: FaultKind = "http", *, times: int = 1, status: int = 503, said: str = "Try later.") -> None:
        """Let the next ``times`` requests go wrong.

        ``"http"`` answers with ``status`` and ``said``; ``"job"`` takes them, and their jobs fail with ``said``;
        ``"drop"`` takes them and closes the socket, as does ``"goodbye"``, which says so first.
        """
        self._watch.add(NdifFault(kind, said, status), times)

    # What the endpoints do.

    def subscribe(self, client: ClientSocket) -> str:
        """Tell ``client`` its session, whose words it gets from now on."""
        session = uuid.uuid4().hex
        self._subscribed[session] = client
        client.send(json.dumps({"session_id": session}))
        return session

    def leave(self, session: str) -> None:
        """A client that went away."""
        self._subscribed.pop(session, None)

    def refusal(self, key: str | None) -> tuple[int, str] | None:
        """Status and words for a request with ``key``, as NDIF says them, the key repeated where it is malformed."""
        if self._key is None:
            return None
        if not key:
            return 401, "Missing or invalid API key. Please visit https://login.ndif.us/ to create a new one."
        try:
            uuid.UUID(key)
        except ValueError:
            return 400, f"Invalid API key format: '{key}'. API keys must be in the format: xxxxxxxx-xxxx-…"
        return None if key == self._key else (403, "Invalid API key.")

    def next_fault(self) -> NdifFault | None:
        """What is to go wrong with the request that came now."""
        return self._watch.next_fault()

    def take(self, request: RequestModel, blob: bytes, fault: NdifFault | None) -> str:
        """Queue a job and give the first word about it, as JSON."""
        job = uuid.uuid4().hex
        seen = NdifJobSeen(json.loads(request.model_key.split(":", 1)[1])["repo_id"], len(blob), blob=blob)
        self._seen[job] = seen
        self._watch.jobs.append(seen)
        received: str = ResponseModel(id=job, status=Status.RECEIVED, description="Received.").model_dump_json()
        assert self._jobs is not None
        done = self._jobs.submit(self._run, job, request, blob, fault)
        done.add_done_callback(partial(self._finish, job, request))
        return received

    def response(self, job: str) -> str | None:
        """The last word about a job that nobody subscribed to, as JSON."""
        return self._responses.get(job)

    def result(self, job: str) -> bytes | None:
        """What a job saved, where it was too large for the socket."""
        blob = self._results.get(job)
        if blob is not None:
            self._seen[job].sent_bytes += len(blob)
        return blob

    def _run(self, job: str, request: RequestModel, blob: bytes, fault: NdifFault | None) -> bytes:
        self._say(request, ResponseModel(id=job, status=Status.RUNNING, description="Your job has started running."))
        client = self._subscribed.get(request.session_id)
        if fault is not None and client is not None and fault.kind in ("drop", "goodbye"):
            client.close() if fault.kind == "drop" else client.say_goodbye()
        if fault is not None:
            raise RuntimeError(fault.said)
        served = self._models.get(self._seen[job].model)
        if served is None:
            raise LookupError("Could not deploy this model. It is not a model of this server.")
        return served.run(blob, compress=request.compress, env=request.env)

    def _finish(self, job: str, request: RequestModel, done: Future[bytes]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            said = str(error) if isinstance(error, LookupError) else "".join(traceback.format_exception(error))
            self._say(request, ResponseModel(id=job, status=Status.ERROR, description=said))
            return
        blob = done.result()
        self._seen[job].result_bytes = len(blob)
        completed = ResponseModel(id=job, status=Status.COMPLETED, description="Done.", data=blob)
        client = self._subscribed.get(request.session_id)
        if client is not None and len(blob) <= self._inline_bytes:
            self._seen[job].sent_bytes += client.send(completed.pickle())
            return
        self._results[job] = blob
        self._say(request, completed.model_copy(update={"data": f"{self.url}/result/{job}"}))

    def _say(self, request: RequestModel, word: ResponseModel) -> None:
        client = self._subscribed.get(request.session_id)
        if client is not None:
            client.send(word.model_dump_json())
        elif not request.session_id:
            self._responses[word.id] = word.model_dump_json()
