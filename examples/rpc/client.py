#!/usr/bin/env python3
"""A client of example-rpc: calls that run side by side on one connection.

    python3 examples/rpc/client.py --token secret '{"method": "wait", "millis": 500}' '{"method": "get", "key": "greeting"}'

prints the outcome of each call, in the order of the calls.
"""

import argparse
import asyncio
import itertools
import json
import struct
import sys


class RpcError(Exception):
    """What the server says went wrong."""


class Rpc:
    """A connection on which a user is logged in. `call` may be awaited by any number of tasks at once."""

    @classmethod
    async def connect(cls, host, port, token):
        rpc = cls()
        rpc.reader, rpc.writer = await asyncio.open_connection(host, port)
        rpc.ids, rpc.waiting, rpc.ended = itertools.count(), {}, None
        rpc.replies = asyncio.create_task(rpc._read())
        rpc.user = await rpc.call("login", token=token)
        return rpc

    async def call(self, method, **params):
        """The result of a call. Raises RpcError, or ConnectionError if the connection ends before the reply."""
        if self.ended:
            raise ConnectionError(self.ended)
        id = next(self.ids)
        request = json.dumps({"id": id, "method": method, **params}).encode()
        self.waiting[id] = asyncio.get_running_loop().create_future()
        try:
            self.writer.write(struct.pack(">I", len(request)) + request)
            await self.writer.drain()
            return await self.waiting[id]
        finally:
            del self.waiting[id]

    async def _read(self):
        try:
            while True:
                (length,) = struct.unpack(">I", await self.reader.readexactly(4))
                reply = json.loads(await self.reader.readexactly(length))
                # There is none if its call was cancelled, or the server could read no id.
                waiting = self.waiting.get(reply["id"])
                if waiting is None or waiting.done():
                    continue
                if "error" in reply:
                    waiting.set_exception(RpcError(reply["error"]))
                else:
                    waiting.set_result(reply["result"])
        except (OSError, asyncio.IncompleteReadError) as error:
            self.ended = f"the connection ended: {error}"
            for waiting in self.waiting.values():
                if not waiting.done():
                    waiting.set_exception(ConnectionError(self.ended))

    async def close(self):
        self.replies.cancel()
        self.writer.close()
        await self.writer.wait_closed()


async def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connect", default="127.0.0.1:7000", metavar="ADDR:PORT")
    parser.add_argument("--token", required=True)
    parser.add_argument("calls", nargs="*", type=json.loads, metavar="CALL")
    args = parser.parse_args()
    host, port = args.connect.rsplit(":", 1)
    try:
        rpc = await Rpc.connect(host, int(port), args.token)
    except (RpcError, OSError) as error:
        sys.exit(f"no login: {error}")
    outcomes = await asyncio.gather(*(rpc.call(**call) for call in args.calls), return_exceptions=True)
    await rpc.close()
    for outcome in outcomes:
        print(f"error: {outcome}" if isinstance(outcome, Exception) else json.dumps(outcome))
    sys.exit(any(isinstance(outcome, Exception) for outcome in outcomes))


if __name__ == "__main__":
    asyncio.run(main())
