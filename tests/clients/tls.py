"""Asks examples/tls_echo who it sees, and once more with the session of before: PORT AUTHORITY VERSION.

With a fourth argument, h1, gets the page of examples/https instead.
"""

import http.client
import socket
import ssl
import sys

port, authority, version = int(sys.argv[1]), sys.argv[2], sys.argv[3]
context = ssl.create_default_context(cafile=authority)
wanted = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}[version]
context.minimum_version = context.maximum_version = wanted
if len(sys.argv) > 4:
    page = http.client.HTTPSConnection("localhost", port, timeout=20, context=context)
    page.request("GET", "/")
    print(page.getresponse().read().decode().strip())
    sys.exit()
session = None
for _ in range(2):
    plain = socket.create_connection(("127.0.0.1", port), timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost", session=session) as tls:
        lines = tls.makefile("rwb")
        long = b"x" * 100_000 + b"\n"
        lines.write(long + b"who\n")
        lines.flush()
        assert lines.readline() == long
        print(lines.readline().decode().strip())
        session = tls.session
        # The answer is close_notify: without it this raises.
        tls.unwrap()
