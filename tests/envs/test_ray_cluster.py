"""What is said where a process doesn't come into a Ray cluster; without Ray."""

from __future__ import annotations

import socket

import pytest

from torchrl_hts.envs.ray_cluster import reaching_ray


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_where_nobody_listens_nothing_is_tried(form: str, nobodys_address: str) -> None:
    address = form.format(nobodys_address)
    said = f"there is no Ray cluster at address='{address}' .*refused.*ray start"
    with pytest.raises(ConnectionError, match=said), reaching_ray(address):
        pytest.fail("tried")


def test_who_listens_and_lets_nobody_in_is_told_so() -> None:
    """Such as a cluster that asks for a token, which Ray has no words for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        said = rf"something listens at address='{address}'.*\(failed; .*RAY_AUTH_MODE=token"
        with (
            pytest.raises(ConnectionError, match=said),
            reaching_ray(address),
        ):
            raise ConnectionError("failed")


def test_without_a_place_in_the_address_ray_has_the_word() -> None:
    said = r"no Ray cluster at address='auto' \(nothing runs\): start one"
    with pytest.raises(ConnectionError, match=said), reaching_ray("auto"):
        raise ConnectionError("nothing runs")
