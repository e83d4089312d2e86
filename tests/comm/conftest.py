"""What several tests of the backend share."""

from __future__ import annotations

import pytest

from echelon.comm import rendezvous


@pytest.fixture
def spread(monkeypatch):
    """`spread(2)`: ranks 0 and 1 on one host, 2 and 3 on the next. They share one, and are told otherwise, so that they
    meet over TCP.
    """

    def spread(on_each: int) -> None:
        def meet(store, rank, *rest, **more):
            monkeypatch.setattr(rendezvous, "_host_id", lambda: f"host {rank // on_each}")
            monkeypatch.setattr(rendezvous, "_own_addresses", lambda _store: ["127.0.0.1"])
            return real(store, rank, *rest, **more)

        real = rendezvous.meet
        monkeypatch.setattr("echelon.comm.backend.meet", meet)

    return spread
