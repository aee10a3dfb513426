"""`kvist serve` as a child process on a free port."""
import os
import pathlib
import subprocess
import threading
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
KVIST = os.environ.get("KVIST") or str(TARGET / "release/kvist")
EMBEDDED = ROOT / "crates/model/embedded/tiny-rust-7m.gguf"


class Server:
    def __init__(self, *args):
        command = [KVIST, "serve", "--quiet", "--port", "0", *map(str, args)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # "serving NAME on http://ADDRESS" once it listens; an empty line if it ended before.
        line = self.process.stdout.readline().split()
        assert line[:1] == ["serving"], f"{command} ended with {self.process.wait()}"
        self.name, self.url = line[1], line[3]
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def get(self, path, key=None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, headers=headers), timeout=600) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def metric(self, name, key=None):
        """The value of a metric, summed over its labels."""
        status, text = self.get("/metrics", key)
        assert status == 200, text
        values = [line.split()[-1] for line in text.splitlines() if line.startswith(name + "{")]
        assert values, f"there is no metric {name}"
        return sum(map(float, values))

    def stop(self):
        self.process.terminate()
        return self.process.wait(600)
