"""Talks to a server with redis-py; run by kv_clients. Arguments: port and shards, 1 for redis-server."""

import random, sys, threading, time
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

PORT, SHARDS = int(sys.argv[1]), int(sys.argv[2])
LARGE_BYTES = 1_000_000
checks = 0


def same(got, expected, what=""):
    global checks
    checks += 1
    assert got == expected, f"{what}: {str(got)[:300]!r} instead of {str(expected)[:300]!r}"


def fails(text, call, *args):
    try:
        answer = call(*args)
    except redis.exceptions.ResponseError as error:
        return same(text in str(error), True, f"{error!r} has no {text!r}")
    raise AssertionError(f"{answer!r} instead of an error with {text!r}")


def eventually(condition, what):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"20 s later still not: {what}"
        time.sleep(0.01)


def connect(protocol, **options):
    """A client with one connection, which is not made again when it breaks."""
    options = {"socket_timeout": 20, "max_connections": 1, "retry": Retry(NoBackoff(), 0)} | options
    return redis.Redis(port=PORT, protocol=protocol, **options)


def at_once(*calls):
    """Runs each call on its own thread."""
    errors = []

    def run(call):
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[call]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def strings(client):
    same(client.ping(), True)
    same(client.echo("two words"), b"two words")
    same(client.get("none"), None)
    same(client.set("k", "v"), True)
    same(client.get("k"), b"v")
    same((client.set("k", "w", nx=True), client.set("none", "w", xx=True)), (None, None))
    same(client.set("k", "w", xx=True, get=True), b"v")
    same((client.append("k", "123"), client.strlen("k"), client.get("k")), (4, 4, b"w123"))
    same((client.type("k"), client.type("none")), (b"string", b"none"))
    same(client.set("empty", ""), True)
    same((client.get("empty"), client.exists("empty")), (b"", 1))
    # Enough keys that each shard has some, and some requests want several shards.
    many = {f"many:{n}": f"value {n}".encode() for n in range(500)}
    same(client.mset(many), True)
    same(client.mget([*many, "none"]), [*many.values(), None])
    same((client.exists("none", *many), client.delete("none", *many), client.exists(*many)), (500, 500, 0))


def any_bytes(client):
    generator = random.Random(7)
    alphabet = [bytes(range(256)), b"\r\n", b"\r\n+OK\r\n", b"$5\r\n*2\r\n", b"\0" * 9]
    for value in [*alphabet, *(generator.randbytes(n) for n in (1, 100, 16_384, 65_537, LARGE_BYTES))]:
        same(client.set(value[:1000], value), True)
        same(client.get(value[:1000]), value)
    # Replies far beyond what the server keeps for a connection that reads slowly.
    same(client.mget([value[:1000]] * 40) == [value] * 40, True, "40 large values at once")
    same(client.delete(value[:1000]), 1)


def counters(client, protocol):
    same((client.incr("n"), client.incrby("n", 41), client.decr("n"), client.decrby("n", 50)), (1, 42, 41, -9))
    same((client.set("n", 2**63 - 2), client.incr("n")), (True, 2**63 - 1))
    fails("increment or decrement would overflow", client.incr, "n")
    fails("value is not an integer or out of range", client.incrby, "n", "ten")

    def adds():
        with connect(protocol) as other:
            for n in range(250):
                other.incrby(f"sum:{n % 10}", n)

    at_once(*[adds] * 8)
    same(sum(map(int, client.mget([f"sum:{n}" for n in range(10)]))), 8 * sum(range(250)), "sums of 8 clients")


def pipelines(client):
    for count in 1, 16, 5000:
        pipe = client.pipeline(transaction=False)
        for n in range(count):
            pipe.set(f"p:{n % 700}", n).get(f"p:{n % 700}").incr("piped")
        before = int(client.get("piped") or 0)
        got = pipe.execute()
        same(got[0::3], [True] * count)
        same(got[1::3], [str(n).encode() for n in range(count)], "own writes, in order")
        same(got[2::3], list(range(before + 1, before + count + 1)))
    # An error takes its place among the replies.
    pipe = client.pipeline(transaction=False).set("text", "x").incr("text").get("text").execute_command("nosuch")
    got = pipe.ping().execute(raise_on_error=False)
    same([type(one) for one in got], [bool, redis.ResponseError, bytes, redis.ResponseError, bool], got)


