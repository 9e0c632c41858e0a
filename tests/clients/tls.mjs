// Asks examples/tls_echo who it sees, and once more with the session of before: PORT AUTHORITY VERSION.
import { readFileSync } from "node:fs";
import { connect } from "node:tls";

const [port, authority, version] = process.argv.slice(2);
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

await ask(await ask());
