"""Each rank asks a tokenizer server over TCP; the server forgets a request of rank 3.

who: 3
why: unproven
Rank 3 waits in `recv` for the reply to its request; the others wait for it in the all_reduce.
"""

import json
import os
import socket
import socketserver
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for line in self.rfile:
            request = json.loads(line)
            if request["rank"] == 3 and request["step"] == 40:
                threading.Event().wait()
            self.wfile.write((json.dumps([len(word) for word in request["text"].split()]) + "\n").encode())


class Tokenizer:
    def __init__(self, address: tuple[str, int], rank: int) -> None:
        self._socket = socket.create_connection(address)
        self._rank = rank

    def encode(self, text: str, step: int) -> list[int]:
        request = json.dumps({"rank": self._rank, "step": step, "text": text}) + "\n"
        self._socket.sendall(request.encode())
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self._socket.recv(4096)
        return json.loads(answer)


def serve() -> tuple[str, int]:
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True, name="tokenizer").start()
    return server.server_address


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    holdfast.install(checkpoints=False, guard=False)
    rank = dist.get_rank()
    where = [serve() if rank == 0 else None]
    dist.broadcast_object_list(where, src=0)
    tokenizer = Tokenizer(where[0], rank)
    for step in range(10_000):
        if step == 40:
            Path(os.environ["READY"]).touch()
        tokens = torch.tensor([float(sum(tokenizer.encode("to be or not to be", step)))])
        dist.all_reduce(tokens)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
