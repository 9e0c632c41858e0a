"""Scrapes an example, each text by the strict parser of prometheus_client.

metrics.py chat HTTP_PORT          examples/chat with two members, one of which said a line
metrics.py admin HTTP_PORT PORT    examples/admin, which is asked meanwhile
"""

import socket
import sys
import time
import urllib.request

from prometheus_client.openmetrics import parser


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        kind = page.headers["content-type"]
        assert kind.startswith("application/openmetrics-text; version=1.0.0"), kind
        return list(parser.text_string_to_metric_families(page.read().decode()))


class Watched:
    """The last samples of a server, whose counters never fall."""

    def __init__(self, port):
        self.port, self.last, self.counters = port, {}, set()

    def scrape(self):
        families = scrape(self.port)
        now = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }
        self.counters |= {s.name for f in families if f.type in ("counter", "histogram") for s in f.samples}
        for key, before in self.last.items():
            if key[0] in self.counters:
                assert now[key] >= before, f"{key} was {before} and is {now[key]}"
        self.last = now

    def total(self, name, **labels):
        wanted = set(labels.items())
        found = [value for (of, has), value in self.last.items() if of == name and wanted <= set(has)]
        assert found, f"{name} is not there"
        return sum(found)


def chat(port):
    server = Watched(port)
    for _ in range(10):
        server.scrape()
        # Figures are published each tenth of a second.
        time.sleep(0.15)
    assert server.total("ringserve_service_connections", service="chat") == 2
    assert server.total("ringserve_service_frames_total", service="chat") == 1
    assert server.total("chat_members") == 2 and server.total("chat_rooms") == 1
    assert server.total("ringserve_accept_queue_capacity", shard="1") > 0
    assert server.total("ringserve_shard_cpu_seconds_total") > 0
    assert server.total("ringserve_first_frame_seconds_count") >= 1
    assert server.total("ringserve_turn_seconds_count") > 0
    return server


def admin(port, of_lines):
    server = Watched(port)
    with socket.create_connection(("127.0.0.1", int(of_lines)), timeout=20) as peer:
        lines = peer.makefile("rwb", buffering=0)

        def ask(line):
            lines.write(line)
            assert lines.readline() == line, line

        for _ in range(1000):
            ask(b"hello\n")
            server.scrape()
        time.sleep(0.3)
        server.scrape()
        assert server.total("ringserve_frames_total") == 1000
        lines.write(b"block 2000\n")
        time.sleep(0.7)
        began = time.monotonic()
        server.scrape()
        took = time.monotonic() - began
        assert server.total("ringserve_shard_stale") == 1, "a shard is blocked"
        assert len([key for key in server.last if key[0] == "ringserve_connections"]) == 2, "and both are there"
        assert lines.readline() == b"block 2000\n"
        time.sleep(0.3)
        server.scrape()
        assert server.total("ringserve_stalls_total", cause="sleep") == 1
        print(f"a scrape while a shard was blocked, the parser included: {took * 1000:.1f} ms")
    return server


def main():
    example, *rest = sys.argv[1:]
    server = {"chat": chat, "admin": admin}[example](*rest)
    print(f"{example}: {len(server.last)} samples")


main()