def expiry(client):
    same(client.set("brief", "x", px=60_000), True)
    same((0 < client.pttl("brief") <= 60_000, 0 < client.ttl("brief") <= 60), (True, True))
    same((client.expire("brief", 100, gt=True), client.expire("brief", 10, gt=True)), (True, False))
    same(client.set("brief", "y", keepttl=True), True)
    same(90 < client.ttl("brief") <= 100, True)
    same((client.set("brief", "z"), client.ttl("brief"), client.ttl("none")), (True, -1, -2))
    for n in range(100):
        client.set(f"brief:{n}", "x", px=1 + n)
    eventually(lambda: not any(client.mget([f"brief:{n}" for n in range(100)])), "a hundred keys are over")
    same(client.expireat("brief", 1), True)
    same(client.exists("brief"), 0)
    fails("invalid expire time in 'set' command", lambda: client.set("k", "v", ex=0))


def scans(client):
    client.flushall()
    keys = {f"scan:{n}".encode() for n in range(3000)}
    client.mset({key: "x" for key in keys})
    same(client.dbsize(), 3000)
    for count in 1, 10, 5000:
        same(set(client.scan_iter(count=count)), keys, f"scan by {count}")
    same(set(client.scan_iter(match="scan:12*")), {key for key in keys if key.startswith(b"scan:12")})
    same((set(client.scan_iter(_type="string")), set(client.scan_iter(_type="list"))), (keys, set()))
    same(set(client.keys("scan:299?")), {f"scan:299{n}".encode() for n in range(10)})
    # Keys that stay are seen though others come and go.
    seen = set()
    for n, key in enumerate(client.scan_iter(count=20)):
        seen.add(key)
        client.set(f"guest:{n % 50}", n)
        client.delete(f"guest:{(n + 25) % 50}")
    same(seen >= keys, True, "a scan misses keys that were there all the time")
    same((client.flushdb(), client.dbsize()), (True, 0))


def errors(client):
    fails("unknown command 'nosuch'", client.execute_command, "nosuch", "x")
    fails("wrong number of arguments for 'get' command", client.execute_command, "get")
    fails("syntax error", client.execute_command, "set", "k", "v", "bogus")
    same(client.ping(), True)


def subscribers(protocol, count):
    """`count` at least, and two on each shard at least, each with its connection alone."""
    found, shards = [], []
    while len(found) < count or any(shards.count(n) < 2 for n in range(SHARDS)):
        assert len(found) < 200, f"of {len(found)} connections the shards have {shards}"
        client = connect(protocol)
        # The connection is in the pool again afterwards, where the subscriber takes it.
        shards.append(client.info("server").get("shard", 0))
        found.append(client.pubsub())
    return found


def hears(subscriber, kind):
    message = subscriber.get_message(timeout=20)
    assert message and message["type"] == kind, f"{message} instead of a {kind}"
    return message


