"""Reports as a server answers them at /report.json, one for each state that the page is looked at in."""

import copy
import re
from pathlib import Path

STAGES = ["syn_queue", "accept_queue", "table", "first_frame", "handler", "outbox", "peer", "host"]


def stage(name, now, capacity, unit, state="calm", recently=0, total=0, why=""):
    return {
        "name": name,
        "state": state,
        "now": now,
        "capacity": capacity,
        "unit": unit,
        "lost_total": total,
        "lost_recently": recently,
        "why": why,
    }


def shard(number, busy, starved, connections, **others):
    figures = {
        "shard": number,
        "busy": busy,
        "starved": starved,
        "asleep": round(1 - busy - starved, 6),
        "stalled_seconds": None,
        "stale": False,
        "connections": connections,
        "turns": 8_812_345 + 917 * number,
        "frames": 104_288_113 + 55_103 * number,
        "buffers_used": 12 + number,
        "buffers": 64,
        "accept_queue": number % 2,
        "accepted_waiting": {"behind": 1_200, "limit": 1} if number == 1 else {},
    }
    return figures | others


def connection(number, peer, outbox, **others):
    figures = {
        "id": f"{number % 4}.{17 + number}.3",
        "shard": number % 4,
        "service": "chat",
        "peer": peer,
        "age_seconds": 86_400 * number + 4_512.25,
        "idle_seconds": 0.031 * (number + 1),
        "outbox_bytes": outbox,
        "bytes_in": 1_043 * (number + 1),
        "bytes_out": 88_123_456 // (number + 1),
        "frames_in": 1 + 17 * number,
        "frames_out": 1_300_211 // (number + 1),
        "state": "open",
        "calls": 0,
        "oldest_call_seconds": None,
    }
    return figures | others


def quantiles(count, *values):
    return dict(zip(["count", "p50", "p90", "p99", "p999", "max"], [count, *values]))


def stall(number, ago, lasted, **others):
    figures = {
        "shard": number,
        "ago_seconds": ago,
        "lasted_seconds": lasted,
        "ongoing": False,
        "work": "call",
        "several": number == 3,
        "peer": f"10.1.2.{number + 3}:5511",
        "connection": f"{number}.20.1",
        "frame_bytes": 212,
        "cause": "lock",
        "text": f"shard {number} stalled for {lasted} s: call of 10.1.2.{number + 3}:5511 waits for a lock",
        "waits_in": "futex_do_wait",
        "queue_waiting": 3,
        "queue_lost": 0,
    }
    return figures | others


def close(reason, closed_by, total, recently):
    return {"reason": reason, "closed_by": closed_by, "total": total, "recently": recently}


def finding(check, severity, what, value, needed, otherwise, fix):
    return {
        "check": check,
        "severity": severity,
        "what": what,
        "value": value,
        "needed": needed,
        "otherwise": otherwise,
        "fix": fix,
        "certainty": "computed",
    }


def admission_limits(per_address, address_rate, connections_max, connection_rate, connections, networks):
    return {
        "per_address": per_address,
        "address_rate": address_rate,
        "connections_max": connections_max,
        "connection_rate": connection_rate,
        "connections": connections,
        "networks_total": networks,
        "networks": [{"network": f"192.0.{n}.0/24", "allows": n == 1, "left_seconds": 59.5} for n in range(networks)],
    }


