"""Several hosts on one machine: network namespaces, joined by links of a limited rate.

Real hosts for MPI and Horovod: each has its own address, host name and shared memory, and nothing
but its link to the others; only files and processors are common.  Needs Linux and root::

    with cluster.Network(hosts=4, rate="1gbit") as network:
        before = network.traffic()
        network.run([sys.executable, "train.py"], timeout=60)
        received = network.traffic()[1].received - before[1].received

From a shell: ``python tests/cluster --hosts 4 --rate 1gbit -- python train.py``.
"""

from .network import Network, NetworkError, Traffic, unavailable

__all__ = ["Network", "NetworkError", "Traffic", "unavailable"]
