"""A server that answers as the admin endpoint does, with reports that a test gives it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "crates/server/src/admin/page.html"
# A second on a real server; tests wait for less.
EVENT_SECONDS = 0.2


class StandIn:
    """Serves `report` until it is stopped. What was asked for stands in `requests` and `posts`."""

    def __init__(self, report, port=0):
        self.report = report
        # `events`: what /events does: stream, refuse, or be silent. `answer`: status of all other answers but the page.
        self.events, self.answer, self.close_answer = "stream", 200, 200
        self.token = None
        self.requests, self.posts = [], []
        self.stopping = threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                stand_in.requests.append(self.path)
                try:
                    stand_in.get(self)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def do_POST(self):
                stand_in.posts.append((self.path, self.headers.get("X-Ringserve")))
                stand_in.send(
                    self, stand_in.close_answer, "text/plain", b"" if stand_in.close_answer == 200 else b"it ended before"
                )

        ThreadingHTTPServer.daemon_threads = True
        ThreadingHTTPServer.allow_reuse_address = True
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def send(self, handler, status, kind, body):
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def get(self, handler):
        path = handler.path.split("?")[0]
        if path == "/":
            return self.send(handler, 200, "text/html; charset=utf-8", PAGE.read_bytes())
        if self.token and handler.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(handler, 401, "text/plain", b"this endpoint has a token: send it as Authorization: Bearer TOKEN")
        if self.answer != 200:
            return self.send(handler, self.answer, "text/plain", b"not now")
        if path == "/report.json":
            return self.send(handler, 200, "application/json", json.dumps(self.report).encode())
        if path == "/events" and self.events == "stream":
            return self.stream(handler)
        if path == "/events" and self.events == "silent":
            self.stopping.wait(30)
            handler.close_connection = True
            return None
        return self.send(handler, 404, "text/plain", b"there is no such path")

    def stream(self, handler):
        handler.close_connection = True
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        while not self.stopping.is_set() and self.events == "stream" and self.answer == 200:
            handler.wfile.write(b"data: " + json.dumps(self.report).encode() + b"\n\n")
            time.sleep(EVENT_SECONDS)

    def stop(self):
        self.stopping.set()
        self.server.shutdown()
        self.server.server_close()
