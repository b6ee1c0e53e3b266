"""Who may do what, and what a refusal says."""

import pytest
from tests.proxy.worlds import World, learner, proxy_of, rollout

from bucketrl.bucket.errors import UserError
from bucketrl.proxy.auth import Tokens

TOKENS = Tokens("worker-secret-1", "reader-secret-2")
READS = ["/v1/run", "/v1/workers", "/v1/steps", "/v1/groups/0000-00000000", "/metrics"]
LEASE = {"worker_id": "w", "max_groups": 1, "loaded_version": 0}
WORK = [
    ("GET", "/v1/policy", None),
    ("POST", "/v1/leases", LEASE),
    ("POST", "/v1/leases/x/renew", {"worker_id": "w"}),
    ("POST", "/v1/leases/x/release", {"worker_id": "w"}),
    ("POST", "/v1/heartbeats", {"state": rollout()}),
    ("POST", "/v1/heartbeats", {"state": learner()}),
    ("PUT", "/v1/log/0", {}),
]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("path", READS)
async def test_looking_takes_either_token(path: str) -> None:
    async with proxy_of(World(), tokens=TOKENS) as proxy:
        for token in (TOKENS.worker, TOKENS.read):
            assert (await proxy.get(path, headers=bearer(token))).status_code == 200
        wrong = await proxy.get(path, headers=bearer("guess"))
        none = await proxy.get(path, headers={"authorization": ""})
    assert (wrong.status_code, none.status_code) == (403, 401)
    for reply in (wrong, none):
        assert "BUCKETRL_READ_TOKEN" in reply.json()["error"]


@pytest.mark.parametrize(("method", "path", "body"), WORK)
async def test_work_takes_the_workers_token_alone(method: str, path: str, body: dict[str, object]) -> None:
    async with proxy_of(World(), tokens=TOKENS, serialise_commits=True) as proxy:
        reader = await proxy.http.request(method, path, json=body, headers=bearer(TOKENS.read))
        none = await proxy.http.request(method, path, json=body, headers={"authorization": "Basic dzp3"})
        worker = await proxy.http.request(method, path, json=body)
    assert (reader.status_code, none.status_code) == (403, 401)
    for reply in (reader, none):
        assert "BUCKETRL_WORKER_TOKEN" in reply.json()["error"]
        assert "secret" not in reply.text
    assert worker.status_code not in (401, 403)


async def test_every_route_but_probes_and_the_page_is_closed() -> None:
    """Also one that is added later: nothing is open by forgetting."""
    async with proxy_of(World(), tokens=TOKENS) as proxy:
        paths = [(method, route.path) for route in proxy.app.routes for method in route.methods]  # type: ignore[attr-defined]
        closed = []
        for method, path in paths:
            reply = await proxy.http.request(
                method, path.replace("{", "").replace("}", ""), headers=bearer("no")
            )
            closed.append((path, reply.status_code == 403))
    assert {path for path, is_closed in closed if not is_closed} == {"/", "/healthz", "/readyz"}


async def test_without_tokens_everything_is_open() -> None:
    async with proxy_of(World()) as proxy:
        assert (await proxy.get("/v1/run")).status_code == 200
        assert (await proxy.lease())["reason"] == "no_policy"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.3.2.1"])
def test_no_token_is_fine_where_nobody_else_can_reach(host: str) -> None:
    Tokens("", "").check_for(host)


@pytest.mark.parametrize(
    ("tokens", "host", "named"),
    [
        (Tokens("", ""), "0.0.0.0", "BUCKETRL_WORKER_TOKEN"),
        (Tokens("", ""), "::", "BUCKETRL_WORKER_TOKEN"),
        (Tokens("", ""), "box.example", "BUCKETRL_WORKER_TOKEN"),
        (Tokens("", "reader"), "127.0.0.1", "BUCKETRL_WORKER_TOKEN"),
        (Tokens("secret\n", ""), "127.0.0.1", "BUCKETRL_WORKER_TOKEN"),
        (Tokens("secret", "sécret"), "127.0.0.1", "BUCKETRL_READ_TOKEN"),
    ],
)
def test_tokens_that_will_not_do_are_refused_by_name(tokens: Tokens, host: str, named: str) -> None:
    with pytest.raises(UserError) as refusal:
        tokens.check_for(host)
    assert named in str(refusal.value)
    assert "cret" not in str(refusal.value)


def test_tokens_are_never_shown() -> None:
    assert "secret" not in repr(TOKENS)
