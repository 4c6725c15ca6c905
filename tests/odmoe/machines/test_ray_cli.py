"""What of Ray's output tells why it failed."""

from __future__ import annotations

from odmoe.machines import ray_cli


def test_what_ray_prints_is_told_by_its_telling_lines() -> None:
    lines = [
        "Local node IP: 10.0.0.1",
        "2026-11-21 16:00:00,123\tINFO updater.py:9 -- Waiting",
        "Traceback (most",
        '  File "x.py", line 3, in f',
        "ssh: connect to host 10.0.0.2 port 22: No route to host",
        "",
        "done",
    ]
    assert ray_cli.telling([*lines[:2], lines[-1]]) == "done"
    assert ray_cli.telling([*lines, "Failed to start"]) == "Failed to start"
    assert ray_cli.telling([]) == "no message"


def test_of_ray_s_own_log_the_grave_line_is_told() -> None:
    line = (
        "[2026-11-21 16:32:00,357 C 883 883] (raylet) grpc_server.cc:134:  An unexpected system state has occurred. "
        "You have found a bug, and we'll work with you to fix it. Check failed: server_ The specified port is 6380."
    )
    assert ray_cli.telling([line], 1) == "Check failed: server_ The specified port is 6380."
    assert ray_cli.GRAVE.search(line)
    assert not ray_cli.GRAVE.search(line.replace(" C 883", " I 883"))


def test_times_that_ray_allows_itself_are_told_plainly() -> None:
    line = (
        "[2026-11-21 16:32:00,357 C 883 883] (raylet) node_manager.cc:3557:  An unexpected system state has occurred. "
        "Check failed: port Timed out waiting for file /tmp/ray/session_1/dashboard_agent_listen_port_ab12"
    )
    assert ray_cli.telling([line], 1).startswith("Ray's agent there took longer than the 15 s that Ray gives it; start")
    slow = "Exception: The current node timed out during startup. This could happen because some of the raylet failed."
    assert ray_cli.telling(["ray start", slow], 1).startswith("Ray took longer to start there than the 30 s")
