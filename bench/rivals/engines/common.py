"""What compare.py and serving.py share: where things are, models, processes in groups of their own, the load of the machine."""
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MODELS, ENGINES = ROOT / "bench/target/models", ROOT / "bench/target/engines"


# A program that is asked to end leaves no engine behind, stopped or spinning: `finally` runs.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


class Failed(Exception):
    """A contestant's failure: its row is left out, the others go on."""


def strings(command):
    return [str(part) for part in command]


def end_of(path, lines=15):
    """The last lines of a log, for a message."""
    try:
        last = pathlib.Path(path).read_text(errors="replace").strip().splitlines()[-lines:]
    except OSError as error:
        last = [str(error)]
    return f"the end of {path}:\n" + "\n".join("    " + line for line in last or ["(empty)"])


def run(command, timeout=1200, cwd=None):
    """What a program that must succeed prints. It has `timeout` seconds."""
    try:
        done = subprocess.run(strings(command), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, cwd=cwd)
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is missing") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(strings(command))}: not done after {timeout} s") from error
    if done.returncode != 0:
        raise Failed(f"{command[0]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout + done.stderr


class Group:
    """A program with all its children in a process group, so that they can be stopped (SIGSTOP) while others are measured. What
    it prints goes into its log; with `talks`, its standard output is read line by line, and its standard input can be written."""

    def __init__(self, name, command, log, env=None, cwd=None, talks=False):
        self.name, self.log = name, pathlib.Path(log)
        self.lines = queue.Queue()
        pipe = subprocess.PIPE
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(strings(command), stdin=pipe if talks else subprocess.DEVNULL, stdout=pipe if talks else file,
                                            stderr=file, text=True, env=dict(os.environ, **(env or {})), cwd=cwd, start_new_session=True)
        if talks:
            threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self, deadline, what):
        """The next line of its standard output. One that says nothing until the deadline is ended."""
        try:
            found = self.lines.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            self.close()
            raise Failed(f"{self.name}: {what} took too long; it was ended; {end_of(self.log)}") from None
        if found is None:
            self.lines.put(None)  # for whoever asks next
            raise Failed(f"{self.name} ended before {what}; {end_of(self.log)}")
        return found

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def cpu_s(self):
        """Seconds that the processes of the group have computed. Of one that has ended, its parent's count has them."""
        ticks = 0
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it ended meanwhile
            if int(fields[2]) == self.process.pid:
                ticks += sum(int(field) for field in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self):
        """Asks the program to end, so that it removes what it keeps in shared memory, and then ends what is left of the group."""
        self.process.send_signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        self.signal(signal.SIGKILL)
        self.process.wait()


def model(dtype, kvist, form=None):
    """A model of random weights of shape (b), made once by the random-model beside the program `kvist`: as `form`, or int8 and bf16 as
    safetensors and the others as gguf."""
    form = form or ("safetensors" if dtype in ("int8", "bf16") else "gguf")
    path = MODELS / (f"b-{dtype}" if form == "safetensors" else f"b-{dtype}.gguf")
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        tool = pathlib.Path(kvist).with_name("random-model")
        if not tool.exists():
            sys.exit(f"{path} and {tool}, which makes it, are missing: cargo build --release -p kvist && cargo build --release --manifest-path tools/random-model/Cargo.toml --target-dir target")
        run([tool, "--preset", "b", "--format", form, "--dtype", dtype, path])
    return path


def busy():
    """The share of all cores that others take now."""
    def spent():
        fields = [int(field) for field in open("/proc/stat").readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]
    before = spent()
    time.sleep(1)
    after = spent()
    return 1 - (after[1] - before[1]) / max(1, after[0] - before[0])


def python(name):
    """The interpreter of an environment of install.sh, if it is there."""
    path = ENGINES / name / "bin/python"
    return path if path.exists() else None


