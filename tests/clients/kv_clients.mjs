// Talks to a server with ioredis; run by kv_clients. Arguments: folder with node_modules, and port.
import assert from "node:assert/strict";
import { randomBytes } from "node:crypto";
import { createRequire } from "node:module";
import { join } from "node:path";

const [folder, port] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const Redis = require("ioredis");
let checks = 0;
const clients = [];

function same(got, expected, what) {
    checks += 1;
    assert.deepEqual(got, expected, what);
}

async function fails(text, promise) {
    checks += 1;
    await assert.rejects(promise, (error) => error.message.includes(text));
}

// A client whose connection is not made again when it breaks.
function connect(protocol, options = {}) {
    const client = new Redis({
        port: Number(port), protocol, retryStrategy: null, maxRetriesPerRequest: 0, commandTimeout: 20_000, ...options,
    });
    client.on("error", (error) => { throw error; });
    clients.push(client);
    return client;
}

async function eventually(condition, what) {
    for (const end = Date.now() + 20_000; !(await condition());) assert(Date.now() < end, `20 s later still not: ${what}`);
}

const numbers = (count) => [...Array(count).keys()];

async function strings(client) {
    same(await client.ping(), "PONG");
    same(await client.get("none"), null);
    same(await client.set("k", "v"), "OK");
    same([await client.set("k", "w", "NX"), await client.set("none", "w", "XX")], [null, null]);
    same(await client.set("k", "ä€𝄞", "XX", "GET"), "v");
    same([await client.get("k"), await client.strlen("k"), await client.append("k", "1")], ["ä€𝄞", 9, 10]);
    const many = Object.fromEntries(numbers(500).map((n) => [`many:${n}`, `value ${n}`]));
    same(await client.mset(many), "OK");
    same(await client.mget(...Object.keys(many), "none"), [...Object.values(many), null]);
    same([await client.exists("none", ...Object.keys(many)), await client.del("none", ...Object.keys(many))], [500, 500]);
    for (const value of [Buffer.alloc(0), Buffer.from(numbers(256)), randomBytes(100_000), randomBytes(1_000_000)]) {
        same(await client.set("bytes", value), "OK");
        same((await client.getBuffer("bytes")).equals(value), true, "bytes come back as they were");
    }
}

async function counters(client, protocol) {
    same([await client.incr("n"), await client.incrby("n", 41), await client.decrby("n", 50)], [1, 42, -8]);
    await Promise.all(numbers(8).map(async () => {
        const other = connect(protocol);
        await Promise.all(numbers(250).map((n) => other.incrby(`sum:${n % 10}`, n)));
        other.disconnect();
    }));
    const sums = await client.mget(numbers(10).map((n) => `sum:${n}`));
    same(sums.reduce((sum, one) => sum + Number(one), 0), 8 * 250 * 249 / 2, "sums of 8 clients");
}

async function pipelines(client, protocol) {
    const pipe = client.pipeline();
    for (const n of numbers(3000)) pipe.set(`p:${n % 700}`, n).get(`p:${n % 700}`).incr("piped");
    same(await pipe.exec(), numbers(3000).flatMap((n) => [[null, "OK"], [null, `${n}`], [null, n + 1]]));
    const mixed = await client.pipeline().set("text", "x").incr("text").get("text").call("nosuch").ping().exec();
    same(mixed.map(([error, value]) => error ? "error" : value), ["OK", "error", "x", "error", "PONG"]);
    // Commands of one turn go out together by themselves.
    const automatic = connect(protocol, { enableAutoPipelining: true });
    same(await Promise.all(numbers(500).map((n) => automatic.set(`auto:${n}`, n))), Array(500).fill("OK"));
    same(await Promise.all(numbers(500).map((n) => automatic.get(`auto:${n}`))), numbers(500).map(String));
    same(await automatic.quit(), "OK");
}

