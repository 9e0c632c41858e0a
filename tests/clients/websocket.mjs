// Talks to the echo server with the package `ws`: DIRECTORY-OF-THE-PACKAGE URL [AUTHORITY].
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [directory, url, authority] = process.argv.slice(2);
const WebSocket = createRequire(`${directory}/`)("ws");
const ca = authority && readFileSync(authority);
const TEXT = "grüße, ringserve\n".repeat(5000);
const MIB = 1 << 20;

setTimeout(() => {
    console.error("not done after 120 s");
    process.exit(1);
}, 120_000).unref();

async function connected(options = {}) {
    const ws = new WebSocket(url, { ca, ...options });
    const messages = [];
    let wake = () => {};
    ws.on("message", (data, isBinary) => {
        messages.push(isBinary ? data : data.toString());
        wake();
    });
    ws.next = async () => {
        while (messages.length === 0) {
            await new Promise((resolve, reject) => {
                wake = resolve;
                ws.once("close", (code) => reject(new Error(`closed with ${code}`)));
            });
        }
        return messages.shift();
    };
    await once(ws, "open");
    return ws;
}

for (const perMessageDeflate of [false, { threshold: 0 }]) {
    const ws = await connected({ perMessageDeflate });
    assert.equal(ws.extensions, perMessageDeflate ? "permessage-deflate" : "");
    for (const message of ["", "hello", Buffer.from([]), Buffer.from([0, 255]), TEXT, Buffer.alloc(MIB), Buffer.from(TEXT)]) {
        ws.send(message);
        assert.deepEqual(await ws.next(), message);
    }
    ws.send("gr", { fin: false });
    ws.send("", { fin: false });
    ws.send("üße", { fin: true });
    assert.equal(await ws.next(), "grüße");
    for (let n = 0; n < 1000; n++) ws.send(String(n));
    ws.ping("here");
    const [pong] = await once(ws, "pong");
    assert.equal(pong.toString(), "here");
    for (let n = 0; n < 1000; n++) assert.equal(await ws.next(), String(n));
    ws.close();
    await once(ws, "close");
}
for (const [code, reason] of [[1000, ""], [3000, "grüße"], [4999, "x".repeat(123)]]) {
    const ws = await connected();
    ws.close(code, reason);
    const [heard, why] = await once(ws, "close");
    assert.deepEqual([heard, why.toString().slice(0, reason.length)], [code, why.toString()]);
}
for (const perMessageDeflate of [false, true]) {
    const ws = await connected({ perMessageDeflate });
    ws.on("error", () => {});
    ws.send(Buffer.alloc(MIB + 1));
    const [code] = await once(ws, "close");
    assert.equal(code, 1009);
}
console.log(`node: ${url}`);
