"""A model behind HTTP: the main thread accepts, a thread with the model waits at a queue, a client calls now and then."""

import argparse
import http.server
import json
import queue
import subprocess
import sys
import threading

from marking import mark

CLIENT = """
import sys, time, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
for call in range(3):
    time.sleep(float(sys.argv[2]))
    print("answer:", opener.open(f"http://127.0.0.1:{sys.argv[1]}/").read().decode(), flush=True)
"""


def answer_questions(questions):
    while True:
        reply = questions.get()  # the long part of the model's thread
        reply.put(json.dumps({"token": 42}).encode())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=6.0, help="between two calls")
    args = parser.parse_args()
    questions = queue.Queue()
    threading.Thread(target=answer_questions, args=(questions,), daemon=True, name="model").start()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            reply = queue.Queue()
            questions.put(reply)
            body = reply.get()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    client = subprocess.Popen([sys.executable, "-c", CLIENT, str(server.server_port), str(args.seconds)])
    mark("fault")
    for _ in range(3):
        server.handle_request()  # the long part
    mark("over")
    client.wait()
    print("done: 3 calls")


if __name__ == "__main__":
    main()
