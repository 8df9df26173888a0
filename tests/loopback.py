"""An HTTP server on loopback: what the servers of the hub and of Weights & Biases have in common."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LoopbackHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer takes 40 ms

    def send(self, status, contents, **headers):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(contents))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(contents)

    def log_message(self, *_):
        pass


@contextmanager
def serving(handler):
    """A server whose requests a handler answers; `url` is its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server
        server.shutdown()
