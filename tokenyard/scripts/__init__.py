"""One typed method for each Lua file in ``tokenyard/scripts/lua``.

`Scripts` calls them over a synchronous connection; both clients use the same `Call` values. Scripts
are called by EVALSHA with the hash of their text, so two versions of Tokenyard can share a server.
Expected refusals are return values here; only a former leader's calls raise (`LostLeadership`).
"""

from tokenyard.scripts.client import ClientScripts
from tokenyard.scripts.leader import LeaderScripts
from tokenyard.scripts.worker import WorkerScripts


class Scripts(ClientScripts, LeaderScripts, WorkerScripts):
    """The scripts of one yard over one synchronous connection pool."""
