"""What the page has to say of a report: figures are written here a second time, by other code than the page's."""

from decimal import ROUND_FLOOR, ROUND_HALF_UP, Decimal

DASH = "–"
STAGES = {
    "syn_queue": "SYN queue",
    "accept_queue": "Accept queue",
    "table": "Table",
    "first_frame": "First frame",
    "handler": "Handler",
    "outbox": "Outbox",
    "peer": "Peer",
    "host": "Host",
}
SIGNS = {"calm": "✓ calm", "warn": "! warning", "lost": "✕ trouble", "error": "✕ error", "info": "i info"}
LADDER = ["calm", "busy", "shedding requests", "shedding connections", "accepting is paused"]
# Rows of a list, until all are asked for.
ROWS = 8
HOLDERS = {
    "cpu": "its own computing",
    "lock": "a lock or channel",
    "read": "a blocking read",
    "sleep": "a sleep",
    "starved": "lack of CPU",
}


def fixed(value, places):
    return str(Decimal(value).quantize(Decimal(1).scaleb(-places), ROUND_HALF_UP))


def whole(value):
    return f"{int(Decimal(value).quantize(Decimal(1), ROUND_HALF_UP)):,}".replace(",", "\u202f")


def three_digits(value):
    if value < 9.995:
        return fixed(value, 2)
    return fixed(value, 1) if value < 99.95 else whole(value)


def count(value):
    if value is None:
        return DASH
    if value < 999_999.5:
        return whole(value)
    for size, name in [(1e6, "M"), (1e9, "G")]:
        if value < size * 999.5:
            return f"{three_digits(value / size)} {name}"
    return f"{three_digits(value / 1e12)} T"


def bytes_(value):
    if value is None:
        return DASH
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    power = 0
    while power < 5 and value / 1024**power >= 1023.5:
        power += 1
    return f"{whole(value) if power == 0 else three_digits(value / 1024**power)} {units[power]}"


def rate(value):
    if value is None:
        return DASH
    return (fixed(value, 1) if 0 < value < 9.95 else count(value)) + "/s"


def share(value):
    if value is None:
        return DASH
    return fixed(value * 100, 1 if 0 < value < 0.0995 else 0) + " %"


def time(seconds):
    if seconds is None:
        return DASH
    if seconds < 0.0009995:
        return f"{whole(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{fixed(seconds * 1e3, 1 if seconds < 0.00995 else 0)} ms"
    if seconds < 59.5:
        return f"{fixed(seconds, 1 if seconds < 9.95 else 0)} s"
    total = int(Decimal(seconds).quantize(Decimal(1), ROUND_HALF_UP))
    minutes, hours, days = total // 60, total // 3600, total // 86_400
    if days:
        return f"{whole(days)} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {total % 60} s"


def upper(text):
    return text[:1].upper() + text[1:]


def plural(value, one):
    return f"{count(value)} {one}" + ("" if value == 1 else "s")


def dots(*parts):
    return " · ".join(part for part in parts if part)


def cause_of(report):
    for state in ("lost", "warn"):
        for stage in report["funnel"]:
            if stage["state"] == state:
                return stage
    return None


def name_of(stage):
    return STAGES.get(stage["name"], stage["name"])


def sign_of(state):
    return SIGNS.get(state, f"? {state}")


def status(report):
    """The class, sign, headline and sentence of the line at the top."""
    cause, overload = cause_of(report), report["overload"]
    stalled = [shard for shard in report["shards"] if shard["stalled_seconds"] is not None]
    draining = report["server"]["phase"] == "draining"
    connections = plural(report["server"]["connections"], "connection")

    def head(text):
        return upper(f"Draining, {text}" if draining else text)

    if cause and cause["state"] == "lost":
        return "lost", "✕", head(f"trouble at: {name_of(cause)}"), upper(cause["why"])
    if overload and overload["stage"] > 1:
        stage = overload["stage"]
        return "lost" if stage > 2 else "warn", "!", head(f"overload stage {stage}: {LADDER[stage]}"), upper(overload["cause"])
    if stalled:
        numbers = ", ".join(str(shard["shard"]) for shard in stalled)
        going_on = [stall["text"] for stall in report["stalls"] if stall["ongoing"]] or ["See the last stalls."]
        return "lost", "✕", head(f"stalled: shard {numbers}"), upper(going_on[-1])
    if cause:
        return "warn", "!", head(f"warning at: {name_of(cause)}"), upper(cause["why"])
    if draining:
        return "warn", "▼", "Draining", f"{connections} left; new ones are turned away."
    for finding in report["findings"]:
        if finding["severity"] == "error":
            return "warn", "!", f"Doctor: {finding['what']}", f"It is {finding['value']}. {finding['fix']}"
    shards = plural(len(report["shards"]), "shard")
    return "calm", "✓", "Calm", f"{connections} on {shards}; nothing is lost, and each stage has room."


