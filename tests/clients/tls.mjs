// Asks examples/tls_echo who it sees, and once more with the session of before: PORT AUTHORITY VERSION.
// With a fourth argument, h1 or h2, gets the page of examples/https instead.
import { readFileSync } from "node:fs";
import { connect as connectHttp2 } from "node:http2";
import { get } from "node:https";
import { connect } from "node:tls";

const [port, authority, version, http] = process.argv.slice(2);
const options = {
  port: Number(port),
  host: "127.0.0.1",
  servername: "localhost",
  ca: readFileSync(authority),
  minVersion: `TLSv${version}`,
  maxVersion: `TLSv${version}`,
};

function ask(session) {
  return new Promise((resolve, reject) => {
    let kept;
    let heard = "";
    const socket = connect({ ...options, session }, () => socket.write("who\n"));
    socket.setTimeout(20_000, () => reject(new Error("nothing came")));
    socket.on("session", (given) => (kept = given));
    socket.on("data", (data) => {
      heard += data;
      if (heard.endsWith("\n")) socket.end();
    });
    socket.on("error", reject);
    socket.on("close", () => {
      process.stdout.write(heard);
      resolve(kept);
    });
  });
}

function page() {
  return new Promise((resolve, reject) => {
    if (http === "h2") {
      const session = connectHttp2(`https://localhost:${port}`, options);
      session.on("error", reject);
      const request = session.request({ ":path": "/" });
      request.pipe(process.stdout, { end: false });
      request.on("error", reject);
      request.on("end", () => session.close(resolve));
    } else {
      get({ ...options, path: "/" }, (answer) => {
        answer.pipe(process.stdout, { end: false });
        answer.on("end", resolve);
      }).on("error", reject);
    }
  });
}

if (http) await page();
else await ask(await ask());