def calm():
    shards = [
        shard(n, busy, starved, 12_057 + 3 * n)
        for n, (busy, starved) in enumerate([(0.31, 0.004), (0.284, 0.01), (0.4, 0), (0.02, 0.0005)])
    ]
    return {
        "server": {
            "version": "0.1.0",
            "driver": "io_uring",
            "pid": 24_117,
            "program": "chat",
            "uptime_seconds": 190_812.4,
            "phase": "serving",
            "connections": 48_246,
            "connections_max": 1_000_000,
            "upstreams": 1,
            "memory_bytes": 187_904_512,
            "window_seconds": 10.0,
        },
        "funnel": [
            stage("syn_queue", 2, 4_096, "connections"),
            stage("accept_queue", 2, 16_384, "connections", total=17),
            stage("table", 48_246, 1_000_000, "connections"),
            stage("first_frame", 54, 256, "buffers"),
            stage("handler", 41, None, "calls"),
            stage("outbox", 1_843_200, None, "bytes"),
            stage("peer", 3, None, "connections"),
            stage("host", 48_391, 1_048_576, "descriptors"),
        ],
        "overload": {"stage": 0, "name": "calm", "cause": "", "shed_total": 0},
        "admission": {"limits": [], "accept_rate": None, "changes": []},
        "rates": {
            "accepts_per_second": 212.0,
            "closes_per_second": 209.4,
            "frames_per_second": 81_204.0,
            "received_bytes_per_second": 9_412_331.0,
            "sent_bytes_per_second": 31_223_114.0,
            "turns_per_second": 12_003.0,
            "system_calls_per_second": 9.6,
        },
        "shards": shards,
        "services": [
            {"name": "chat", "connections": 48_201, "frames": 417_152_452, "frames_per_second": 81_203.0},
            {"name": "127.0.0.1:7001", "connections": 45, "frames": 910, "frames_per_second": 1.0},
        ],
        "accept_queues": [
            {"listener": listener, "shard": n, "waiting": waiting, "capacity": 4_096, "lost": lost}
            for listener, lost, waiting in [("0.0.0.0:7000", 17, 1), ("127.0.0.1:7001", 0, 0)]
            for n in range(4)
        ]
        + [{"listener": "unix:/run/chat.sock", "shard": None, "waiting": 0, "capacity": 128, "lost": None}],
        "closes": [
            close("peer_closed", "peer", 3_812_004, 2_011),
            close("closed", "service", 81_223, 40),
            close("idle_timeout", "server", 4_211, 3),
            close("peer_reset", "peer", 1_702, 0),
            close("bad_frame", "peer", 12, 0),
            close("system", "system", 1, 0),
        ],
        "times": {
            "turn": quantiles(31_223_114, 0.000_018, 0.000_11, 0.000_9, 0.004, 0.0231),
            "call": quantiles(812_331, 0.0011, 0.0052, 0.021, 0.11, 0.744),
            "first_frame": quantiles(3_899_000, 0.017, 0.034, 0.21, 2.5, 9.96),
            "send_stall": quantiles(0, 0.0, 0.0, 0.0, 0.0, 0.0),
        },
        "outboxes": [connection(n, f"10.20.{n}.7:4{n}210", 262_144 >> n) for n in range(9)]
        + [
            connection(
                9,
                "[2001:db8:85a3:8d3:1319:8a2e:370:7348]:65535",
                311,
                service="127.0.0.1:7001",
                bytes_in=None,
                bytes_out=None,
                frames_in=None,
                frames_out=None,
            )
        ],
        "waiting_calls": [
            connection(n, f"10.20.3.{n}:51{n}11", 0, state="calling", calls=1 + n % 2, oldest_call_seconds=0.744 / (n + 1))
            for n in range(6)
        ],
        "silent_shards": [],
        "stalls": [
            stall(2, 81_000.0, 0.031, cause="cpu", waits_in=None, connection=None, frame_bytes=None, work="task", peer=None),
            stall(1, 3_605.0, 0.74, queue_waiting=311),
            stall(0, 125.0, 0.052, cause="starved", waits_in=None, queue_waiting=None, queue_lost=None),
        ],
        "findings": [
            finding(
                "tcp_max_syn_backlog",
                "info",
                "handshakes that may be under way",
                "512",
                "400 = 20000 SYN/s x 0.02 s",
                "SYN cookies are used, which lose options of TCP and no peer",
                "sysctl -w net.ipv4.tcp_max_syn_backlog=4096",
            )
        ],
    }