def facts(report):
    server = report["server"]
    return dots(
        f"ringserve {server['version']}",
        server["driver"],
        plural(len(report["shards"]), "shard"),
        f"process {server['pid']}",
        f"up {time(server['uptime_seconds'])}",
        f"{count(server['connections'])} of {count(server['connections_max'])} connections",
        plural(server["upstreams"], "upstream"),
        f"{bytes_(server['memory_bytes'])} resident",
        server["phase"],
    )


def width(part):
    # As `toFixed` rounds: 0.25 is 0.3.
    return f"{Decimal(min(100, max(0, part * 100))).quantize(Decimal('0.1'), ROUND_HALF_UP)}%"


def funnel(report):
    window, cause, stages = time(report["server"]["window_seconds"]), cause_of(report), []
    for stage in report["funnel"]:
        amount = bytes_ if stage["unit"] == "bytes" else count
        capacity = stage["capacity"]
        of = ("" if capacity is None else f"of {amount(capacity)} ") + ("" if stage["unit"] == "bytes" else stage["unit"])
        texts = [
            name_of(stage),
            sign_of(stage["state"]),
            amount(stage["now"]),
            of,
            f"{count(stage['lost_recently'])} lost in {window}" if stage["lost_total"] else "none lost",
            f"{count(stage['lost_total'])} since the start" if stage["lost_total"] else "",
        ]
        if stage is cause:
            texts.append("first trouble" if stage["state"] == "lost" else "first warning")
        stages.append(
            {"texts": [text.strip() for text in texts if text.strip()], "bar": width(stage["now"] / capacity if capacity else 0)}
        )
    return stages


def whys(report):
    cause = cause_of(report)
    others = [stage for stage in report["funnel"] if stage is not cause and stage["why"]]
    lines = [f"{sign_of(stage['state'])} at: {name_of(stage)}. {upper(stage['why'])}" for stage in others]
    return lines or [f"No {'other ' if cause else ''}stage has a loss or a warning."]


def where(connection):
    return dots(connection["service"], f"shard {connection['shard']}", connection["state"], f"id {connection['id']}")


def connection_row(connection, *special):

    def in_out(figure, kind):
        # Only connections with an account know.
        if connection[f"{kind}_in"] is None:
            return [DASH]
        return [f"{figure(connection[f'{kind}_in'])} in", f"{figure(connection[f'{kind}_out'])} out"]

    return {
        "Peer": [connection["peer"], where(connection)],
        "special": [*special],
        "Age": [time(connection["age_seconds"]), f"idle {time(connection['idle_seconds'])}"],
        "Bytes": in_out(bytes_, "bytes"),
        "Frames": in_out(count, "frames"),
        "Action": [f"Close the connection of {connection['peer']}"],
    }


def renamed(row, label):
    return {label if key == "special" else key: value for key, value in row.items()}


def shard_row(shard):
    stalled = shard["stalled_seconds"] is not None
    state = f"✕ stalled {time(shard['stalled_seconds'])}" if stalled else "! old figures" if shard["stale"] else "✓ serves"
    starved = f"starved {width(shard['starved'])}"
    bar = [starved, f"stalled {width(1 - shard['starved'])}"] if stalled else [f"busy {width(shard['busy'])}", starved]
    return {
        "Shard": [str(shard["shard"]), state],
        "Last second": bar,
        "Busy": [share(shard["busy"])],
        "Starved": [share(shard["starved"])],
        "Asleep": [share(shard["asleep"])],
        "Connections": [count(shard["connections"]), ", ".join(
            [f"{count(shard['accept_queue'])} waiting"]
            + [f"{count(n)} accepted ({why})" for why, n in shard.get("accepted_waiting", {}).items()]
        )],
        "Frames": [count(shard["frames"]), plural(shard["turns"], "turn")],
        "Buffers": [count(shard["buffers_used"]), f"of {count(shard['buffers'])}"],
    }


def stall_row(stall):
    about = dots(
        stall["frame_bytes"] is not None and f"frame of {bytes_(stall['frame_bytes'])}",
        stall["connection"] and f"id {stall['connection']}",
    )
    return {
        "Shard": [str(stall["shard"]), "✕ goes on" if stall["ongoing"] else f"{time(stall['ago_seconds'])} ago"],
        "Lasted": [time(stall["lasted_seconds"])],
        "Worked on": [
            ("several, last: " if stall["several"] else "") + stall["work"] + (f" of {stall['peer']}" if stall["peer"] else ""),
            about,
        ],
        "Held up by": [HOLDERS.get(stall["cause"], stall["cause"]), f"in {stall['waits_in']}" if stall["waits_in"] else ""],
        "Accept queue": [f"{count(stall['queue_waiting'])} waiting", f"{count(stall['queue_lost'])} lost"],
    }


def shed(overload):
    """What was shed, or what becomes of the load of a stage that sheds nothing."""
    if overload["shed_total"] or overload["stage"] < 2:
        return f"{plural(overload['shed_total'], 'request')} shed since the start"
    return "newcomers wait, or are refused" if overload["stage"] > 2 else "the service sheds none"


def more(rows):
    """What a list says of the rows that it leaves out."""
    return f"{len(rows) - ROWS} more" if len(rows) > ROWS else ""


