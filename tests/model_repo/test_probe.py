"""The probe's verdicts, on a server that answers as Triton 2.51 was seen to."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from model_repo import probe

MODEL = "clicks_shard_1"
DEAD = (500, {"error": f"Stub process '{MODEL}_0_0' is not healthy."})
UNKNOWN = (404, {"error": f"Request for unknown model: '{MODEL}' is not found"})


class FakeTriton(ThreadingHTTPServer):
    """Answers from a dict of path → (status, JSON); unknown paths get Triton's 404."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = {
            "/v2/health/live": (200, None),
            "/v2/health/ready": (200, None),
            f"/v2/models/{MODEL}": (200, {"versions": ["3"]}),
            f"/v2/models/{MODEL}/versions/3/infer": (200, {"outputs": []}),
        }
        self.bodies = []
        self.release = threading.Event()
        self.release.set()

    @property
    def address(self):
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if body:
            self.server.bodies.append(json.loads(body))
        self.server.release.wait(10)
        status, answer = self.server.answers.get(self.path, UNKNOWN)
        reply = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def triton():
    with FakeTriton() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.release.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def repo(tmp_path):
    shards = [{"model": "clicks_shard_0", "tables": [{}]}, {"model": MODEL, "tables": [{}, {}, {}]}]
    version = tmp_path / "clicks" / "3"
    (version / "shard_1").mkdir(parents=True)
    (version / "manifest.json").write_text(json.dumps({"shards": shards}))
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "3").symlink_to("../clicks/3/shard_1")
    return tmp_path


@pytest.fixture
def ask(triton, repo, capsys):
    def run(question, *models, timeout_s=5.0):
        flags = ["--http", triton.address, "--repo", str(repo), "--timeout-s", str(timeout_s)]
        code = probe.main([question, *(models or [MODEL]), *flags])
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("question", ["live", "ready"])
def test_a_shard_that_answers_is_well(ask, question):
    assert ask(question) == (0, "")


def test_the_lookup_is_for_no_ids_of_the_tables_that_the_manifest_counts(ask, triton):
    ask("live")
    assert triton.bodies == [
        {
            "inputs": [
                {"name": "ids", "datatype": "INT64", "shape": [0], "data": []},
                {"name": "table_lengths", "datatype": "INT64", "shape": [3], "data": [0, 0, 0]},
                {"name": "version", "datatype": "INT64", "shape": [1], "data": [3]},
            ]
        }
    ]


@pytest.mark.parametrize("question", ["live", "ready"])
def test_a_dead_stub_is_told_although_triton_says_healthy(ask, triton, question):
    triton.answers[f"/v2/models/{MODEL}/versions/3/infer"] = DEAD
    code, message = ask(question)
    assert code == 1
    assert message.startswith(f"probe: {MODEL} version 3: 500")
    assert message.count("\n") == 1


@pytest.mark.parametrize("question", ["live", "ready"])
def test_each_loaded_version_is_asked(ask, triton, question):
    triton.answers[f"/v2/models/{MODEL}"] = (200, {"versions": ["2", "3"]})
    triton.answers[f"/v2/models/{MODEL}/versions/2/infer"] = DEAD
    code, message = ask(question)
    assert (code, "version 2" in message) == (1, True)


def test_a_model_that_is_not_loaded_is_not_ready_but_no_restart_helps(ask):
    assert ask("live", MODEL, "views_shard_1") == (0, "")
    code, message = ask("ready", MODEL, "views_shard_1")
    assert (code, "views_shard_1: not loaded (404)" in message) == (1, True)


@pytest.mark.parametrize(
    "answer", [(400, {"error": "table_lengths: no"}), (503, {"error": "Exceeds maximum queue size"})]
)
def test_a_refused_request_is_not_ready_but_no_restart_helps(ask, triton, answer):
    triton.answers[f"/v2/models/{MODEL}/versions/3/infer"] = answer
    assert ask("live") == (0, "")
    assert ask("ready")[0] == 1


def test_a_version_whose_manifest_has_gone_is_still_asked(ask, triton, repo):
    (repo / "clicks" / "3" / "manifest.json").unlink()
    assert ask("live") == (0, "")
    assert triton.bodies[0]["inputs"][1]["shape"] == [0]


def test_readiness_asks_the_server_itself_too(ask, triton):
    triton.answers["/v2/health/ready"] = (400, None)
    assert ask("live") == (0, "")
    assert ask("ready") == (1, "probe: /v2/health/ready says 400\n")


@pytest.mark.parametrize("question", ["live", "ready"])
def test_a_server_that_hangs_fails_at_the_deadline(ask, triton, question):
    triton.release.clear()
    code, message = ask(question, timeout_s=0.2)
    assert (code, "timed out" in message) == (1, True)


def test_a_server_that_is_not_there_fails_with_one_line(capsys):
    assert probe.main(["live", MODEL, "--http", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("probe: GET http://127.0.0.1:1/v2/health/live: ")


def test_wrong_usage_exits_2(capsys):
    with pytest.raises(SystemExit) as exited:
        probe.main(["alive", MODEL])
    assert exited.value.code == 2
    assert "invalid choice: 'alive'" in capsys.readouterr().err


def test_the_probe_imports_nothing_that_takes_time_to_import():
    code = "import sys, model_repo.probe; print(*{'torch', 'numpy', 'pydantic', 'fbgemm_gpu'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"
