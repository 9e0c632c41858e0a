"""The page before a server: the example `admin`, with clients that make each thing happen that the page can show."""

import contextlib
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path


class Server:
    """The example on free ports, until it ends or is ended."""

    def __init__(self, binary):
        self.log = tempfile.TemporaryFile()
        options = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--shards", "2"]
        self.process = subprocess.Popen([binary, *options], stdout=self.log, stderr=subprocess.STDOUT)
        self.sockets, self.stopping = [], threading.Event()
        self.port, self.admin = self.port_of(r"listening on"), self.port_of(r"admin endpoint at")
        self.url = f"http://127.0.0.1:{self.admin}/"

    def port_of(self, what):
        end = time.monotonic() + 20
        while not (found := re.search(rf"{what} (?:http://)?127\.0\.0\.1:(\d+)", self.text())):
            assert time.monotonic() < end and self.process.poll() is None, f"the server says: {self.text()}"
            time.sleep(0.05)
        return int(found[1])

    def text(self):
        self.log.seek(0)
        return re.sub(r"\x1b\[\d*m", "", self.log.read().decode(errors="replace"))

    def connect(self):
        client = socket.create_connection(("127.0.0.1", self.port))
        self.sockets.append(client)
        return client

    def say(self, line):
        client = self.connect()
        client.sendall(line.encode() + b"\n")
        return client

    def load(self, clients):
        """Clients that ask one thing after the other."""

        def ask(client):
            with contextlib.suppress(OSError):
                while not self.stopping.is_set():
                    client.sendall(b"hello\n" * 8)
                    if not client.recv(4096):
                        return
                    time.sleep(0.01)

        for _ in range(clients):
            threading.Thread(target=ask, args=(self.connect(),), daemon=True).start()

    def drain(self):
        request = urllib.request.Request(f"{self.url}drain", method="POST", headers={"X-Ringserve": "1"})
        urllib.request.urlopen(request, timeout=5).close()

    def stop(self):
        self.stopping.set()
        for client in self.sockets:
            client.close()
        self.process.kill()
        self.process.wait()
        self.log.close()


def look_at_real_server(look_of, binary, eventually, same, folder=None):
    """Walks through what can happen. At each point all figures are compared with their report."""
    server = Server(binary)
    try:
        look = look_of(server)
        page = look.page

        def shot(name):
            if folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
                for dark in (False, True):
                    page.emulate_media(color_scheme="dark" if dark else "light")
                    page.screenshot(path=Path(folder) / f"real-{name}-{'dark' if dark else 'light'}.png", full_page=True)
                if name == "stalled":
                    page.emulate_media(color_scheme="light")
                    page.screenshot(path=Path(folder) / "page.png", clip={"x": 0, "y": 0, "width": 1440, "height": 770}, full_page=True)

        def compared(name):
            page.mouse.move(2, 2)
            time.sleep(0.5)
            try:
                look.check()
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None
            shot(name)
            print(f"   {name}: {look.read()['status'][2:]}", flush=True)
            return page.evaluate("latest")

        def status(*headlines, seconds=15):
            return eventually(
                f"the status is {' or '.join(headlines)}", lambda: any(h in look.read()["status"][2] for h in headlines), seconds
            )

        eventually("it is live", lambda: look.read()["link"] == "● live")
        compared("idle")
        server.load(60)
        eventually("frames come", lambda: look.read()["charts"][2][1] not in ("0/s", "–"))
        time.sleep(5)
        report = compared("load")
        same("connections", report["server"]["connections"], 60)

        server.say("wait 9000")
        eventually("the call that waits is named", lambda: look.read()["panels"]["calls"]["rows"])
        compared("waiting")

        flooded = server.say("flood 200")
        peer = "127.0.0.1:%d" % flooded.getsockname()[1]
        eventually("the outbox is named", lambda: any(row[0][0] == peer for row in look.read()["panels"]["outboxes"]["rows"]))
        compared("outbox")
        page.mouse.move(2, 2)
        button = page.locator("section:has(#outboxes)").get_by_role(
            "button", name=f"Close the connection of {peer}", exact=True
        )
        button.click()
        page.get_by_role("button", name="Close it").click()
        eventually("it is being closed", lambda: f"{peer} is being closed." in page.locator("dialog").inner_text())
        page.get_by_role("button", name="Back").click()
        page.mouse.move(2, 2)
        flooded.settimeout(10)
        while flooded.recv(1 << 20):
            pass
        eventually("it is gone", lambda: not any(row[0][0] == peer for row in look.read()["panels"]["outboxes"]["rows"]))

        blocking = server.say("block 6000")
        status("Trouble at: Handler", "Stalled")
        time.sleep(1.5)
        found = look.read()["panels"]
        assert any("stalled" in row[0][1] for row in found["shards"]["rows"]), found["shards"]["rows"]
        report = compared("stalled")
        assert any(stall["ongoing"] for stall in report["stalls"]), report["stalls"]
        blocking.settimeout(20)
        assert blocking.recv(100)
        status("Calm", "Warning", seconds=30)
        compared("after the stall")

        server.say("wait 8000")
        time.sleep(0.5)
        server.drain()
        status("Draining")
        compared("draining")
        server.process.wait(30)
        status("No answer", seconds=8)
        shot("gone")
        print(f"   gone: {look.read()['status'][2:]}")
        look.close()
    finally:
        server.stop()
