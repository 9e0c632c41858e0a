"""Talks to the echo server with the package `websockets`: URL [AUTHORITY]. With h2:// instead, over HTTP/2 by h2 and wsproto."""

import asyncio
import socket
import ssl
import sys
from urllib.parse import urlsplit

MIB = 1 << 20
TEXT = "grüße, ringserve\n" * 5000


async def by_websockets(url, context):
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    def connected(**options):
        return connect(url, ssl=context, max_size=None, proxy=None, **options)

    for compression in (None, "deflate"):
        async with connected(compression=compression) as ws:
            extensions = ws.protocol.extensions
            assert len(extensions) == (compression is not None), extensions
            for message in ("", "hello", b"", b"\0\xff", TEXT, bytes(MIB), TEXT.encode()):
                await ws.send(message)
                assert await ws.recv() == message
            # In fragments, with an empty one and one that cuts a character.
            await ws.send(["gr", "", "üße"])
            assert await ws.recv() == "grüße"
            await ws.send([bytes(100_000)] * 5)
            assert await ws.recv() == bytes(500_000)
            # Pipelined, with a ping between.
            for n in range(1000):
                await ws.send(str(n))
            pong = await ws.ping(b"here")
            for n in range(1000):
                assert await ws.recv() == str(n)
            await asyncio.wait_for(pong, 10)
    for code, reason in ((1000, ""), (1001, "gone"), (3000, "grüße"), (4999, "x" * 123)):
        ws = await connected()
        await ws.close(code, reason)
        assert ws.close_code == code, (ws.close_code, code)
    # Beyond the limit of a message, and as many bytes once they are inflated.
    for compression in (None, "deflate"):
        ws = await connected(compression=compression)
        await ws.send(bytes(MIB + 1))
        try:
            await ws.recv()
            raise AssertionError("a message beyond the limit came back")
        except ConnectionClosed as closed:
            assert closed.rcvd is not None and closed.rcvd.code == 1009, closed


def by_h2(host, port):
    import h2.config
    import h2.connection
    import h2.events
    import h2.settings
    import wsproto.connection
    import wsproto.events

    sock = socket.create_connection((host, port), timeout=20)
    http = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    http.initiate_connection()
    sock.sendall(http.data_to_send())
    received, status, ended, settings = {}, {}, set(), []

    def pump():
        data = sock.recv(65536)
        assert data, "the server closed the connection"
        for event in http.receive_data(data):
            if isinstance(event, h2.events.RemoteSettingsChanged):
                settings.append(event.changed_settings)
            elif isinstance(event, h2.events.ResponseReceived):
                status[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                received.setdefault(event.stream_id, bytearray()).extend(event.data)
                http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                # A server may end so the stream of a request that it has answered to the end: not that of a socket.
                assert event.error_code == 0 and status[event.stream_id][":status"] == "400", event
            assert not isinstance(event, h2.events.ConnectionTerminated), event
        sock.sendall(http.data_to_send())

    while not settings:
        pump()
    enabled = settings[0].get(h2.settings.SettingCodes.ENABLE_CONNECT_PROTOCOL)
    assert enabled is not None and enabled.new_value == 1, "the server does not offer RFC 8441"

    def begin(**others):
        stream = http.get_next_available_stream_id()
        headers = {":method": "CONNECT", ":protocol": "websocket", ":scheme": "http", ":path": "/", ":authority": host,
                   "sec-websocket-version": "13", **others}
        http.send_headers(stream, list(headers.items()))
        sock.sendall(http.data_to_send())
        while stream not in status:
            pump()
        return stream

    def send(stream, data):
        while data:
            room = min(http.local_flow_control_window(stream), http.max_outbound_frame_size)
            if room == 0:
                pump()
                continue
            http.send_data(stream, data[:room])
            data = data[room:]
            sock.sendall(http.data_to_send())

    def events(stream, ws):
        while True:
            while not received.get(stream):
                pump()
            ws.receive_data(bytes(received.pop(stream)))
            yield from ws.events()

    # Two at once on one connection, and a request that is none.
    streams = [begin(), begin()]
    for stream in streams:
        assert status[stream][":status"] == "200", status[stream]
        assert "sec-websocket-accept" not in status[stream], status[stream]
    sockets = [wsproto.connection.Connection(wsproto.connection.ConnectionType.CLIENT) for _ in streams]
    for message in ("hello", TEXT[:100], b"\0" * 300_000):
        for stream, ws in zip(streams, sockets):
            send(stream, ws.send(wsproto.events.Message(data=message)))
        for stream, ws in zip(streams, sockets):
            back = type(message)()
            for event in events(stream, ws):
                back += event.data
                if event.message_finished:
                    break
            assert back == message
    for stream, ws in zip(streams, sockets):
        send(stream, ws.send(wsproto.events.CloseConnection(code=3001, reason="done")))
        close = next(events(stream, ws))
        assert isinstance(close, wsproto.events.CloseConnection) and close.code == 3001, close
        while stream not in ended:
            pump()
        http.end_stream(stream)
        sock.sendall(http.data_to_send())
    refused = begin(**{"sec-websocket-version": "12"})
    assert status[refused][":status"] == "400", status[refused]


def main():
    url, authority = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    parts = urlsplit(url)
    if parts.scheme == "h2":
        by_h2(parts.hostname, parts.port)
    else:
        context = ssl.create_default_context(cafile=authority) if authority else None
        asyncio.run(asyncio.wait_for(by_websockets(url, context), 120))
    print(f"python: {url}")


main()