async function expiry(client) {
    same(await client.set("brief", "x", "PX", 60_000), "OK");
    const left = await client.pttl("brief");
    same(left > 0 && left <= 60_000, true);
    same([await client.expire("brief", 100, "GT"), await client.expire("brief", 10, "GT"), await client.ttl("none")], [1, 0, -2]);
    await client.set("over", "x", "PX", 30);
    await eventually(async () => await client.get("over") === null, "the key is over");
}

async function scans(client) {
    await client.flushall();
    const keys = numbers(2000).map((n) => `scan:${n}`);
    await client.mset(keys.flatMap((key) => [key, "x"]));
    const found = new Set();
    for await (const batch of client.scanStream({ count: 50 })) batch.forEach((key) => found.add(key));
    same([...found].sort(), keys.toSorted());
    found.clear();
    for await (const batch of client.scanStream({ match: "scan:1?" })) batch.forEach((key) => found.add(key));
    same(found.size, 10);
    same(await client.dbsize(), 2000);
}

async function errors(client) {
    await fails("unknown command 'nosuch'", client.call("nosuch"));
    await fails("wrong number of arguments for 'get' command", client.call("get"));
    await fails("value is not an integer or out of range", client.incrby("n", "ten"));
    await fails("syntax error", client.call("set", "k", "v", "bogus"));
    same(await client.ping(), "PONG");
}

async function publishing(protocol) {
    const readers = numbers(12).map(() => connect(protocol));
    const heard = readers.map(() => []);
    await Promise.all(readers.map(async (reader, n) => {
        reader.on("message", (channel, message) => heard[n].push(`${channel} ${message}`));
        reader.on("pmessage", (pattern, channel, message) => heard[n].push(`${pattern} ${channel} ${message}`));
        same(await reader.subscribe("news", `own:${n}`), 2);
    }));
    const publishers = numbers(4).map(() => connect(protocol));
    const [publisher] = publishers;
    same([await publisher.publish("none", "x"), await publisher.publish("own:3", "x")], [0, 1]);
    await eventually(() => new Promise((done) => setImmediate(() => done(heard[3].length === 1))), "a message came");
    same(heard[3].splice(0), ["own:3 x"]);

    // Each publisher's messages come in its order to each subscriber.
    const counts = await Promise.all(publishers.flatMap((one, k) => numbers(200).map((n) => one.publish("news", `${k} ${n}`))));
    same(counts, Array(800).fill(12));
    await eventually(() => new Promise((done) => setImmediate(() => done(heard.every((all) => all.length >= 800)))), "all heard all");
    for (const all of heard) {
        for (const k of numbers(4)) {
            same(all.filter((line) => line.startsWith(`news ${k} `)), numbers(200).map((n) => `news ${k} ${n}`));
        }
        all.length = 0;
    }

    same(await readers[0].unsubscribe("news"), 1);
    same(await readers[1].psubscribe("n[aeu]ws"), 3);
    same(await publisher.publish("news", "last"), 12);
    readers[2].disconnect();
    await eventually(async () => await publisher.publish("news", "after") === 11, "the subscriber is gone");
    same(heard[0], []);
    await eventually(() => new Promise((done) => setImmediate(() => done(heard[1].includes("n[aeu]ws news after")))), "after");
    same(heard[1].slice(0, 2).sort(), ["n[aeu]ws news last", "news last"]);
    readers.forEach((reader) => reader.disconnect());
    await eventually(async () => await publisher.publish("news", "x") === 0, "all subscribers are gone");
}

for (const protocol of [2, 3]) {
    const client = connect(protocol);
    await client.flushall();
    await strings(client);
    await counters(client, protocol);
    await pipelines(client, protocol);
    await expiry(client);
    await scans(client);
    await errors(client);
    await publishing(protocol);
    same(await client.quit(), "OK");
}
clients.forEach((client) => client.disconnect());
console.log(`ioredis ${require("ioredis/package.json").version}: ${checks} checks, as expected`);
