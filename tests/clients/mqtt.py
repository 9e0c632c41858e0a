"""Talks to examples/mqtt by paho-mqtt, in both versions: mqtt.py PORT WS_PORT."""

import queue
import sys
import time

import paho.mqtt.client as mqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.subscribeoptions import SubscribeOptions

PORT, WS_PORT = map(int, sys.argv[1:3])
WAIT = 20


def properties(kind, **values):
    made = Properties(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


class Client:
    def __init__(self, version, name="", port=PORT, kept=False, will=None, transport="tcp", **connect):
        five = version == mqtt.MQTTv5
        clean = {} if five else {"clean_session": not kept}
        self.client = mqtt.Client(
            mqtt.CallbackAPIVersion.VERSION2, client_id=name, protocol=version, transport=transport, **clean
        )
        self.heard, self.answers, self.ends = queue.Queue(), queue.Queue(), queue.Queue()
        self.client.on_message = lambda _, __, message: self.heard.put(message)
        self.client.on_connect = lambda _, __, flags, code, given: self.answers.put((flags, code, given))
        self.client.on_subscribe = lambda _, __, mid, codes, ___: self.answers.put([code.value for code in codes])
        self.client.on_unsubscribe = lambda _, __, mid, codes, ___: self.answers.put([code.value for code in codes])
        self.client.on_disconnect = lambda _, __, flags, code, given: self.ends.put(code)
        self.client.reconnect_delay_set(100, 100)
        if will:
            self.client.will_set(*will)
        if five:
            connect["clean_start"] = not kept
            if kept:
                connect["properties"] = properties(PacketTypes.CONNECT, SessionExpiryInterval=600)
        self.client.connect("localhost", port, keepalive=30, **connect)
        self.client.loop_start()
        self.flags, self.code, self.given = self.answers.get(timeout=WAIT)

    def subscribe(self, *args, **more):
        self.client.subscribe(*args, **more)
        return self.answers.get(timeout=WAIT)

    def publish(self, topic, payload, qos=1, **more):
        info = self.client.publish(topic, payload, qos, **more)
        info.wait_for_publish(WAIT)
        assert info.is_published(), (topic, payload)

    def hears(self):
        return self.heard.get(timeout=WAIT)

    def hears_no_more(self):
        time.sleep(0.3)
        assert self.heard.empty(), self.heard.get().payload

    def ends_with(self):
        return self.ends.get(timeout=WAIT).value

    def leave(self):
        self.client.disconnect()
        self.client.loop_stop()

    def vanish(self):
        """The connection ends without a word."""
        self.client.socket().shutdown(2)
        self.client.loop_stop()


def both_versions(version):
    name = f"paho{int(version)}"
    # In order, over all shards and both transports.
    transports = [(PORT, "tcp"), (WS_PORT, "websockets")] * 4
    readers = [Client(version, f"{name}-{n}", port, transport=by) for n, (port, by) in enumerate(transports)]
    for reader in readers:
        assert reader.code == 0 and not reader.flags.session_present
        assert reader.subscribe([(f"{name}/+/a", 1), (f"{name}/#", 2), (f"{name}/x", 0)]) == [1, 1, 0]
        reader.client.unsubscribe([f"{name}/+/a", f"{name}/x"])
        reader.answers.get(timeout=WAIT)
    writer = Client(version, f"{name}-writer")
    for n in range(200):
        writer.client.publish(f"{name}/t", str(n), 1)
    for reader in readers:
        assert [int(reader.hears().payload) for _ in range(200)] == list(range(200))
    large = bytes(range(256)) * 900
    writer.publish(f"{name}/large", large)
    for reader in readers:
        assert reader.hears().payload == large
        reader.hears_no_more()
        reader.leave()

    # Retained, then a will, then a session that is kept.
    writer.publish(f"{name}/kept", "kept", retain=True)
    heir = Client(version, f"{name}-heir")
    assert heir.subscribe(f"{name}/#", 1) == [1]
    message = heir.hears()
    assert (message.payload, message.retain, message.qos) == (b"kept", True, 1)
    writer.publish(f"{name}/kept", "", retain=True)
    assert heir.hears().payload == b""
    Client(version, f"{name}-lost", will=(f"{name}/will", "lost", 1)).vanish()
    assert heir.hears().payload == b"lost"
    Client(version, f"{name}-gone", will=(f"{name}/will", "gone", 1)).leave()
    heir.hears_no_more()
    kept = Client(version, f"{name}-kept", kept=True)
    assert kept.subscribe(f"{name}/away", 1) == [1]
    kept.vanish()
    for n in range(100):
        writer.publish(f"{name}/away", str(n))
    kept = Client(version, f"{name}-kept", kept=True)
    assert kept.flags.session_present
    assert [int(kept.hears().payload) for _ in range(100)] == list(range(100))
    kept.hears_no_more()
    # Taken over.
    other = Client(version, f"{name}-kept", kept=True)
    assert other.flags.session_present
    assert kept.ends_with() == (142 if version == mqtt.MQTTv5 else 128)
    kept.client.loop_stop()
    for client in (other, heir, writer):
        client.leave()
    print(f"paho-mqtt, version {int(version)}: as expected")


def version_five():
    reader, writer = Client(mqtt.MQTTv5), Client(mqtt.MQTTv5)
    assert reader.given.AssignedClientIdentifier != writer.given.AssignedClientIdentifier
    assert reader.given.MaximumQoS == 1 and reader.given.SharedSubscriptionAvailable == 0
    options = SubscribeOptions(qos=1, noLocal=True, retainAsPublished=True, retainHandling=2)
    assert reader.subscribe([("five/t", options), ("$share/g/t", SubscribeOptions(1))]) == [1, 0x8F]
    reader.publish("five/t", "own")
    sent = properties(PacketTypes.PUBLISH, MessageExpiryInterval=100, ContentType="text/plain", ResponseTopic="five/r")
    sent.UserProperty, sent.CorrelationData = [("a", "1"), ("a", "2")], b"\0\1"
    writer.publish("five/t", "hello", retain=True, properties=sent)
    message = reader.hears()
    got = message.properties
    assert (message.payload, message.retain) == (b"hello", True)
    assert (got.ContentType, got.ResponseTopic, got.CorrelationData) == ("text/plain", "five/r", b"\0\1")
    assert got.UserProperty == [("a", "1"), ("a", "2")] and 98 <= got.MessageExpiryInterval <= 100
    writer.publish("five/t", "", retain=True)
    reader.leave()
    # What is refused.
    aliases = Client(mqtt.MQTTv5)
    aliases.client.publish("t", "x", 0, properties=properties(PacketTypes.PUBLISH, TopicAlias=1))
    assert aliases.ends_with() == 0x82
    aliases.client.loop_stop()
    ids = Client(mqtt.MQTTv5)
    ids.client.subscribe("t", 0, properties=properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=1))
    assert ids.ends_with() == 0x82
    ids.client.loop_stop()
    writer.client.publish("t", "x", 2)
    assert writer.ends_with() == 0x9B
    writer.client.loop_stop()
    print("paho-mqtt, what version 5 alone has: as expected")


both_versions(mqtt.MQTTv311)
both_versions(mqtt.MQTTv5)
version_five()
