"""What a process on a node may listen on."""

import psutil
import ray

from actors.cluster.placement import listening_environment


def test_groups_listen_on_the_interface_of_the_nodes_address_unless_the_user_chose() -> None:
    address = ray.util.get_node_ip_address()
    environment = listening_environment({})
    assert environment["VLLM_HOST_IP"] == address
    assert address in [one.address for one in psutil.net_if_addrs()[environment["GLOO_SOCKET_IFNAME"]]]
    assert environment["NCCL_SOCKET_IFNAME"] == f"={environment['GLOO_SOCKET_IFNAME']}"
    assert listening_environment({"GLOO_SOCKET_IFNAME": "eth7"}).keys() == {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME"}
    assert listening_environment(environment) == {}