def shedding():
    report = calm()
    report["server"] |= {"connections": 999_871, "phase": "serving"}
    report["funnel"] = [
        stage(
            "syn_queue", 4_096, 4_096, "connections", "warn", why="handshakes wait since the accept queue behind them is full."
        ),
        stage(
            "accept_queue", 4_097, 4_096, "connections", "warn", why="shards do not accept since the table is full: see there."
        ),
        stage(
            "table",
            999_871,
            1_000_000,
            "connections",
            "lost",
            1_204,
            88_120,
            "999 871 of 1 000 000 connections are open, and 1 204 were turned away in 10 s: raise `connections_max`, or add a server.",
        ),
        stage("first_frame", 201, 256, "buffers"),
        stage("handler", 912, None, "calls"),
        stage("outbox", 912_680_550, 1_073_741_824, "bytes", "warn", why="85 % of `held_bytes_max` is in use."),
        stage(
            "peer",
            401,
            None,
            "connections",
            "lost",
            7,
            7,
            "401 peers do not read, and 7 were closed for it: lower `write_stall_timeout`.",
        ),
        stage("host", 1_000_016, 1_048_576, "descriptors"),
    ]
    report["overload"] = {"stage": 3, "name": "shedding connections", "cause": "the table is at 99 %", "shed_total": 88_120}
    report["admission"] = {
        "limits": [
            admission_limits(20, {"per_second": 5, "burst": 25}, 50_000, {"per_second": 1_100, "burst": 1_500}, 48_211, 2),
            admission_limits(None, None, None, None, None, 0),
        ],
        "accept_rate": {"per_second": 20_000, "burst": 5_000},
        "changes": [
            {"ago_seconds": 312.5, "what": "per_address from off to 20"},
            {"ago_seconds": 2.25, "what": "192.0.2.0/24 denied for 3600 s"},
        ],
    }
    report["shards"] = [shard(n, 0.97 - n / 100, 0.021, 249_967 + n) for n in range(4)]
    report["rates"] |= {"accepts_per_second": 0.4, "closes_per_second": 1_204.5}
    return report


def stalled():
    report = calm()
    report["funnel"][1] |= {
        "now": 4_097,
        "capacity": 16_384,
        "state": "warn",
        "why": "311 connections wait for shard 1, which is stalled: see handler.",
    }
    report["funnel"][4] |= {
        "state": "lost",
        "lost_recently": 6,
        "lost_total": 23,
        "why": "shard 1 is stalled for 3.2 s: the call of 10.1.2.4:5511 waits for a lock (futex_do_wait). Do not block in a handler: use `spawn_blocking`.",
    }
    report["shards"][1] |= {
        "stalled_seconds": 3.21,
        "stale": True,
        "busy": 0.0,
        "starved": 0.0,
        "asleep": 1.0,
        "accept_queue": 311,
    }
    report["shards"][3] |= {"stalled_seconds": 0.026, "busy": 0.62, "starved": 0.38, "asleep": 0.0}
    report["shards"][2] |= {"stale": True}
    # It was blocked before it could publish anything.
    report["shards"][3] |= {name: None for name in ("connections", "turns", "frames", "buffers_used", "buffers")}
    report["silent_shards"] = [1, 2]
    report["stalls"] += [
        stall(3, 0.026, 0.026, ongoing=True, cause="other", waits_in="do_sys_poll", work="message", peer=None, connection=None),
        stall(1, 3.21, 3.21, ongoing=True, queue_waiting=311, queue_lost=6),
    ]
    return report


def draining():
    report = calm()
    report["server"] |= {"phase": "draining", "connections": 1}
    report["overload"] = None
    report["admission"] = None
    report["accept_queues"] = []
    report["outboxes"] = report["outboxes"][:2]
    report["waiting_calls"] = []
    report["stalls"] = []
    report["findings"] = []
    return report


