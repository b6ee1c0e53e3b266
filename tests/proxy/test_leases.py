"""The lease table against a plain list, under random use."""

from hypothesis import given
from hypothesis import strategies as st

from bucketrl.proxy.leases import LeaseTable, LiveLease

ACTIONS = st.lists(
    st.tuples(st.sampled_from("ARNO"), st.integers(0, 5), st.sampled_from("ab"), st.integers(1, 20)),
    max_size=60,
)


@given(ACTIONS)
def test_every_way_of_looking_agrees(actions: list[tuple[str, int, str, int]]) -> None:
    """A: add a lease of a group; R: remove the oldest of a group; N: renew all of a worker; O: overdue ones
    go. The number is the seconds that pass before."""
    table, plain, now = LeaseTable(), list[LiveLease](), 0.0
    for number, (action, ordinal, worker, seconds) in enumerate(actions):
        now += seconds
        if action == "A":
            lease = LiveLease(f"l{number}", worker, ordinal, 0, now, now + 3 * ordinal + 10)
            table.add(lease)
            plain.append(lease)
        elif action == "R":
            for lease in table.of_group(ordinal)[:1]:
                table.remove(lease)
                plain.remove(lease)
        elif action == "N":
            for lease in table.of_worker(worker):
                lease.deadline = max(lease.deadline, now + 15)
        else:
            late = table.overdue(now)
            assert late == [lease for lease in plain if lease.deadline <= now]
            for lease in late:
                table.remove(lease)
                plain.remove(lease)
        assert list(table) == plain
        assert len(table) == len(plain)
        for n in range(6):
            assert list(table.of_group(n)) == [lease for lease in plain if lease.ordinal == n]
        assert sorted(table.leased_ordinals()) == sorted({lease.ordinal for lease in plain})
        for name in "ab":
            mine = [lease for lease in plain if lease.worker_id == name]
            assert table.of_worker(name) == mine
            assert table.count_of(name) == len(mine)
        assert all(table.get(lease.lease_id) is lease for lease in plain)
