"""In the place of vLLM's server: answers on --port after a while, with a child that would outlive it; or refuses."""

import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


if __name__ == "__main__":
    arguments = dict(zip(sys.argv, sys.argv[1:], strict=False))
    if "refused" in arguments["--model"]:
        sys.exit("ValueError: no such model")
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    HTTPServer((arguments["--host"], int(arguments["--port"])), Answers).serve_forever()
