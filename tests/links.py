"""Links for tests that use both ends themselves."""

from __future__ import annotations

from canary_obs.transport.links import LocalLink


class OneThreadLink(LocalLink):
    """A link whose two ends belong to one thread: while an engine closes it, nobody can read from it."""

    def close(self, linger_seconds: float = 0.0) -> None:
        """Stop sending; what is queued can be read later."""
        super().close()