def panels(report):
    """Each panel's remark and rows; a row is a dict of its columns, each with its lines of text."""
    silent = report["silent_shards"]
    missing = f"✕ shard {', '.join(map(str, silent))} does not answer: its connections are missing" if silent else ""
    overload = report["overload"]
    queues = sorted(report["accept_queues"], key=lambda queue: (-(queue["lost"] or 0), -queue["waiting"]))
    window = f"Last {time(report['server']['window_seconds'])}"
    times = [
        ("turn", "a turn of a loop"),
        ("call", "a call that waited"),
        ("first_frame", "to the first frame"),
        ("send_stall", "a send that waited"),
    ]
    quantiles = {"50 %": "p50", "90 %": "p90", "99 %": "p99", "99.9 %": "p999", "Longest": "max"}

    def time_row(key, what):
        found = report["times"][key]
        row = {"Time": [what], "Counted": [count(found["count"])]}
        return row | {label: [time(found[name]) if found["count"] else DASH] for label, name in quantiles.items()}

    return {
        "shards": (
            "",
            [
                shard_row(shard)
                for shard in sorted(report["shards"], key=lambda shard: (shard["stalled_seconds"] is None, shard["shard"]))
            ],
        ),
        "overload": (
            shed(overload) if overload else "",
            (
                [
                    {
                        "Stage": (
                            [f"{number} {name} ◀ now", overload["cause"]] if number == overload["stage"] else [f"{number} {name}"]
                        )
                    }
                    for number, name in enumerate(LADDER)
                ]
                if overload
                else []
            ),
        ),
        "closes": (
            "",
            [
                {
                    "Reason": [close["reason"]],
                    "Closed by": [close["closed_by"]],
                    window: [count(close["recently"])],
                    "Total": [count(close["total"])],
                }
                for close in sorted(report["closes"], key=lambda close: -close["total"])
            ],
        ),
        "times": ("since the start, to an eighth", [time_row(*row) for row in times]),
        "services": (
            "",
            [
                {
                    "Service": [service["name"]],
                    "Connections": [count(service["connections"])],
                    "Frames": [count(service["frames"]), rate(service["frames_per_second"])],
                }
                for service in report["services"]
            ],
        ),
        "stalls": ("", [stall_row(stall) for stall in reversed(report["stalls"])]),
        "queues": (
            "",
            [
                {
                    "Listener": [queue["listener"]],
                    "Shard": ["all" if queue["shard"] is None else str(queue["shard"])],
                    "Waiting": [f"{count(queue['waiting'])} of {count(queue['capacity'])}"],
                    "Packets lost": [count(queue["lost"])],
                }
                for queue in queues
            ],
        ),
        "doctor": (
            "",
            [
                {
                    "Check": [found["check"], sign_of(found["severity"])],
                    "What": [found["what"]],
                    "Is": [found["value"], found["certainty"]],
                    "Needs": [found["needed"], found["otherwise"]],
                    "Fix": [found["fix"]],
                }
                for found in report["findings"]
            ],
        ),
        "admission": admission(report["admission"]),
        "outboxes": (missing, [renamed(connection_row(c, bytes_(c["outbox_bytes"])), "Outbox") for c in report["outboxes"]]),
        "calls": (
            missing,
            [
                renamed(connection_row(c, time(c["oldest_call_seconds"]), plural(c["calls"], "call")), "Waits")
                for c in report["waiting_calls"]
            ],
        ),
    }


def admission(told):
    """The limits on who is let in: the rate of the server in the remark, with the last change, and a row for each `Admission`."""
    if not told:
        return "", []
    limit = lambda given: f"{count(given['per_second'])}/s, {count(given['burst'])} at once" if given else ""
    changes = [change["what"] for change in told["changes"][-1:]]
    rows = [
        {
            "Per address": [f"{count(of['per_address'])} at once", limit(of["address_rate"])],
            "From all": [
                count(of["connections"]) + (f" of {count(of['connections_max'])}" if of["connections_max"] is not None else ""),
                limit(of["connection_rate"]),
            ],
            "Networks for a time": [count(of["networks_total"])],
        }
        for of in told["limits"]
    ]
    return dots(limit(told["accept_rate"]), *changes), rows


def charts(report):
    rates = report["rates"]
    byte_rate = lambda value: f"{bytes_(value)}/s"
    return [
        ("Connections", count(report["server"]["connections"])),
        ("Accepts ┄ closes", f"{rate(rates['accepts_per_second'])} ┄ {rate(rates['closes_per_second'])}"),
        ("Frames", rate(rates["frames_per_second"])),
        ("Received ┄ sent", f"{byte_rate(rates['received_bytes_per_second'])} ┄ {byte_rate(rates['sent_bytes_per_second'])}"),
        ("Busiest shard", share(max(shard["busy"] for shard in report["shards"]))),
        ("Turns ┄ system calls", f"{rate(rates['turns_per_second'])} ┄ {rate(rates['system_calls_per_second'])}"),
    ]