def publishing(protocol):
    readers = subscribers(protocol, 8)
    for n, reader in enumerate(readers):
        reader.subscribe("news", f"own:{n}")
        same([(hears(reader, "subscribe")["channel"], k) for k in (1, 2)], [(b"news", 1), (f"own:{n}".encode(), 2)])
        reader.psubscribe("new[rs]*")
        same((hears(reader, "psubscribe")["data"]), 3)
    publisher = connect(protocol)
    same(publisher.publish("none", "x"), 0)
    same(publisher.publish("own:1", "x"), 1)
    same(hears(readers[1], "message")["data"], b"x")
    # Bytes of any kind and size, once for the channel and once for the pattern.
    for data in b"", bytes(range(256)), b"\r\n" * 9, random.Random(3).randbytes(LARGE_BYTES):
        same(publisher.publish("news", data), 2 * len(readers))
        for reader in readers:
            same(sorted((m["type"], m["data"] == data) for m in (reader.get_message(timeout=20) for _ in range(2))),
                 [("message", True), ("pmessage", True)])
    for reader in readers:
        reader.punsubscribe("new[rs]*")
        same(hears(reader, "punsubscribe")["data"], 2)

    # What a connection publishes is heard in its order, by each subscriber, wherever either lies.
    def publishes(number):
        with connect(protocol) as other:
            for n in range(300):
                assert other.publish("news", f"{number} {n}") == len(readers)

    def listens(reader):
        last = [-1] * 6
        for _ in range(6 * 300):
            number, n = map(int, hears(reader, "message")["data"].split())
            assert n == last[number] + 1, f"message {n} of publisher {number} after {last[number]}"
            last[number] = n

    at_once(*[lambda number=number: publishes(number) for number in range(6)],
            *[lambda reader=reader: listens(reader) for reader in readers])
    same(all(reader.get_message(timeout=0) is None for reader in readers), True, "nothing is heard twice")

    # One leaves the channel, and one its connection.
    readers[0].unsubscribe("news")
    same(hears(readers[0], "unsubscribe")["data"], 1)
    same(publisher.publish("news", "x"), len(readers) - 1)
    for reader in readers[1:]:
        hears(reader, "message")
    readers[1].connection.disconnect()
    eventually(lambda: publisher.publish("news", "x") == len(readers) - 2, "the subscriber is gone")
    for reader in readers:
        reader.close()


def slow_reader(protocol):
    """A subscriber that does not read is cut off, and another one misses nothing."""
    deaf, reader = connect(protocol).pubsub(), connect(protocol).pubsub()
    for one in deaf, reader:
        one.subscribe("flood")
        hears(one, "subscribe")
    with connect(protocol) as publisher:
        for n in range(200):
            count = publisher.publish("flood", str(n).encode() * 300_000)
            same(hears(reader, "message")["data"], str(n).encode() * 300_000)
            if count == 1:
                break
        same(count, 1, "the deaf subscriber is cut off")
    deaf.close()
    reader.close()


def subscribed(protocol):
    """What a connection may do while it is subscribed."""
    with connect(protocol, health_check_interval=0) as client:
        connection = client.connection_pool.get_connection()

        def asks(*command):
            connection.send_command(*command)
            return connection.read_response(push_request=True) if protocol == 3 else connection.read_response()

        same(asks("SUBSCRIBE", "here"), [b"subscribe", b"here", 1])
        if protocol == 2:
            fails("Can't execute 'get'", asks, "GET", "k")
            same(asks("PING"), [b"pong", b""])
        else:
            same(asks("SET", "k", "v"), b"OK")
            same(asks("PING"), b"PONG")
            # A message to itself comes before the reply or behind it.
            got = [asks("PUBLISH", "here", "x"), connection.read_response(push_request=True)]
            same([one for one in got if one != 1], [[b"message", b"here", b"x"]])
        same(asks("UNSUBSCRIBE"), [b"unsubscribe", b"here", 0])
        same(asks("UNSUBSCRIBE"), [b"unsubscribe", None, 0])
        same(asks("SET", "k", "v"), b"OK")
        connection.disconnect()


def handshake(protocol):
    with connect(protocol) as client:
        greeting = client.execute_command("HELLO", protocol)
        if not isinstance(greeting, dict):
            greeting = dict(zip(greeting[::2], greeting[1::2]))
        same(greeting[b"proto"], protocol)
        same(client.config_get("appendonly"), {"appendonly": "no"})
        same(client.client_setname("tester"), True)
        same(client.client_getname() in ("tester", b"tester"), True)


for protocol in 2, 3:
    with connect(protocol) as client:
        client.flushall()
        handshake(protocol)
        strings(client)
        any_bytes(client)
        counters(client, protocol)
        pipelines(client)
        expiry(client)
        scans(client)
        errors(client)
    publishing(protocol)
    slow_reader(protocol)
    subscribed(protocol)
print(f"redis-py {redis.__version__}: {checks} checks, as expected")
