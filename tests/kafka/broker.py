"""A real Apache Kafka on this machine: one KRaft node, broker and controller in one, from Maven's jars.

As a script, from the root of the checkout:

    python -m tests.kafka.broker start --data-dir D [--port P]   # returns; the broker stays
    python -m tests.kafka.broker stop --data-dir D
    python -m tests.kafka.broker run --data-dir D [--port P]     # until SIGTERM or SIGINT

``start`` and ``run`` print the bootstrap address once the broker answers. The jars are fetched once, into
``${XDG_CACHE_HOME:-~/.cache}/dynamo-es/kafka-<version>``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KAFKA_VERSION = "4.3.1"
SCALA_VERSION = "2.13"
LOG4J_VERSION = "2.24.3"
MAVEN_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
JAVA_MIN = 17
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
MAVEN_TIMEOUT_S = 900.0
# Below the least that Linux gives to outgoing connections.
_PORTS = range(15_000, 32_768)

_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dynamo-es</groupId><artifactId>kafka-for-tests</artifactId><version>1</version><packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_{SCALA_VERSION}</artifactId><version>{KAFKA_VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId>
      <version>{LOG4J_VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""
_LOG4J = """status = error
appender.console.type = Console
appender.console.name = STDERR
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1}: %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = STDERR
"""
# Dies with its parent, also when that is killed: prctl(PR_SET_PDEATHSIG, SIGKILL), then the check for a parent that
# was faster. Set after fork in a process of its own, since preexec_fn is unsafe beside threads.
_DIE_WITH_PARENT = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])\n"
)


class KafkaSetupError(Exception):
    """No Kafka can be started here; says what is missing."""


def missing_tools() -> str | None:
    """Why no broker can be started on this machine, or None."""
    try:
        _java()
        if not _cache_dir().exists() and shutil.which("mvn") is None:
            return "Maven (mvn) is not installed"
    except KafkaSetupError as error:
        return str(error)
    return None


def fetch_jars() -> Path:
    """Folder of Kafka's jars; fetched with Maven if need be. Safe when several processes do it at once."""
    target = _cache_dir()
    if target.exists():
        return target
    if shutil.which("mvn") is None:
        raise KafkaSetupError("Maven (mvn) is not installed")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        pom = Path(folder, "pom.xml")
        pom.write_text(_POM)
        command = ["mvn", "-q", "-B", "-f", str(pom), f"{MAVEN_PLUGIN}:copy-dependencies", "-DincludeScope=runtime"]
        fetched = subprocess.run(
            [*command, f"-DoutputDirectory={folder}/libs"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAVEN_TIMEOUT_S,
            check=False,
        )
        if fetched.returncode != 0:
            raise KafkaSetupError(f"Maven could not fetch Kafka {KAFKA_VERSION}:\n{fetched.stdout[-2000:]}")
        # Whole or not at all; whoever is second finds the first one's.
        with contextlib.suppress(OSError):
            os.rename(Path(folder, "libs"), target)
    if not target.exists():
        raise KafkaSetupError(f"could not put Kafka's jars into {target}")
    return target


class KafkaBroker:
    """One broker with its data in ``data_dir``; start, stop, kill and start again on the same data and port.

    ``detached``: the process outlives this one. Otherwise it dies with the thread that started it, so ``spawn`` is to
    be called from one that lives as long as the broker shall (the main thread).
    """

    listeners = 2

    def __init__(self, data_dir: Path, port: int | None = None, *, detached: bool = False) -> None:
        self.data_dir = data_dir.absolute()
        self._detached = detached
        self._ports = free_ports(self.listeners)
        self._port = port or self._ports[0]
        self._controller_port = self._ports[1]
        self._heap = "512m"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def pid_file(self) -> Path:
        return self.data_dir / "broker.pid"

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.spawn()
        try:
            self.wait_ready()
        except KafkaSetupError:
            self.kill()
            raise

    def spawn(self) -> None:
        """Start it without waiting. The first time this fetches the jars and formats the storage."""
        if self.is_running and self._process is not None:
            raise KafkaSetupError(f"the broker in {self.data_dir} runs already (pid {self._process.pid})")
        if (pid := _recorded_pid(self.data_dir)) is not None:
            raise KafkaSetupError(f"another process runs the broker in {self.data_dir} (pid {pid})")
        java, libs, properties = self.prepare()
        command = [*_jvm(java, libs, self.data_dir, heap=self._heap), "kafka.Kafka", str(properties)]
        if not self._detached:
            command = [sys.executable, "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with (self.data_dir / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.data_dir,
                # Ctrl-C in a terminal goes to the tests, which stop the broker in order.
                start_new_session=True,
            )
        self.pid_file.write_text(str(self._process.pid))

    def prepare(self) -> tuple[str, Path, Path]:
        """What ``spawn`` does first, callable from any thread: Java, the jars, the settings of a formatted storage."""
        java, libs = _java(), fetch_jars()
        properties = self._configure()
        if not (self.data_dir / "log" / "meta.properties").exists():
            self._format(java, libs, properties)
        return java, libs, properties

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the broker answers. Callable from any thread."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process is None or self._process.poll() is not None:
                raise KafkaSetupError(f"Kafka ended while starting:\n{self.log_tail()}")
            if answers(self.bootstrap):
                return
            if time.monotonic() > deadline:
                raise KafkaSetupError(f"Kafka does not answer after {timeout_s:g} s:\n{self.log_tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Safe to call twice."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forget()

    def kill(self) -> None:
        """SIGKILL: what a crash leaves behind."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._forget()

    def _forget(self) -> None:
        self._process = None
        self.pid_file.unlink(missing_ok=True)

    def _configure(self) -> Path:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        (self.data_dir / "log4j2.properties").write_text(_LOG4J)
        path = self.data_dir / "server.properties"
        if path.exists():
            found = re.search(r"^listeners=.*PLAINTEXT://127\.0\.0\.1:(\d+),.*:(\d+)$", path.read_text(), re.MULTILINE)
            assert found is not None, path
            self._port, self._controller_port = int(found[1]), int(found[2])
            return path
        path.write_text("".join(f"{name}={value}\n" for name, value in self._settings().items()))
        return path

    def _settings(self) -> dict[str, str]:
        """``server.properties``; the controller's listener is the last one."""
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self._port},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "log.dirs": str(self.data_dir / "log"),
            "num.network.threads": "2",
            "num.io.threads": "4",
            "default.replication.factor": "1",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            # As clusters ship: the log must not rely on the broker to refuse unknown topics.
            "auto.create.topics.enable": "true",
        }

    def _format_arguments(self) -> list[str]:
        """What the storage is formatted with, beside its settings."""
        return ["--standalone", "--cluster-id", new_cluster_id()]

    def _format(self, java: str, libs: Path, properties: Path) -> None:
        command = [*_jvm(java, libs, self.data_dir, heap="128m"), "kafka.tools.StorageTool", "format"]
        done = subprocess.run(
            [*command, "--config", str(properties), *self._format_arguments()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=READY_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise KafkaSetupError(
                f"Kafka's storage could not be formatted:\n{done.stdout[-1000:]}{done.stderr[-2000:]}"
            )

    def log_tail(self) -> str:
        """The end of what the broker wrote to its log."""
        log = self.data_dir / "broker.log"
        return log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"


def answers(bootstrap: str) -> bool:
    """Does a broker there take requests, and know itself as part of the cluster?"""
    host, _, port = bootstrap.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    # In a thread of its own, since the caller's may have a running loop.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(_asks(bootstrap))).result()


async def _asks(bootstrap: str) -> bool:
    from dynamo_es.errors import DynamoException
    from dynamo_es.log.kafka_admin import KafkaAdmin
    from dynamo_es.log.kafka_clients import KafkaClients
    from dynamo_es.log.kafka_config import KafkaSettings

    settings = KafkaSettings((bootstrap,), request_timeout_ms=2000, connect_timeout_ms=2000)
    admin = KafkaAdmin(KafkaClients(settings))
    try:
        return bool(await admin.cluster_id())
    except DynamoException:
        return False
    finally:
        await admin.close()


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "dynamo-es", f"kafka-{KAFKA_VERSION}")


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home, "bin", "java"))) if home else shutil.which("java")
    if java is None:
        raise KafkaSetupError("Java is not installed")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(\d+)', told)
    if found is None or int(found[1]) < JAVA_MIN:
        raise KafkaSetupError(f"Kafka {KAFKA_VERSION} needs Java {JAVA_MIN} or later, {java} is: {told.strip()}")
    return java


