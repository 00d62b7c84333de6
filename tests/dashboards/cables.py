"""A network between two processes of this machine that loses datagrams, or brings them late."""

import heapq
import random
import selectors
import socket
import threading
import time


class Cable:
    """Takes datagrams at an address of its own for the process at `to`, and returns the answers."""

    def __init__(self, to):
        self.to, self.seconds, self.loss, self.is_cut = to, 0.0, 0.0, False
        self.random = random.Random(1)
        self.selector, self.waiting, self.ways = selectors.DefaultSelector(), [], {}
        self.near = self.open(self.from_near)
        self.address = f"127.0.0.1:{self.near.getsockname()[1]}"
        self.is_over = False
        self.thread = threading.Thread(target=self.run, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        self.thread.join()
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()
        self.selector.close()

    def open(self, taker):
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind(("127.0.0.1", 0))
        opened.setblocking(False)
        for option in [socket.SO_RCVBUF, socket.SO_SNDBUF]:
            opened.setsockopt(socket.SOL_SOCKET, option, 1 << 22)
        self.selector.register(opened, selectors.EVENT_READ, taker)
        return opened

    def from_near(self, data, peer):
        if peer not in self.ways:
            near = self.near
            self.ways[peer] = self.open(lambda answer, _: self.send(near, answer, peer))
        self.send(self.ways[peer], data, self.to)

    def send(self, through, data, to):
        if not self.is_cut and self.random.random() >= self.loss:
            heapq.heappush(self.waiting, (time.monotonic() + self.seconds, self.random.random(), through, data, to))

    def run(self):
        while not self.is_over:
            while self.waiting and self.waiting[0][0] <= time.monotonic():
                _, _, through, data, to = heapq.heappop(self.waiting)
                try:
                    through.sendto(data, to)
                except OSError:
                    # Drops the datagram, as a full network does.
                    continue
            patience = min(0.05, max(0.0, self.waiting[0][0] - time.monotonic())) if self.waiting else 0.05
            for key, _ in self.selector.select(patience):
                for _ in range(64):
                    try:
                        key.data(*key.fileobj.recvfrom(65535))
                    except OSError:
                        break
