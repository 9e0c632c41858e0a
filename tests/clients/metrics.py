"""Scrapes of examples/chat with two members, one of which said a line: metrics.py HTTP_PORT."""

import sys
import time
import urllib.request

from prometheus_client.openmetrics import parser


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
        kind = page.headers["content-type"]
        assert kind.startswith("application/openmetrics-text; version=1.0.0"), kind
        return list(parser.text_string_to_metric_families(page.read().decode()))


def values(families):
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def main():
    port = sys.argv[1]
    last, counters = {}, set()
    for _ in range(10):
        families = scrape(port)
        now = values(families)
        counters |= {s.name for f in families if f.type in ("counter", "histogram") for s in f.samples}
        for key, before in last.items():
            if key[0] in counters:
                assert now[key] >= before, f"{key} was {before} and is {now[key]}"
        last = now
        # Figures are published each tenth of a second.
        time.sleep(0.15)

    def total(name, **labels):
        wanted = set(labels.items())
        found = [value for (of, has), value in last.items() if of == name and wanted <= set(has)]
        assert found, f"{name} is not there"
        return sum(found)

    assert total("ringserve_service_connections", service="chat") == 2
    assert total("ringserve_service_frames_total", service="chat") == 1
    assert total("chat_members") == 2 and total("chat_rooms") == 1
    assert total("ringserve_accept_queue_capacity", shard="1") > 0
    assert total("ringserve_shard_cpu_seconds_total") > 0
    assert total("ringserve_first_frame_seconds_count") >= 1
    assert total("ringserve_turn_seconds_count") > 0
    print(f"{len(last)} samples")


main()
