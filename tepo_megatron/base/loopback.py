"""Keep clients of servers on this machine from the proxy that the environment names for the rest of the world."""

from collections.abc import Mapping

_VARIABLES = "NO_PROXY", "no_proxy"  # clients differ in which one they prefer
_HOSTS = "127.0.0.1", "localhost", "::1"


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which clients reach the loopback interface directly."""
    exempt = [host.strip() for name in _VARIABLES for host in environment.get(name, "").split(",") if host.strip()]
    hosts = ["*"] if "*" in exempt else dict.fromkeys([*exempt, *_HOSTS])  # clients know "*" only if it is alone
    return dict.fromkeys(_VARIABLES, ",".join(hosts))
