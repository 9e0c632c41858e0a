// Talks to examples/mqtt by MQTT.js, in both versions, by each transport: mqtt.mjs PORT WS_PORT.
import assert from "node:assert/strict";
import mqtt from "mqtt";
import WebSocket from "ws";

const [port, ws] = process.argv.slice(2, 4);
const urls = [`mqtt://127.0.0.1:${port}`, `ws://127.0.0.1:${ws}`];

async function connect(url, protocolVersion, options = {}) {
    const client = await mqtt.connectAsync(url, { protocolVersion, reconnectPeriod: 0, ...options }, false);
    client.heard = [];
    client.on("message", (topic, payload, packet) => {
        client.heard.push({ topic, payload: payload.toString(), retain: packet.retain });
        client.wakes?.();
    });
    client.hears = async (count) => {
        const signal = AbortSignal.timeout(20_000);
        while (client.heard.length < count) {
            signal.throwIfAborted();
            await new Promise((wakes) => {
                client.wakes = wakes;
                setTimeout(wakes, 100);
            });
        }
        return client.heard.splice(0);
    };
    return client;
}

for (const url of urls) {
    for (const version of [4, 5]) {
        const name = `${new URL(url).protocol}${version}`;
        const reader = await connect(url, version);
        const granted = await reader.subscribeAsync([`${name}/#`, `${name}/+/x`], { qos: 2 });
        assert.deepEqual(granted.map((grant) => grant.qos), [1, 1]);
        await reader.unsubscribeAsync(`${name}/+/x`);
        const writer = await connect(urls[0], version);
        const sent = Array.from({ length: 100 }, (_, n) => String(n));
        await Promise.all(sent.map((text) => writer.publishAsync(`${name}/t`, text, { qos: 1 })));
        assert.deepEqual((await reader.hears(100)).map((heard) => heard.payload), sent);
        const large = "x".repeat(200_000);
        await writer.publishAsync(`${name}/large`, large, { qos: 1, retain: true });
        assert.equal((await reader.hears(1))[0].payload, large);
        const later = await connect(url, version);
        await later.subscribeAsync(`${name}/large`);
        assert.deepEqual(await later.hears(1), [{ topic: `${name}/large`, payload: large, retain: true }]);
        await writer.publishAsync(`${name}/large`, "", { qos: 1, retain: true });

        // A session that is kept, and a will.
        const kept = { clientId: `${name}-kept`, clean: false, properties: version === 5 ? { sessionExpiryInterval: 600 } : undefined };
        const will = { topic: `${name}/will`, payload: Buffer.from("lost"), qos: 1, retain: false };
        const lost = await connect(url, version, { ...kept, will });
        await lost.subscribeAsync(`${name}/away`, { qos: 1 });
        await reader.hears(1);
        lost.stream.destroy();
        assert.deepEqual(await reader.hears(1), [{ topic: `${name}/will`, payload: "lost", retain: false }]);
        await writer.publishAsync(`${name}/away`, "kept for it", { qos: 1 });
        const back = await mqtt.connect(url, { protocolVersion: version, reconnectPeriod: 0, ...kept });
        const heard = await new Promise((resolve) => back.on("message", (_, payload) => resolve(payload.toString())));
        assert.equal(heard, "kept for it");
        await Promise.all([reader, writer, later, back].map((client) => client.endAsync()));
        console.log(`MQTT.js, ${name}: as expected`);
    }
}

// The protocol is one of bytes: text is refused.
const socket = new WebSocket(urls[1], "mqtt");
socket.onopen = () => socket.send("text");
assert.equal(await new Promise((resolve) => (socket.onclose = (end) => resolve(end.code))), 1003);
console.log("WebSocket with text: refused");
