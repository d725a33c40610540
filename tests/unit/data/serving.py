"""A local web server that behaves as object stores do."""

import contextlib
import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves ranges of bytes, as object stores do; some requests fail once."""

    requests, fails_every = 0, 3
    gives_ranges = True

    def do_GET(self) -> None:
        given = self.headers.get("Range")
        type(self).requests += 1
        if given and self.requests % self.fails_every == 0 and self.gives_ranges:
            self.send_error(503)
            return
        if not given or not self.gives_ranges:
            super().do_GET()
            return
        first, last = given.removeprefix("bytes=").split("-")
        data = Path(self.translate_path(self.path)).read_bytes()
        part = data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""


class Server(http.server.ThreadingHTTPServer):
    """Takes many requests at once."""

    request_queue_size = 128


@contextlib.contextmanager
def serve(folder: Path, fails_every: int = 3) -> Iterator[str]:
    """The URL under which a folder is served for a while; one range in so many is refused."""
    Ranges.fails_every = fails_every
    handler = functools.partial(Ranges, directory=str(folder))
    with Server(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
