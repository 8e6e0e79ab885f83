"""Programs of the distribution, each with how it is started, asked, and looked at."""

from __future__ import annotations

import os
from dataclasses import dataclass

ALL = os.environ.get("ORCHESTRATOR_PROGRAMS") == "all"
WEB = (
    """python3 -c 'import urllib.request as u; print(u.urlopen("http://127.0.0.1:8000/", timeout=5).read().decode())'"""
)
"""Asks a web server."""
_STUB = "location / { stub_status; } access_log /w/state.log;"
_NGINX = (
    "error_log /w/nginx.log; pid /w/nginx.pid; %s worker_processes 2; events {} http { server { listen 8000; %s } }"
)
_GUNICORN = """
import mmap, struct
shared = mmap.mmap(-1, 8)
def app(environ, start):
    count = struct.unpack("q", shared[:8])[0] + 1
    shared[:8] = struct.pack("q", count)
    open("/w/state", "w").write(str(count))
    start("200 OK", [])
    return [str(count).encode()]
"""
_NODE = """
let count = 0
require("http").createServer((request, answer) => {
    require("fs").writeFileSync("/w/state", String(++count))
    answer.end(String(count))
}).listen(8000, "127.0.0.1")
"""
_JAVA = """
import com.sun.net.httpserver.HttpServer;
import java.nio.file.*;
class Counter {
    static int count;
    public static void main(String[] words) throws Exception {
        var server = HttpServer.create(new java.net.InetSocketAddress("127.0.0.1", 8000), 0);
        server.createContext("/", exchange -> {
            var text = String.valueOf(++count);
            Files.writeString(Path.of("/w/state"), text);
            exchange.sendResponseHeaders(200, text.length());
            exchange.getResponseBody().write(text.getBytes());
            exchange.close();
        });
        server.start();
    }
}
"""
_TMUX = "tmux send-keys -t s:%d 'n=$((n+1)); echo $n > /w/state%d; tmux wait -S told' Enter; tmux wait told"
_SQL = "mariadb --socket /w/m.sock -N t"


@dataclass(frozen=True)
class Program:
    """One row of the table."""

    start: str
    """Leaves it running; its directory is ``/w``."""
    step: str
    """A client's request: its memory and its files change; the n-th ends with the word n."""
    file: str
    """Shows what the last step left in files: ends with the same word."""
    ready: str = ""
    """Succeeds once it can be asked; default: ``step`` would."""
    packages: tuple[str, ...] = ()
    writes: tuple[tuple[str, str], ...] = ()
    """Files that it needs."""
    heavy: bool = False
    """Only with ``ORCHESTRATOR_PROGRAMS=all``."""


LISTENS = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000), 5)'"
PROGRAMS = {
    "node": Program(
        packages=("nodejs",),
        writes=(("/w/p.js", _NODE),),
        start="setsid node /w/p.js >/w/log 2>&1 </dev/null &",
        ready=LISTENS,
        step=WEB,
        file="cat /w/state",
    ),
    "nginx as root": Program(
        packages=("nginx-light",),
        writes=(("/w/nginx.conf", "user root;" + _NGINX % ("", _STUB)),),
        start="nginx -c /w/nginx.conf",
        ready="test -s /w/nginx.pid",
        step=WEB + " | sed -n 3p",
        file="wc -l < /w/state.log",
    ),
    "Redis with unsaved data": Program(
        packages=("redis-server",),
        start="cd /w; setsid redis-server --save '' --port 8000 >/w/log 2>&1 </dev/null &",
        ready="redis-cli -p 8000 ping",
        step="redis-cli -p 8000 incr n | tee /w/state",
        file="cat /w/state",
    ),
    "gunicorn with workers": Program(
        packages=("gunicorn",),
        writes=(("/w/wsgi.py", _GUNICORN),),
        start="cd /w; setsid gunicorn --preload -w 2 -b 127.0.0.1:8000 wsgi:app >/w/log 2>&1 </dev/null &",
        ready=LISTENS,
        step=WEB,
        file="cat /w/state",
    ),
    "tmux with two windows": Program(
        packages=("tmux",),
        start="tmux -f /dev/null new-session -d -s s && tmux new-window -t s:",
        ready="tmux list-windows -t s",
        step=f"{_TMUX % (0, 0)}; {_TMUX % (1, 1)}; cat /w/state0 /w/state1",
        file="cat /w/state1",
    ),
    "MariaDB in a transaction": Program(
        packages=("mariadb-server",),
        heavy=True,
        start="mariadb-install-db --user=root --datadir=/w/data >/w/log 2>&1 && "
        "{ setsid mariadbd --no-defaults --user=root --datadir=/w/data --socket=/w/m.sock --skip-networking "
        "--innodb-use-native-aio=0 >/w/log 2>&1 </dev/null & } && "
        "until mariadb --socket /w/m.sock -e 'create database t; create table t.t(n int)' 2>/dev/null; "
        "do sleep 0.1; done; mkfifo /w/in; "
        f"{{ setsid sh -c 'exec 3<>/w/in; exec {_SQL} --unbuffered <&3 >/w/out' >/dev/null 2>&1 & }}; "
        "echo 'begin;' > /w/in",
        ready="test -e /w/out",
        step="n=$(wc -l < /w/out); echo 'insert into t values (1); select count(*) from t;' > /w/in; "
        "while [ $(wc -l < /w/out) = $n ]; do sleep 0.02; done; "
        f"test $({_SQL} -e 'select count(*) from t') = 0; tail -n 1 /w/out",
        file="tail -n 1 /w/out",
    ),
    "JVM": Program(
        packages=("openjdk-17-jdk-headless",),
        heavy=True,
        writes=(("/w/Counter.java", _JAVA),),
        start="cd /w; setsid java -Xmx64m -XX:-UsePerfData Counter.java >/w/log 2>&1 </dev/null &",
        ready=LISTENS,
        step=WEB,
        file="cat /w/state",
    ),
}
MAKE = """
all: $(addprefix part, 1 2 3 4)
\ttouch /w/done
part%:
\tfor n in $$(seq 300); do echo $$n >> $@; sleep 0.02; done
"""
"""Four jobs at a time, each of which counts."""
NGINX_WORKERS = _NGINX % ("user www-data;", _STUB)
POSTGRES = (
    "chmod 777 /w; { pg_lsclusters -h | grep -q . || pg_createcluster 15 main >/w/log 2>&1; } && "
    "pg_ctlcluster 15 main start && echo 'create table t(n int); begin; insert into t values (1);' > /w/in && "
    "{ setsid su postgres -c '(cat /w/in; sleep 1000) | psql >/w/out 2>&1' >/dev/null 2>&1 </dev/null & }"
)


def packages() -> list[str]:
    """Of the image in which they all run."""
    chosen = {package for one in PROGRAMS.values() if ALL or not one.heavy for package in one.packages}
    return sorted(chosen | {"busybox-static", "make"} | ({"postgresql"} if ALL else set()))
