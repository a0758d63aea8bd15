"""Downloads a file from a server that gives 30 kB a second; the server is a process of this script."""

import argparse
import http.server
import multiprocessing
import time
import urllib.request

from marking import mark

BYTES_PER_S = 30_000


def serve(size, port):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            for sent in range(0, size, BYTES_PER_S // 10):
                self.wfile.write(b"x" * min(BYTES_PER_S // 10, size - sent))
                time.sleep(0.1)

        def log_message(self, *words):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    server.handle_request()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=15.0)
    args = parser.parse_args()
    size = int(args.seconds * BYTES_PER_S)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(size, theirs), daemon=True)
    server.start()
    request = urllib.request.Request(f"http://127.0.0.1:{ours.recv()}/shard.bin")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    mark("fault")
    with opener.open(request) as answer:
        data = answer.read()  # the long part
    mark("over")
    server.join()
    print(f"done: {len(data)} bytes")


if __name__ == "__main__":
    main()