def _jvm(java: str, libs: Path, data_dir: Path, heap: str) -> list[str]:
    return [
        java,
        f"-Xmx{heap}",
        # Two cores that the tests need as well: start fast, compile little.
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xshare:auto",
        f"-Dlog4j2.configurationFile={data_dir / 'log4j2.properties'}",
        "-cp",
        f"{libs}/*",
    ]


def new_cluster_id() -> str:
    """As Kafka wants it: 16 random bytes that do not look like an option."""
    while (cluster_id := secrets.token_urlsafe(16)).startswith("-"):
        pass
    return cluster_id


def free_port() -> int:
    """A port that nobody listens on at the moment; for several ask ``free_ports``."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on at the moment.

    They are below those that systems give to outgoing connections, which come and go while a test starts its servers.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        while len(ports) < count:
            probe, port = held.enter_context(socket.socket()), _PORTS[secrets.randbelow(len(_PORTS))]
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def _stop_recorded(data_dir: Path) -> None:
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (pid := _recorded_pid(data_dir)) is not None:
        late = time.monotonic() > deadline
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.2)
    (data_dir / "broker.pid").unlink(missing_ok=True)


def _recorded_pid(data_dir: Path) -> int | None:
    """The broker of this folder, if it runs. The number alone may have passed on to somebody else's process."""
    try:
        pid = int((data_dir / "broker.pid").read_text())
        ours = str(data_dir).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if ours else None


def _run(broker: KafkaBroker) -> None:
    def leave(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        broker.start()
        print(broker.bootstrap, flush=True)
        while broker.is_running:
            time.sleep(0.5)
        raise KafkaSetupError(f"Kafka ended:\n{broker.log_tail()}")
    except KeyboardInterrupt:
        pass
    finally:
        broker.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description="A real Apache Kafka on this machine, for tests.")
    parser.add_argument("action", choices=("start", "stop", "run"))
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, help="default: a free one, or that of the data folder")
    arguments = parser.parse_args()
    data_dir = arguments.data_dir.absolute()
    try:
        if arguments.action == "stop":
            _stop_recorded(data_dir)
        elif arguments.action == "start":
            broker = KafkaBroker(data_dir, arguments.port, detached=True)
            broker.start()
            print(broker.bootstrap, flush=True)
        else:
            _run(KafkaBroker(data_dir, arguments.port))
    except KafkaSetupError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