def hostile():
    """Text with HTML, and with what ends lines, at each place that has text."""
    evil = '</script><img src=x onerror="window.hacked=1"><b>&amp;\u2028\'"`${alert(1)}'
    report = copy.deepcopy(stalled())

    def spoil(node):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(value, str) and key not in ("severity", "phase", "unit", "name", "state") or key == "program":
                node[key] = evil + str(value)
            elif isinstance(value, (dict, list)):
                spoil(value)

    spoil(report)
    report["funnel"][0] |= {"name": evil, "unit": evil}
    report["funnel"][2] |= {"state": 'calm" onclick="x'}
    report["services"][0]["name"] = evil
    report["outboxes"][0]["id"] = "../../drain?" + evil
    report["outboxes"][1]["peer"] = "x" * 4_000
    report["findings"][0]["severity"] = evil
    return report


def many():
    """A machine of 53 shards with a million connections, and every list as long as it becomes."""
    report = calm()
    report["shards"] = [shard(n, (n * 37 % 100) / 100, (n % 7) / 1000, 18_867 + n) for n in range(53)]
    report["shards"][40] |= {"stalled_seconds": 0.744}
    report["accept_queues"] = [
        {"listener": "0.0.0.0:7000", "shard": n, "waiting": n * 31 % 77, "capacity": 4_096, "lost": n % 5} for n in range(53)
    ]
    report["server"] |= {
        "connections": 1_000_000,
        "connections_max": 10_000_000,
        "memory_bytes": 257_698_037_760,
        "uptime_seconds": 31_536_000.0,
    }
    report["waiting_calls"] = [
        connection(n, f"10.20.4.{n}:51{n}", 0, calls=3, oldest_call_seconds=90.0 - 4 * n) for n in range(20)
    ]
    report["stalls"] = [stall(n % 53, 640.0 - 10 * n, 0.025 * (n + 1)) for n in range(64)]
    report["closes"] = [close(f"reason_{n}", "peer", 10 ** (n % 13), n) for n in range(37)]
    report["findings"] = [
        finding(
            f"check_{n}",
            severity,
            "descriptors of the process",
            "1 024",
            "1 000 064 = 1 000 000 connections + 64",
            "accepting pauses at 1 024",
            "ulimit -n 1000064",
        )
        for n, severity in enumerate(["error", "error", "warn", "warn", "warn", "info", "info"])
    ]
    return report


def bare():
    """A server of another version than the page."""
    return {"server": {"pid": 7}, "funnel": [{"name": "wormhole", "state": "bent"}]}


STATES = {state.__name__: state for state in (calm, shedding, stalled, draining, hostile, many)}


def fields_of_types(source: Path) -> dict[str, list[str]]:
    """The fields of each struct of crates/report."""
    structs = re.findall(r"^pub struct (\w+) \{\n(.*?)^\}", source.read_text(), re.MULTILINE | re.DOTALL)
    return {name: re.findall(r"^    pub (\w+):", body, re.MULTILINE) for name, body in structs}


def differences_of_fields(source: Path) -> list[str]:
    """What these reports lack of the types, or have too much. Empty if the page is shown what a server sends."""
    report = calm() | {part: shedding()[part] for part in ("overload", "admission")}
    admission = report["admission"]
    examples = {
        "Report": report,
        "ServerFacts": report["server"],
        "Stage": report["funnel"][0],
        "Overload": report["overload"],
        "Admission": admission,
        "AdmissionLimits": admission["limits"][0],
        "Rate": admission["accept_rate"],
        "TimedNetwork": admission["limits"][0]["networks"][0],
        "AdmissionChange": admission["changes"][0],
        "Rates": report["rates"],
        "ShardReport": report["shards"][0],
        "ServiceReport": report["services"][0],
        "AcceptQueue": report["accept_queues"][0],
        "Close": report["closes"][0],
        "Times": report["times"],
        "Quantiles": report["times"]["turn"],
        "Connection": report["outboxes"][0],
        "Stall": report["stalls"][0],
        "Finding": report["findings"][0],
    }
    types = fields_of_types(source)
    wrong = []
    for name, example in examples.items():
        fields = types.get(name)
        if fields is None:
            wrong.append(f"crates/report has no struct {name}")
        elif set(fields) != set(example):
            wrong.append(f"{name} differs in {sorted(set(fields) ^ set(example))}")
    return wrong
